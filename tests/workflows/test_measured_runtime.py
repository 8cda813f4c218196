"""The serving runtime, timed for the advisor."""

from __future__ import annotations

import pytest

from tests.support.runtimes import byte_codec
from tests.support.step_engines import BurstingTableEngine, TableEngine
from toolkit.errors import StageError
from toolkit.workflows.measured_runtime import MeasuredRuntime

PROMPT = [1, 2, 3]


def measured(engine: type[TableEngine], **settings: int) -> MeasuredRuntime:
    target, draft = (engine(seed, vocab_size=300, **settings) for seed in (1, 2))
    return MeasuredRuntime(target, draft, byte_codec(), eos_token_ids=())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft_len", [0, 3])
def test_of_a_burst_each_step_is_timed(draft_len: int, temperature: float) -> None:
    """Each step of this engine's bursts takes 1 and 2 ns; it takes many before it returns."""
    runtime = measured(BurstingTableEngine)
    times = runtime.time_steps("draft_target", [PROMPT], draft_len, temperature, 8)
    assert times.draft_ns == (1,) * 8
    assert times.verify_ns == (2,) * 8
    assert len(times.host_ns) == 8 and len(times.prefill_ns) == 1


@pytest.mark.parametrize("engine", [TableEngine, BurstingTableEngine])
def test_all_prompts_share_each_timed_step(engine: type[TableEngine]) -> None:
    times = measured(engine).time_steps("draft_target", [PROMPT] * 4, 3, 0.0, 5)
    assert len(times.draft_ns) == len(times.verify_ns) == len(times.host_ns) == 5
    assert min(times.verify_ns) > 2  # the clock's, since a burst serves one request


def test_reading_a_prompt_alone_times_no_step() -> None:
    times = measured(TableEngine).time_steps("none", [PROMPT], 0, 0.0, 0)
    assert times.verify_ns == () and times.prefill_ns[0] > 0


def test_a_context_without_room_for_a_step_is_an_error() -> None:
    runtime = measured(TableEngine, max_seq_len=20)
    with pytest.raises(StageError, match="too little room to time a step"):
        runtime.time_steps("draft_target", [[1] * 18], 3, 0.0, 8)
