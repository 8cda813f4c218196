"""The formulas agree with the paper's tables, and the roofline with published measurements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.deployments import LLAMA, subject
from toolkit.checkpoints.shape import parse_shape
from toolkit.facts.gpus import GPUS
from toolkit.facts.models import CONFIGS
from toolkit.plan.predict import break_even, forward_seconds, predict, stage_times, tokens_per_step


# Leviathan et al. 2023, table 1 (drafting costs nothing): acceptance rate, draft length, speedup.
@pytest.mark.parametrize(
    "rate, draft_len, expected",
    [
        (0.6, 2, 1.96),
        (0.7, 3, 2.53),
        (0.8, 2, 2.44),
        (0.8, 5, 3.69),
        (0.9, 2, 2.71),
        (0.9, 10, 6.86),
    ],
)
def test_tokens_a_step_are_those_of_the_paper(rate: float, draft_len: int, expected: float) -> None:
    assert tokens_per_step(rate, draft_len) == pytest.approx(expected, abs=0.005)


# The same paper, tables 2 and 4: acceptance rate, draft length, cost of a draft step divided by
# that of a target step, predicted speedup.
@pytest.mark.parametrize(
    "rate, draft_len, cost, expected",
    [(0.75, 7, 0.02, 3.2), (0.80, 7, 0.04, 3.3), (0.82, 7, 0.11, 2.5)],
)
def test_speed_is_that_of_the_paper(
    rate: float, draft_len: int, cost: float, expected: float
) -> None:
    assert tokens_per_step(rate, draft_len) / (draft_len * cost + 1) == pytest.approx(
        expected, abs=0.06
    )


def test_the_roofline_of_llama_70b_lies_above_what_was_measured() -> None:
    """NVIDIA, Llama 3.3 70B in FP8 on one H200 at batch 1: 51.14 tokens/s, and 181.74 with the
    1B draft.
    """
    first, *_ = predict(
        subject("pytorch", engine__max_input_len=512, speculation__max_draft_len=10)
    )
    assert first.bound == "bandwidth"
    assert first.plain_tokens_per_s is not None and 51.14 < first.plain_tokens_per_s < 51.14 / 0.7
    best = first.speculative[-1].tokens_per_s
    assert best is not None and best > 181.74


def test_the_roofline_of_llama_405b_on_four_h200_lies_above_what_was_measured() -> None:
    """NVIDIA, Llama 3.1 405B in FP8 over four H200: 33.46 tokens/s."""
    keys = {
        "target__checkpoint": "meta-llama/Llama-3.1-405B-Instruct",
        "hardware__count": 4,
        "engine__tp_size": 4,
    }
    plain = predict(subject("pytorch", **keys))[0].plain_tokens_per_s
    assert plain is not None and 33.46 < plain < 33.46 / 0.6


def test_large_batches_are_bound_by_arithmetic() -> None:
    shape = parse_shape(CONFIGS[LLAMA], where=LLAMA)
    one = forward_seconds(shape, "FP8", "FP8", GPUS["H200"], batch=1, tokens=1, context=0)
    many = forward_seconds(shape, "FP8", "FP8", GPUS["H200"], batch=2048, tokens=1, context=0)
    assert (one[1], many[1]) == (False, True)
    # 2 x 69.5 G weights (all but the embedding table) x 2048 tokens at 1979 TFLOP/s
    assert many[0] == pytest.approx(2 * 69.5e9 * 2048 / 1978.9e12, rel=0.01)


@given(
    draft_len=st.integers(1, 16),
    draft=st.floats(0.001, 2.0),
    verify=st.floats(1.0, 3.0),
)
def test_at_break_even_drafting_is_as_fast_as_not(
    draft_len: int, draft: float, verify: float
) -> None:
    rate = break_even(draft_len, 1.0, draft, verify)
    cost = draft_len * draft + verify
    if rate is None:
        assert tokens_per_step(1.0, draft_len) <= cost
    else:
        assert tokens_per_step(rate, draft_len) == pytest.approx(cost, rel=1e-6)


def test_without_a_known_device_only_ratios_are_left() -> None:
    # The ratio counts weights alone, so it is the same at every batch size.
    [prediction] = predict(subject("torch", engine__max_batch_size=8))
    assert prediction.plain_tokens_per_s is None
    assert prediction.cost_ratio == pytest.approx(1.0)  # the draft of this base is its target
    fastest = prediction.speculative[-1]
    assert fastest.tokens_per_s is None and fastest.speedup < 1.0
    assert stage_times(subject("torch")) == ()


def test_looking_the_text_up_costs_no_forward_and_no_memory() -> None:
    first, *_ = predict(subject("pytorch", draft=None, speculation__kind="ngram"))
    assert first.cost_ratio == 0.0
    assert first.speculative[0].speedup == pytest.approx(
        first.speculative[0].tokens_per_step, rel=0.01
    )


def test_plain_decoding_has_no_row_of_speculation() -> None:
    first, *_ = predict(subject("pytorch", draft=None, speculation__kind="none"))
    assert first.speculative == () and first.break_even is None


def test_more_calibration_text_takes_longer_and_only_the_engine_flow_compiles() -> None:
    def seconds(size: int) -> float:
        return sum(
            time.seconds for time in stage_times(subject("engine", calibration__calib_size=size))
        )

    assert seconds(1024) > seconds(128)
    # 512 batches of one line move 141 GB to the GPU 512 times, at 10 GB/s; batches of eight lines
    # do so an eighth as often.
    one, eight = (
        stage_times(subject("engine", calibration__calib_size=512, calibration__batch_size=size))[
            0
        ].seconds
        for size in (1, 8)
    )
    assert one - eight == pytest.approx((512 - 64) * 141.1e9 / 10e9, rel=0.01)
    # If the host's memory does not hold the source, each batch also reads it from the disk at
    # 1 GB/s.
    formula = stage_times(
        subject("engine", calibration__calib_size=512, calibration__batch_size=8)
    )[0].formula
    assert formula.endswith(
        f"with less than 141 GB of memory free for the source's files, up to {64 * 141.1 / 60:.0f}"
        " min more"
    )
    assert {time.stage for time in stage_times(subject("engine"))} == {
        "quantize/target",
        "compile/target",
        "quantize/draft",
        "compile/draft",
    }
    assert {time.stage for time in stage_times(subject("pytorch"))} == {
        "quantize/target",
        "quantize/draft",
    }
