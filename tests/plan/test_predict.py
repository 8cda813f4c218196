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
    # However the text is divided into batches, a layer visits the GPU once, and the hidden states
    # of all tokens (8192 values of 2 bytes) go there and back for each of the 80 layers.
    of_size = {
        size: stage_times(
            subject(
                "engine",
                calibration__calib_size=512,
                calibration__calib_max_seq_length=2048,
                calibration__batch_size=size,
            )
        )[0]
        for size in (1, 8)
    }
    assert of_size[1] == of_size[8]
    hidden = 2 * 8192 * 512 * 2048
    computing = 2 * 70.6e9 * 512 * 2048 / (989e12 * 0.4)
    moved, files = 141.1e9 + 160 * hidden, 141.1e9 + 72.7e9
    assert of_size[1].seconds == pytest.approx(computing + moved / 10e9 + files / 1e9, rel=0.01)
    assert "34 GB of hidden states lie on the disk" in of_size[1].formula
    assert of_size[1].formula.endswith(f"up to {160 * hidden / 1e9 / 60:.0f} min more")
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
