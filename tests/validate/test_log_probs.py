"""Greedy parity by what the arms say of their own tokens: the judge, then a whole validation
over the stand-in of `LLM`.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.client import RequestRefused, RequestTiming, Statistics, read_chunk, timing
from toolkit.config.schema import DistributionGates, LatencyGates, ParityGates, ValidationConfig
from toolkit.errors import RequestError
from toolkit.facts.capabilities import Capabilities, capabilities_of
from toolkit.records.build import Quality
from toolkit.records.judged import Divergence
from toolkit.records.report import ValidationReport
from toolkit.standins.trtllm.tensorrt_llm.toy import ASTRAY, TIE, TIED, SamplingParams, Toy
from toolkit.triton.tensors.bls import token_log_probs
from toolkit.triton.tensors.requests import Limits, parse
from toolkit.triton.tensors.trtllm_tensors import REQUEST_FORMAT, Responses, sampling_arguments
from toolkit.validate.arms import (
    WARM_UP_PROMPTS,
    Alternating,
    Sender,
    StreamShift,
    run_turns,
)
from toolkit.validate.log_probs import judge_log_probs, least_change
from toolkit.validate.replay import Replay, replay
from toolkit.validate.stage import Origin, References, Served, validate

MARGIN = 0.05
PLACE = 3
VOCAB = 24


def text(
    ids: Iterable[int],
    log_probs: Iterable[float],
    next_best: Iterable[tuple[int, float]] | None = None,
) -> RequestTiming:
    told = list(next_best or ())
    statistics = Statistics(
        log_probs=tuple(log_probs),
        next_best=tuple(token for token, _ in told) if told else None,
        next_best_log_probs=tuple(value for _, value in told) if told else None,
    )
    return RequestTiming("prompt", "", tuple(ids), "length", 0, (), statistics)


def said(rows: np.ndarray, ids: list[int], *, next_best: bool) -> RequestTiming:
    own, others = token_log_probs(rows, ids, None)
    return text(ids, own, others if next_best else None)


def kind_of(plain: RequestTiming, other: RequestTiming, margin: float = MARGIN) -> str:
    return judge_log_probs(PLACE, plain, other, "speculative", margin).kind


def chosen_at(
    plain: float, other: float, before: float = -0.3
) -> tuple[RequestTiming, RequestTiming]:
    """Chosen tokens alone; the three before have the same log-probability in the plain arm,
    `before` in the other.
    """
    return text([1, 2, 3, 4], [-0.3] * 3 + [plain]), text([1, 2, 3, 5], [before] * 3 + [other])


@pytest.mark.parametrize(
    ("plain", "other", "kind"),
    [
        (-0.70, -0.71, "equivalent"),
        (-2.00, -2.04, "equivalent"),  # of many
        (-0.66, -0.66, "equivalent"),  # 0.517 of the mass each: rounding of a half and a half
        (-0.70, -1.00, "suspicious"),
        (-0.40, -0.45, "suspicious"),  # two tokens of two thirds each
        (-0.70, -1.30, "broken"),
        (-0.02, -0.02, "broken"),  # both are sure, so they read different texts
        (0.0, -0.01, "broken"),
    ],
)
def test_the_class_follows_the_least_change_that_allows_both_choices(
    plain: float, other: float, kind: str
) -> None:
    assert kind_of(*chosen_at(plain, other)) == kind_of(*reversed(chosen_at(plain, other))) == kind


def test_a_drift_before_the_texts_part_is_a_fault_whatever_the_tie_looks_like() -> None:
    found = judge_log_probs(PLACE, *chosen_at(-0.70, -0.71, before=-0.9), "speculative", MARGIN)
    assert (found.kind, found.drift) == ("broken", pytest.approx(0.6))
    assert (
        "differ by 0.600 nats on a token that both chose" in found.detail
        and "served log-probabilities" in found.detail
    )
    assert (
        kind_of(*chosen_at(-0.70, -0.71, before=-0.5)) == "equivalent"
    )  # coarser rounding than the tie needs, and no fault


@pytest.mark.parametrize(
    ("plain", "other", "kind"),
    [
        ((5, -0.74), (4, -0.75), "equivalent"),
        ((5, -0.90), (4, -0.90), "suspicious"),
        ((9, -0.72), (4, -0.75), "equivalent"),  # three tokens nearly tie
        (
            (9, -0.90),
            (4, -0.75),
            "broken",
        ),  # the other choice is farther down than a suspicious one may be
        ((5, -2.00), (4, -0.75), "broken"),
    ],
)
def test_next_best_tokens_make_each_arm_the_other_s_reference(
    plain: tuple[int, float], other: tuple[int, float], kind: str
) -> None:
    own, others = text([1, 2, 3, 4], [-0.3] * 3 + [-0.71]), text([1, 2, 3, 5], [-0.3] * 3 + [-0.71])
    fill = [(0, -5.0)] * 3
    told = [
        text(one.token_ids, one.statistics.log_probs or (), [*fill, best])
        for one, best in ((own, plain), (others, other))
    ]
    found = judge_log_probs(PLACE, told[0], told[1], "speculative", MARGIN)
    assert found.kind == kind
    assert found.ranks == (1, 1 if plain[0] == 5 else 2)
    assert found.gaps == (pytest.approx(-0.71 - other[1]), pytest.approx(-0.71 - plain[1]))
    assert found.margin == found.gaps[1]


@given(
    seed=st.integers(0, 10**6),
    rounding=st.sampled_from([1e-3, 0.02, 0.1]),
    next_best=st.booleans(),
    near=st.integers(1, 3),
)
def test_rounding_is_never_taken_for_a_fault(
    seed: int, rounding: float, next_best: bool, near: int
) -> None:
    """Logits of each arm within `rounding` of the true ones move what is compared here by at
    most four times that.
    """
    generator = np.random.default_rng(seed)
    true = generator.normal(scale=3.0, size=(PLACE + 1, VOCAB))
    best = true[PLACE].max()
    true[PLACE, :near] = best - rounding * generator.random(near)
    arms = [true + generator.uniform(-rounding, rounding, true.shape) for _ in range(2)]
    shared = [int(row.argmax()) for row in true[:PLACE]]
    ids = [[*shared, int(rows[PLACE].argmax())] for rows in arms]
    if ids[0] == ids[1]:
        return
    plain, other = (
        said(rows, chosen, next_best=next_best) for rows, chosen in zip(arms, ids, strict=True)
    )
    assert kind_of(plain, other, 4 * rounding + 1e-9) == "equivalent"


@pytest.mark.parametrize(
    ("next_best", "missed", "broken"), [(False, 0.08, 0.4), (True, 0.01, 0.97)]
)
def test_few_arms_that_read_different_texts_pass_by_chance(
    next_best: bool, missed: float, broken: float
) -> None:
    generator = np.random.default_rng(5)
    kinds = []
    for _ in range(400):
        rows = generator.normal(scale=2.0, size=(2, PLACE + 1, VOCAB))
        rows[1, :PLACE] = rows[0, :PLACE]
        ids = [[int(row.argmax()) for row in arm] for arm in rows]
        if ids[0] != ids[1]:
            kinds.append(
                kind_of(
                    *(
                        said(arm, one, next_best=next_best)
                        for arm, one in zip(rows, ids, strict=True)
                    )
                )
            )
    assert len(kinds) > 300
    assert sum(kind == "equivalent" for kind in kinds) < missed * len(kinds)
    assert sum(kind == "broken" for kind in kinds) > broken * len(kinds)


@given(st.lists(st.floats(-20.0, 0.0), min_size=1, max_size=2))
def test_the_least_change_allows_both_choices_and_no_smaller_one_does(
    log_probs: list[float],
) -> None:
    change = least_change(log_probs)
    most = max(log_probs)
    assert 0.0 <= change < math.inf
    assert change >= most - min(log_probs)
    if most < -1e-6:
        assert math.exp(most) * (1 + math.exp(-2 * change)) <= 1 + 1e-9
    if change > most - min(log_probs) + 1e-9:
        assert math.exp(most) * (1 + math.exp(-2 * 0.99 * change)) > 1


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (None, "none came"),
        ([-0.1], "1 came for 4 tokens"),
        ([0.0] * 4, "all are 0"),
        ([-0.1, -math.inf, -0.1, -0.1], "they are no log-probabilities"),
        ([-0.1, 2.0, -0.1, -0.1], "they are no log-probabilities"),
    ],
)
def test_values_that_cannot_be_log_probabilities_explain_nothing(
    values: list[float] | None, why: str
) -> None:
    plain, other = chosen_at(-0.7, -0.7)
    odd = replace(other, statistics=Statistics(log_probs=None if values is None else tuple(values)))
    found = judge_log_probs(PLACE, plain, odd, "speculative", MARGIN)
    assert found.kind == "unexplained"
    assert f"the speculative arm's log-probabilities say nothing: {why}" in found.detail


def test_a_place_of_which_nothing_is_known_counts_only_where_the_texts_part() -> None:
    plain, other = (
        text([1, 2, 3, 4], [-0.3, math.nan, -0.3, -0.70]),
        text([1, 2, 3, 5], [-0.3, -9.0, -0.3, -0.71]),
    )
    found = judge_log_probs(PLACE, plain, other, "speculative", MARGIN)
    assert (found.kind, found.drift) == ("equivalent", 0.0)
    assert (
        kind_of(text([1, 2, 3, 4], [-0.3, -0.3, -0.3, math.nan]), other) == "broken"
    )  # the drift tells
    assert kind_of(text([1, 2, 3, 4], [-0.3, -9.0, -0.3, math.nan]), other) == "unexplained"


def test_an_end_has_no_log_probability_and_a_sure_token_beside_it_is_a_fault() -> None:
    for log_prob, kind in ((-0.8, "unexplained"), (-0.1, "broken")):
        ended, other = text([1, 2, 3], [-0.3] * 3), text([1, 2, 3, 5], [-0.3] * 3 + [log_prob])
        assert kind_of(ended, other) == kind_of(other, ended) == kind


# The stand-in of LLM(), asked as our model.py asks it.


@dataclass
class InProcess:
    """One arm's `LLM` behind our tensors. told: how many log-probabilities a place the version
    gives. fickle: asked for them, the arm says something else.
    """

    llm: Toy
    told: int = 2
    fickle: bool = False
    now_ns: int = 0

    def measure(self, prompts: Iterable[str], **options: Any) -> list[RequestTiming]:
        return [self._answer(prompt, options) for prompt in prompts]

    def _answer(self, prompt: str, options: dict[str, Any]) -> RequestTiming:
        tensors: dict[str, list[Any]] = {
            "text_input": [prompt],
            "streaming": [True],
            "sampling_param_max_tokens": [options["max_tokens"]],
            "sampling_param_temperature": [options["temperature"]],
            "sampling_param_stop": [word.encode() for word in options.get("stop") or ()],
        }
        wanted = (
            "return_token_ids",
            "return_num_input_tokens",
            "return_num_output_tokens",
            "return_finish_reason",
        )
        tensors |= {
            name: [True]
            for name in (*wanted, *(["return_log_probs"] if options.get("log_probs") else []))
        }
        request = parse(tensors, {}, Limits(decoupled=True, max_draft_len=0), REQUEST_FORMAT)
        try:
            parameters = SamplingParams(**sampling_arguments(request, 128, self.told))
        except RequestError as error:
            raise RequestRefused(str(error)) from error
        prompt = f"{TIED} {prompt}" if self.fickle and options.get("log_probs") else request.prompt
        responses, sent = Responses(request, self.now_ns, 0), self.now_ns
        chunks = []
        for output in asyncio.run(self._outputs(prompt, parameters)):
            self.now_ns += 1_000_000
            values = responses.of(output, self.now_ns, final=output.finished)
            if values is not None:
                chunks.append(read_chunk(values["text_output"][0], values, self.now_ns))
        return timing(prompt, chunks, sent)

    async def _outputs(self, prompt: str, parameters: SamplingParams) -> list[Any]:
        stream = self.llm.generate_async(prompt, parameters, streaming=True)
        return [output async for output in stream if output.finished]


def arms(
    folder: Path, fault: str | None = None, told: int = 2, fickle: str | None = None
) -> Alternating:
    def start(arm: str) -> InProcess:
        draft_len = 0 if arm == "plain" else 2
        return InProcess(Toy(draft_len, step_s=0.0, fault=fault), told, fickle=fickle == arm)

    return Alternating(start)


def abilities(*, asks: bool = True) -> Capabilities:
    """Of `LLM()`: one draft length, no arm that only verifies, no seeds that both arms share."""
    pytorch_flow = capabilities_of("trtllm_pytorch", "1.2.1", "auto", reuses_prefixes=False)
    return replace(pytorch_flow, log_probs=2 if asks else 0)


def judged(
    folder: Path,
    prompts: list[str],
    *,
    fault: str | None = None,
    told: int = 2,
    asks: bool = True,
    limit: float = 0.5,
    fickle: str | None = None,
    keep_replay: Callable[[Replay], str] | None = None,
) -> ValidationReport:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    config = ValidationConfig(
        prompts=path,
        max_tokens=10,
        rounds=1,
        max_rounds=1,
        parity=ParityGates(max_divergence_rate=limit),
        distribution=DistributionGates(enabled=False),
        latency=LatencyGates(min_speedup=None),
    )
    return validate(
        Served(arms(folder, fault, told, fickle), 2, abilities(asks=asks), rule="sample_match"),
        config,
        References(None),
        Origin("stand-in", Quality(None, None), {}, {}),
        keep_replay=keep_replay,
    )


def sampled_texts(folder: Path, shift: StreamShift | None) -> list[list[tuple[int, ...]]]:
    """The sampled texts of the first and of the second start of the plain arm, as they were sent:
    WARM_UP_PROMPTS and all prompts.
    """
    sender = Sender(arms(folder), 10, shift=shift)
    run_turns(
        sender,
        SOUND,
        rounds=2,
        max_rounds=2,
        undecided=lambda _: False,
        seed=0,
        temperatures=[0.8],
    )
    turn = WARM_UP_PROMPTS + len(SOUND)
    turns = [sender.sent[start : start + turn] for start in range(0, 4 * turn, turn)]
    return [[tuple(timing.token_ids) for timing in turns[index]] for index in (0, 2)]


def test_a_start_does_not_repeat_the_sampled_texts_of_the_one_before(tmp_path: Path) -> None:
    """This release ignores seeds and begins every start alike. Rounds would be compared as if they
    were independent, and be the same numbers again.
    """
    first, second = sampled_texts(tmp_path, None)
    assert first == second
    first, second = sampled_texts(tmp_path, StreamShift(SOUND[0], 0.8))
    assert first != second


def test_the_report_says_how_starts_were_made_independent(tmp_path: Path) -> None:
    report = judged(tmp_path, SOUND)
    (said,) = (found.detail for found in report.findings if found.check == "random numbers")
    assert "the sampled texts of 2 starts independent" in said


@pytest.mark.parametrize("asks", [True, False])
def test_without_log_probabilities_the_report_says_what_the_verdict_rests_on(
    tmp_path: Path, asks: bool
) -> None:
    report = judged(tmp_path, SOUND, told=2 if asks else 0, asks=asks)
    told = [found for found in report.findings if "returns no log-probabilities" in found.detail]
    assert len(told) == (0 if asks else 1)


def parity_of(report: ValidationReport) -> tuple[str, dict[str, int], tuple[Divergence, ...]]:
    (gate,) = (gate for gate in report.gates if gate.name == "parity")
    assert report.parity is not None
    kinds = ("identical", "equivalent", "suspicious", "broken", "unexplained")
    counts = {kind: count for kind in kinds if (count := getattr(report.parity, kind))}
    return gate.outcome, counts, report.parity.divergences


SOUND = [f"def f{number}(x):" for number in range(14)]


@pytest.mark.parametrize("told", [1, 2])
def test_a_near_tie_that_rounding_tips_is_numerically_equivalent_and_passes(
    tmp_path: Path, told: int
) -> None:
    report = judged(tmp_path, [*SOUND, f"{TIED} x", f"{ASTRAY} y"], told=told)
    outcome, counts, (tie,) = parity_of(report)
    assert (outcome, counts) == ("PASS", {"identical": 15, "equivalent": 1})
    assert (tie.position, tie.judged_by, tie.drift) == (TIE, "log_probs", pytest.approx(0.0))
    assert (tie.margin is None) is (told == 1)
    assert tie.change is not None and tie.change < MARGIN
    (gate,) = (gate for gate in report.gates if gate.name == "parity")
    assert "1 of them numerically equivalent by their served log-probabilities" in gate.detail


@pytest.mark.parametrize("told", [1, 2])
@pytest.mark.parametrize("fault", ["positions", "cache"])
def test_a_fault_of_the_runtime_is_broken_and_fails(tmp_path: Path, fault: str, told: int) -> None:
    outcome, counts, found = parity_of(
        judged(tmp_path, [*SOUND[:4], f"{ASTRAY} y"], fault=fault, told=told)
    )
    # Every verify forward has wrong positions; a cache that is not rewound is wrong behind a
    # rejected draft alone.
    assert (outcome, counts) == (
        "FAIL",
        {"broken": 5} if fault == "positions" else {"identical": 4, "broken": 1},
    )
    assert all(one.judged_by == "log_probs" for one in found)


def test_without_log_probabilities_a_divergence_stays_unexplained(tmp_path: Path) -> None:
    for options, why in (
        ({"asks": False}, "rounding and a fault look the same"),
        (
            {"told": 0},
            "the server refuses log-probabilities: return_log_probs: this version returns no",
        ),
    ):
        outcome, counts, (one,) = parity_of(judged(tmp_path, [*SOUND, f"{TIED} x"], **options))  # type: ignore[arg-type]
        assert (outcome, counts) == ("INCONCLUSIVE", {"identical": 14, "unexplained": 1})
        assert why in one.detail and one.judged_by is None


def test_a_text_that_is_another_one_when_it_is_asked_again_is_not_judged_by_it(
    tmp_path: Path,
) -> None:
    outcome, counts, (one,) = parity_of(
        judged(tmp_path, [*SOUND[:4], f"{ASTRAY} y"], fault="cache", fickle="speculative")
    )
    assert (outcome, counts) == ("INCONCLUSIVE", {"identical": 4, "unexplained": 1})
    assert (
        "the speculative arm gave another text up to this place, so nothing is known about"
        " the first text" in one.detail
    )


def test_a_replay_judges_by_log_probabilities_again_and_shows_the_fix(tmp_path: Path) -> None:
    kept: list[Replay] = []
    judged(
        tmp_path,
        [*SOUND[:4], f"{ASTRAY} y"],
        fault="cache",
        keep_replay=lambda one: kept.append(one) or "file",
    )
    again = replay(kept[0], arms(tmp_path, fault="cache"), None, abilities())
    assert again.as_before and again.divergence is not None
    assert replace(again.divergence, prompt_index=4) == kept[0].divergence
    assert (again.divergence.kind, again.divergence.judged_by) == ("broken", "log_probs")
    unasked = replay(kept[0], arms(tmp_path, fault="cache"), None, abilities(asks=False))
    assert unasked.divergence is not None and unasked.divergence.kind == "unexplained"
    assert replay(kept[0], arms(tmp_path), None, abilities()).divergence is None
