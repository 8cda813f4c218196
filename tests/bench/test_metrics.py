from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.endpoint import ScriptedEndpoint
from tests.support.timings import timing
from toolkit.bench import metrics
from toolkit.bench.definitions import METRICS
from toolkit.client import RequestTiming, Statistics
from toolkit.records.measured import TooFew

MS = 1_000_000


def test_every_latency_by_hand() -> None:
    """Sent at 10; chunks of 1, 4 and 2 tokens at 30, 50 and 58."""
    one = timing([(30, 1), (50, 4), (58, 2)], sent_ms=10)
    arm = metrics.arm([[one]])
    mean = {name: latency.mean for name, latency in arm.latencies.items()}
    assert mean["ttft"] == 20
    assert mean["e2e"] == 48
    assert mean["tpot"] == pytest.approx(28 / 6, abs=1e-5)
    assert mean["icl"] == pytest.approx((20 + 8) / 2)
    assert mean["itl"] == pytest.approx((4 * 5 + 2 * 4) / 6)
    assert arm.latencies["itl"].samples == 6
    assert arm.latencies["icl"].samples == 2
    assert arm.tokens_per_s == pytest.approx(7 / 0.048)


def test_throughput_is_a_ratio_of_sums() -> None:
    fast, slow = timing([(1, 1), (10, 9)]), timing([(50, 1), (100, 1)])
    arm = metrics.arm([[fast, slow]])
    assert arm.tokens_per_s == pytest.approx(12 / 0.110)
    assert arm.tokens_per_s_by_prompt == (pytest.approx(1000), pytest.approx(20))


def test_an_empty_answer_counts_as_a_request_and_adds_no_latency() -> None:
    empty = RequestTiming("p", "", (), "stop", 0, (), Statistics(output_tokens=0))
    arm = metrics.arm([[empty, timing([(5, 1), (10, 1)])]])
    assert (arm.requests, arm.output_tokens) == (2, 2)
    assert arm.latencies["ttft"].samples == 1
    assert arm.tokens_per_s_by_prompt[0] == 0.0


def test_tpot_is_absent_below_two_tokens() -> None:
    assert metrics.arm([[timing([(5, 1)])]]).latencies["tpot"].samples == 0


def test_percentiles_without_enough_samples_are_absent_with_the_reason() -> None:
    rounds = [[timing([(i + 1, 1), (i + 2, 1)]) for i in range(24)]]
    ttft = metrics.arm(rounds).latencies["ttft"]
    assert ttft.p50 == pytest.approx(12.5)
    assert ttft.p90 is None
    assert ttft.unsupported["p90"] == TooFew(ttft.samples, 100)
    assert "p90 needs 100" in metrics.too_few_words(90, ttft.unsupported["p90"])
    assert set(ttft.unsupported) == {"p90", "p99"}
    assert (ttft.p90_low, ttft.p90_high) == (None, None)


def test_supported_percentiles_are_numpys_and_lie_in_their_interval() -> None:
    generator = np.random.default_rng(0)
    waits = generator.integers(1, 500, size=(5, 30))
    rounds = [[timing([(int(wait), 1)]) for wait in row] for row in waits]
    ttft = metrics.arm(rounds).latencies["ttft"]
    assert ttft.p90 == pytest.approx(np.percentile(waits, 90))
    assert ttft.p90_low is not None and ttft.p90_high is not None
    assert ttft.p90_low <= ttft.p90 <= ttft.p90_high
    assert ttft.curve[0] == waits.min() and ttft.curve[100] == waits.max()


def test_acceptance_sums_before_it_divides() -> None:
    long = timing(
        [(1, 9)],
        drafted=40,
        accepted=10,
        verify_steps=10,
        drafted_by_position=(10, 10),
        accepted_by_position=(7, 3),
    )
    short = timing(
        [(1, 2)],
        drafted=2,
        accepted=2,
        verify_steps=1,
        drafted_by_position=(1, 1),
        accepted_by_position=(1, 1),
    )
    acceptance = metrics.acceptance([long, short])
    assert acceptance.rate == pytest.approx(12 / 42)
    assert acceptance.length == pytest.approx(1 + 12 / 11)
    first, second = acceptance.by_position
    assert (first.joint, first.conditional) == (pytest.approx(8 / 11), pytest.approx(8 / 11))
    assert second.joint == pytest.approx(4 / 11)
    assert second.conditional == pytest.approx(0.5)


def test_alpha_from_counts_undoes_truncation_within_its_interval() -> None:
    """Blocks of 4 drafts kept with 0.7 each: accepted / drafted says 0.44, the likelihood 0.7."""
    generator = np.random.default_rng(0)
    requests = []
    for prompt in range(60):
        kept = np.cumprod(generator.random((50, 4)) < 0.7, axis=1).sum(axis=0).tolist()
        counts = {"drafted": 200, "accepted": sum(kept), "verify_steps": 50}
        one = timing(
            [(1, 9)], **counts, drafted_by_position=(50,) * 4, accepted_by_position=tuple(kept)
        )
        requests.append(dataclasses.replace(one, prompt=f"prompt {prompt}"))
    found = metrics.acceptance(requests)
    assert found.rate == pytest.approx(0.44, abs=0.02) and found.alpha is not None
    assert found.alpha.low < 0.7 < found.alpha.high
    assert found.alpha.estimate == pytest.approx(0.7, abs=0.02)
    assert found.alpha.high - found.alpha.low < 0.05
    repeated = metrics.acceptance(
        requests * 5
    ).alpha  # rounds repeat the prompts, and tell nothing new
    assert repeated == found.alpha


def test_alpha_of_totals_alone_agrees_with_that_of_positions() -> None:
    """As TensorRT-LLM counts: tokens kept and steps, and not how many were drafted."""
    generator = np.random.default_rng(1)
    requests = []
    for prompt in range(60):
        kept = int(np.cumprod(generator.random((50, 4)) < 0.7, axis=1).sum())
        one = timing([(1, 9)], accepted=kept, verify_steps=50)
        requests.append(dataclasses.replace(one, prompt=f"prompt {prompt}"))
    found = metrics.acceptance(requests, draft_len=4)
    assert found.rate is None and found.alpha is not None
    assert found.alpha.low < 0.7 < found.alpha.high < found.alpha.low + 0.05
    assert metrics.acceptance(requests).alpha is None  # of blocks of unknown length
    drafted = [
        dataclasses.replace(one, statistics=dataclasses.replace(one.statistics, drafted=200))
        for one in requests
    ]
    assert metrics.acceptance(drafted).alpha == found.alpha


@pytest.mark.parametrize(("kept", "alpha"), [(0.0, 0.0), (3.0, 1.0)])
def test_alpha_of_totals_has_its_ends(kept: float, alpha: float) -> None:
    one = timing([(1, 9)], accepted=int(10 * kept), verify_steps=10)
    found = metrics.acceptance([one], draft_len=3).alpha
    assert found is not None and found.estimate == pytest.approx(alpha, abs=1e-9)


def test_where_nothing_is_drafted_there_is_no_alpha() -> None:
    one = timing([(1, 9)], drafted=0, accepted=0, verify_steps=10)
    assert metrics.acceptance([one], draft_len=3).alpha is None


def test_acceptance_of_a_server_that_says_nothing_is_absent() -> None:
    acceptance = metrics.acceptance([timing([(1, 2)])])
    assert acceptance.alpha is None
    assert (acceptance.rate, acceptance.length, acceptance.by_position) == (None, None, ())


@given(st.lists(st.integers(0, 3), max_size=40))
def test_distinct_4grams_are_a_share(tokens: list[int]) -> None:
    share = metrics.distinct_ngrams(tokens)
    assert (share is None) == (len(tokens) < 4)
    assert share is None or 0 < share <= 1


def test_loops_have_few_distinct_4grams() -> None:
    assert metrics.distinct_ngrams([1, 2] * 30) == pytest.approx(2 / 57)
    assert metrics.distinct_ngrams(list(range(60))) == 1.0


def test_scripted_speedup_is_measured_exactly() -> None:
    """Prefill of 5 ms and 63 tokens more: plain 2 ms each, speculative 3 ms per step of 5, 3 and
    4 tokens in turn.
    """
    endpoint = ScriptedEndpoint()
    prompts = [f"prompt {i}" for i in range(10)]
    plain = endpoint.measure(prompts, temperature=0.0, max_tokens=64, num_draft_tokens=0)
    speculative = endpoint.measure(prompts, temperature=0.0, max_tokens=64)
    found = metrics.speedup([speculative], [plain])
    steps = len(speculative[0].chunks) - 1
    assert found.estimate == pytest.approx((5 + 63 * 2) / (5 + steps * 3))
    assert found.low == pytest.approx(found.high)


def test_every_figure_has_a_definition() -> None:
    shown = {
        *metrics.LATENCIES,
        "tokens_per_s",
        "speedup",
        "acceptance_rate",
        "acceptance_length",
        "parity",
        "kl_mean",
    }
    assert shown <= set(METRICS)
    assert all(one.formula and one.numerator for one in METRICS.values())


def test_every_supported_percentile_has_its_interval() -> None:
    waits = np.random.default_rng(0).integers(1, 500, size=(25, 40))
    ttft = metrics.arm([[timing([(int(wait), 1)]) for wait in row] for row in waits]).latencies[
        "ttft"
    ]
    for q in (50, 90, 99):
        low, value, high = (getattr(ttft, f"p{q}{end}") for end in ("_low", "", "_high"))
        assert value == pytest.approx(np.percentile(waits, q))
        assert low <= value <= high


def test_ratios_of_latencies_are_per_percentile_and_absent_with_the_reason() -> None:
    fast = [[timing([(10 + i, 1), (20 + 2 * i, 3)]) for i in range(25)]]
    slow = [[timing([(20 + 2 * i, 1), (40 + 4 * i, 3)]) for i in range(25)]]
    found = {one.name: one for one in metrics.latency_ratios(slow, fast)}
    for name in ("ttft_p50", "e2e_p50", "tpot_p50", "itl_p50", "icl_p50"):
        assert (found[name].estimate, found[name].low, found[name].high) == pytest.approx((2, 2, 2))
    assert found["ttft_p99"].estimate is None and "p99 needs 1000" in (
        found["ttft_p99"].reason or ""
    )
    assert found["ttft_p99"].too_few == TooFew(25, 1000)


@pytest.mark.parametrize(("q", "needed"), [(50, 20), (90, 100), (99, 1000)])
def test_too_few_samples_are_two_numbers(q: int, needed: int) -> None:
    assert metrics.too_few(needed, q) is None
    lacking = metrics.too_few(needed - 1, q)
    assert lacking == TooFew(needed - 1, needed)
    assert f"{needed - 1} samples; p{q} needs {needed}" in metrics.too_few_words(q, lacking)


def test_a_percentile_of_zero_divides_nothing() -> None:
    at_once = [[timing([(10, 1), (10, 3)]) for _ in range(25)]]
    apart = [[timing([(10, 1), (12, 3)]) for _ in range(25)]]
    ratio = next(one for one in metrics.latency_ratios(apart, at_once) if one.name == "icl_p50")
    assert ratio.estimate is None and "at once" in (ratio.reason or "")
    assert (
        next(
            one for one in metrics.latency_ratios(at_once, apart) if one.name == "icl_p50"
        ).estimate
        == 0.0
    )


def test_percentiles_that_are_zero_in_both_arms_have_no_ratio() -> None:
    """The draws in which both are zero are left out of the interval; those that remain are no
    reason for an estimate.
    """
    gaps = [0] * 13 + [2] * 12
    rows = [[timing([(10, 1), (10 + gap, 3)]) for gap in gaps]]
    ratio = next(one for one in metrics.latency_ratios(rows, rows) if one.name == "icl_p50")
    assert ratio.estimate is None and "at once" in (ratio.reason or "")


def test_failed_requests_are_missing_from_a_ratio_and_break_nothing() -> None:
    rounds = [[timing([(10, 1)]) for _ in range(25)]]
    ratio = next(
        one
        for one in metrics.latency_ratios([[None, *rounds[0][1:]]], rounds)
        if one.name == "ttft_p50"
    )
    assert ratio.estimate == 1.0
    gone = next(
        one for one in metrics.latency_ratios([[None] * 25], rounds) if one.name == "ttft_p50"
    )
    assert (gone.estimate, gone.reason, gone.too_few) == (None, "no samples", None)


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    good = timing([(10, 1), (20, 1), (30, 1)])
    late = timing([(60, 1), (70, 1)])
    stalled = timing([(10, 1), (11, 1), (90, 1)])
    single = timing([(10, 1)])
    requests = [good, late, stalled, single, None]
    assert metrics.goodput(requests, {"ttft": 50}, 2.0) == 1.5
    assert (
        metrics.goodput(requests, {"ttft": 50, "itl": 30}, 2.0) == 1.0
    )  # one token has no gap that is too long
    uncounted = RequestTiming(
        "p", "ab", (), None, 0, ((5 * MS, None), (9 * MS, None)), Statistics()
    )
    assert metrics.goodput([uncounted], {"ttft": 50}, 1.0) == 1.0
    assert (
        metrics.goodput([uncounted], {"ttft": 50, "tpot": 30}, 1.0) == 0.0
    )  # not known is not met
    assert metrics.goodput(requests, {"e2e": 1000}, 0.0) == 0.0


def test_acceptance_is_told_by_prompt_length_and_reused_prefix() -> None:
    def answer(prompt_tokens: int, accepted: int, reused: int | None = None) -> RequestTiming:
        return timing(
            [(1, 5)],
            input_tokens=prompt_tokens,
            drafted=8,
            accepted=accepted,
            verify_steps=4,
            reused_blocks=reused,
        )

    requests = [answer(20, 6, 0), answer(100, 4, 2), answer(9000, 2, 0)]
    short, long, new, reused = metrics.acceptance_slices([*requests, timing([(1, 1)])])
    assert (short.of, short.least, short.most, short.requests) == ("prompt_tokens", 20, 100, 2)
    assert (short.rate, short.length) == (10 / 16, 1 + 10 / 8)
    assert (long.least, long.requests, long.rate) == (9000, 1, 0.25)
    assert (new.of, new.requests, new.rate) == ("new_prefix", 2, 0.5)
    assert (reused.of, reused.requests, reused.length) == ("reused_prefix", 1, 2.0)
    assert short.by_position == ()  # not told
    untold = metrics.acceptance_slices([answer(20, 6), answer(30, 4, None)])
    assert [part.of for part in untold] == ["prompt_tokens"]
    assert metrics.acceptance_slices([timing([(1, 1)])]) == ()


def of_prompt(prompt: str, sent_ms: int, accepted_at: tuple[int, ...]) -> RequestTiming:
    """A request of four steps with two draft tokens each."""
    told = timing(
        [(sent_ms + 1, 5)],
        sent_ms=sent_ms,
        input_tokens=20,
        drafted=8,
        accepted=sum(accepted_at),
        verify_steps=4,
        drafted_by_position=(4, 4),
        accepted_by_position=accepted_at,
    )
    return dataclasses.replace(told, prompt=prompt)


def test_acceptance_is_told_by_domain_and_position() -> None:
    requests = [of_prompt("a", 0, (4, 2)), of_prompt("b", 1, (2, 0)), of_prompt("a", 2, (2, 2))]
    domains = {"a": "code", "b": "chat"}
    everything, chat, code = metrics.acceptance_slices(requests, domains)
    assert (everything.of, everything.by_position) == ("prompt_tokens", (8 / 12, 4 / 12))
    assert (chat.of, chat.name, chat.requests, chat.length) == ("domain", "chat", 1, 1.5)
    assert (code.name, code.requests, code.by_position) == ("code", 2, (6 / 8, 4 / 8))
    # One domain alone says what the whole does.
    assert len(metrics.acceptance_slices(requests, {"a": "code"})) == 1
    assert len(metrics.acceptance_slices(requests)) == 1


def test_acceptance_over_time_is_in_windows_of_equally_many_requests() -> None:
    """Between them another arm had its turn."""
    early = [of_prompt("a", at, (4, 2)) for at in range(0, 1000, 50)]
    late = [of_prompt("b", at, (2, 0)) for at in range(9000, 10000, 50)]
    unsorted = [*late, *early]
    windows = metrics.acceptance_over_time(unsorted)
    assert [window.requests for window in windows] == [8] * 5
    assert [(window.begin_s, window.end_s) for window in windows[:3]] == [
        (0, 0.35),
        (0.4, 0.75),
        (0.8, 9.15),
    ]
    assert windows[0].by_position == (1.0, 0.5) and windows[0].length == 2.5
    assert windows[2].by_position == (0.75, 0.25)
    assert windows[-1].by_position == (0.5, 0.0) and windows[-1].rate == 0.25
    many = metrics.acceptance_over_time(unsorted * 10)
    assert len(many) == metrics.MOST_WINDOWS
    assert metrics.acceptance_over_time(early[:15]) == ()
    assert metrics.acceptance_over_time([timing([(1, 1)])] * 100) == ()


def delivered(
    arrival_ms: float, first_ms: float, received_ms: float, ahead_ms: float = 0.0
) -> RequestTiming:
    """Sent at 100 ms, over at 200 ms. ahead_ms: of the server's clock before the client's."""
    request = timing([(received_ms, 1), (200, 1)], sent_ms=100)
    times = {
        "arrival_ns": round((arrival_ms + ahead_ms) * MS),
        "first_token_ns": round((first_ms + ahead_ms) * MS),
    }
    return dataclasses.replace(request, statistics=dataclasses.replace(request.statistics, **times))


def test_a_late_first_token_is_late_on_the_way_in_or_out() -> None:
    """A tenth of the request is 10 ms."""
    on_time, late_in, late_out = (101, 110, 111), (125, 130, 131), (101, 110, 130)
    figures = metrics.delivery([delivered(*times) for times in (on_time, late_in, late_out)])
    assert figures == metrics.Delivery(judged=3, late=2, same_clock=3, late_in=1, late_out=1)
    little_by_little = metrics.delivery([delivered(107, 110, 117)])
    assert (little_by_little.late, little_by_little.late_in, little_by_little.late_out) == (1, 0, 0)


def test_lateness_is_not_split_between_two_clocks() -> None:
    for ahead_ms in (-90.0, 3_600_000.0):
        figures = metrics.delivery([delivered(101, 110, 130, ahead_ms)])
        assert figures == metrics.Delivery(1, late=1, same_clock=0, late_in=0, late_out=0)


def test_requests_without_the_servers_times_are_not_judged() -> None:
    assert metrics.delivery([timing([(5, 1), (10, 1)])]).judged == 0
