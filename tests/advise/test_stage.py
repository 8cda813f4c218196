"""The advisor end to end over small engines: its predictions agree with running, and it advises
against speculation where that does not pay.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.runtimes import CODEC
from tests.support.step_engines import TableEngine
from toolkit.advise.choose import schedule_of
from toolkit.advise.cost import StepTimes, batch_sizes
from toolkit.advise.observe import Text, teacher_forced
from toolkit.advise.stage import Contender, GivenTexts, Question, advise, decide
from toolkit.interfaces import Sampling
from toolkit.records.advice import Advice, Alpha, Candidate, SpeedupPrediction
from toolkit.records.codec import from_json, to_json
from toolkit.speculative.drafters import Lookup
from toolkit.speculative.sampling import weights
from toolkit.workflows.measured_runtime import MeasuredRuntime

TEMPERATURE = 0.9
PROMPTS = [
    ("even" if index % 2 == 0 else "odd", (1 + index % 30, 2, 3 + index % 7)) for index in range(48)
]


def probabilities(logits: np.ndarray) -> np.ndarray:
    rows = weights(logits, Sampling(temperature=TEMPERATURE))
    return rows / rows.sum(axis=-1, keepdims=True)


class Scripted(MeasuredRuntime):
    """Texts and runs are real; step times are set, in ms: 10 for the target and 1 per draft token,
    `draft_ms` per token for the draft, and `crowd_ms` per verified token for every further request
    of a batch.
    """

    draft_ms = 0.5
    crowd_ms = 0.0

    def time_steps(
        self,
        drafter: str,
        prompts: Sequence[Sequence[int]],
        draft_len: int,
        temperature: float,
        steps: int,
    ) -> StepTimes:
        draft = int(1e6 * self.draft_ms * draft_len) if drafter == "draft_target" else 0
        verify = int(1e6 * (10 + draft_len + self.crowd_ms * (len(prompts) - 1) * (draft_len + 1)))
        return StepTimes((draft,) * steps, (verify,) * steps, (100_000,) * steps, (1_000_000,))


def run(draft: TableEngine, kind: type[MeasuredRuntime] = Scripted, **changes: float) -> Advice:
    target = TableEngine(1, closeness=0.8)
    runtime = kind(target, draft, CODEC, eos_token_ids=())
    for name, value in changes.items():
        setattr(runtime, name, value)
    question = Question(PROMPTS, 48, TEMPERATURE, "auto", max_draft_len=5, rounds=1, steps=4)
    contenders = [
        Contender("model", "draft_target", runtime, teacher_forced(draft)),
        Contender("ngram", "ngram", runtime, None),
    ]
    return advise(
        teacher_forced(target),
        contenders,
        question,
        lookup=lambda: Lookup(3),
        probabilities=probabilities,
        progress=lambda *_: None,
    )


@pytest.fixture(scope="module")
def good() -> Advice:
    return run(TableEngine(2, closeness=0.8))


def of(advice: Advice, rule: str, name: str = "model", domain: str | None = None) -> Alpha:
    candidate = next(candidate for candidate in advice.candidates if candidate.name == name)
    return next(alpha for alpha in candidate.alphas if (alpha.rule, alpha.domain) == (rule, domain))


def test_a_good_cheap_draft_is_chosen_and_the_advice_survives_json(good: Advice) -> None:
    assert good.speculate
    assert (good.drafter, good.draft) == ("draft_target", "model")
    assert good.max_draft_len >= 1
    assert good.candidates[0].low > 1.0
    length = good.candidates[0].draft_len
    tokens = "1 draft token" if length == 1 else f"{length} draft tokens"
    assert f"with {tokens} for one request at a time" in good.reason
    assert from_json(Advice, to_json(good)) == good


def test_the_chosen_length_is_the_best_of_running_them_all(good: Advice) -> None:
    """With the counts of real runs and the scripted costs, no other length is faster by more than
    2 % for one request at a time.
    """
    target, draft = TableEngine(1, closeness=0.8), TableEngine(2, closeness=0.8)
    runtime = MeasuredRuntime(target, draft, CODEC, eos_token_ids=())
    prompts = [ids for _, ids in PROMPTS]
    spent = dict.fromkeys(range(1, 6), 1.0)
    for length, temperature in itertools.product(spent, (0.0, TEMPERATURE)):
        stats = [
            stats for _, stats in runtime.run("draft_target", prompts, length, 48, temperature)
        ]
        spent[length] *= sum(request.verify_steps for request in stats) * (10.1 + 1.5 * length)
    assert spent[good.candidates[0].draft_len] <= 1.02 * min(spent.values())


@pytest.mark.parametrize("rule", ["rejection", "coupled", "sample_match"])
def test_alpha_agrees_with_running(good: Advice, rule: str) -> None:
    """Accepted and rejected drafts of a real run also give alpha; the two intervals overlap."""
    target, draft = TableEngine(1, closeness=0.8), TableEngine(2, closeness=0.8)
    runtime = MeasuredRuntime(target, draft, CODEC, eos_token_ids=(), acceptance=rule)
    stats = [
        request
        for _, request in runtime.run(
            "draft_target", [ids for _, ids in PROMPTS], 1, 48, TEMPERATURE
        )
    ]
    accepted, drafted = (
        sum(request.accepted for request in stats),
        sum(request.drafted for request in stats),
    )
    measured = accepted / drafted  # the maximum likelihood of blocks of one draft
    spread = 1.96 * (measured * (1 - measured) / drafted) ** 0.5
    alpha = of(good, rule)
    assert 0.1 < measured < 0.95
    assert alpha.low - spread <= measured <= alpha.high + spread


def test_greedy_alpha_is_what_a_run_of_one_draft_counts_at_the_same_places(good: Advice) -> None:
    alpha = of(good, "greedy")
    assert alpha.low <= alpha.estimate <= alpha.high
    assert alpha.tokens == 48 * 47
    for domain in ("even", "odd"):
        assert 0 < of(good, "greedy", domain=domain).tokens < alpha.tokens


def test_predictions_split_into_their_causes(good: Advice) -> None:
    for prediction in good.candidates[0].predictions:
        parts = (
            prediction.formula * prediction.dependence * prediction.verification * prediction.host
        )
        assert parts == pytest.approx(prediction.speedup)
        assert prediction.low <= prediction.speedup <= prediction.high


def test_a_random_draft_is_refused_with_the_break_even() -> None:
    """The draft's weights have nothing to do with the target's, and its forwards, which are really
    timed, take as long as the target's.
    """
    draft = TableEngine(99, closeness=0.0)
    target = TableEngine(1, closeness=0.8)
    runtime = MeasuredRuntime(target, draft, CODEC, eos_token_ids=())
    question = Question(
        PROMPTS[:12], 24, TEMPERATURE, "auto", max_draft_len=3, batches=(1, 2), rounds=2, steps=4
    )
    advice = advise(
        teacher_forced(target),
        [Contender("random", "draft_target", runtime, teacher_forced(draft))],
        question,
        lookup=lambda: Lookup(3),
        probabilities=probabilities,
        progress=lambda *_: None,
    )
    assert not advice.speculate
    assert (advice.drafter, advice.max_draft_len, advice.schedule) == ("none", 0, ())
    assert "do not speculate" in advice.reason
    assert "would break even" in advice.reason
    assert advice.candidates[0].break_even_length > advice.candidates[0].acceptance_length


def test_speculation_stops_where_a_crowd_makes_it_a_loss() -> None:
    """With every added request, verifying costs more per token, so the lengths fall to 0."""
    advice = run(TableEngine(2, closeness=0.8), crowd_ms=4.0)
    lengths = [step.draft_len for step in advice.schedule]
    assert advice.speculate
    assert advice.schedule[0].batch == 1
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 0
    assert advice.max_concurrency is not None
    assert advice.max_concurrency < 8


def test_noise_is_no_reason_against_speculation(good: Advice) -> None:
    """If the interval contains 1 and the estimate is above 1, the estimate decides, and the advice
    is marked undecided.
    """
    facts: dict[str, Any] = {
        "own": "model",
        "costs_are": "measured",
        "temperature": TEMPERATURE,
        "rule": "rejection",
    }
    facts |= {"prompts": len(PROMPTS), "tokens": 1000, "seconds": 1.0}
    best = good.candidates[0]
    sure, noisy = (decide([one], (1, 2), **facts) for one in (best, replace(best, low=0.8)))
    worse = decide(
        [replace(best, speedup=0.97, low=0.8, high=1.2, predictions=slower(best, 0.5))],
        (1, 2),
        **facts,
    )
    assert (sure.speculate, sure.decided) == (True, True)
    assert (noisy.speculate, noisy.decided) == (True, False)
    assert noisy.max_draft_len == best.draft_len
    assert noisy.reason.startswith("undecided: ")
    assert (worse.speculate, worse.decided) == (False, True)
    assert worse.reason.startswith("do not speculate: ")


def slower(candidate: Candidate, factor: float) -> tuple[SpeedupPrediction, ...]:
    return tuple(
        replace(one, speedup=factor * one.speedup, low=factor * one.low)
        for one in candidate.predictions
    )


def test_a_dear_draft_loses_against_prompt_lookup_or_is_refused() -> None:
    advice = run(TableEngine(2, closeness=0.8), draft_ms=30.0)
    assert advice.draft is None
    assert advice.candidates[-1].name == "model"


def test_measurements_stand_beside_predictions_where_they_are_asked_for() -> None:
    """The measured time is the number of steps really run, times the set cost of a step, so
    prediction and run agree.
    """

    class Clocked(Scripted):
        def serve_ns(
            self,
            drafter: str,
            prompts: Sequence[Sequence[int]],
            draft_len: int,
            *args: Any,
            batch: int,
            **more: Any,
        ) -> int:
            stats = [
                request
                for _, request in self.run(
                    drafter if draft_len else "none", prompts, draft_len, *args, batch=batch
                )
            ]
            steps = sum(request.verify_steps for request in stats)
            verified = sum(request.drafted for request in stats)
            return int(steps * 10.1e6 + verified * 1.5e6 + len(prompts) * 1e6)

    target, draft = TableEngine(1, closeness=0.8), TableEngine(2, closeness=0.8)
    runtime = Clocked(target, draft, CODEC, eos_token_ids=())
    question = Question(
        PROMPTS,
        48,
        None,
        "auto",
        max_draft_len=3,
        batches=(1,),
        rounds=1,
        steps=4,
        measured_rounds=1,
    )
    advice = advise(
        teacher_forced(target),
        [Contender("model", "draft_target", runtime, teacher_forced(draft))],
        question,
        lookup=lambda: Lookup(3),
        probabilities=probabilities,
        progress=lambda *_: None,
    )
    for prediction in advice.candidates[0].predictions:
        assert prediction.measured == pytest.approx(prediction.speedup, rel=1e-3)
        assert prediction.measured_low is not None
        assert prediction.measured_low < prediction.speedup


def test_batch_sizes_double_up_to_the_largest() -> None:
    assert [batch_sizes(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_predicted_costs_are_said_to_be_predicted_and_need_no_timing() -> None:
    """A forward takes 10 ms and 1 ms for every token of the batch; the draft's takes a tenth."""

    class Untimed(MeasuredRuntime):
        def time_steps(self, *args: Any, **more: Any) -> StepTimes:
            raise AssertionError("nothing is timed where costs are predicted")

    def forward_s(role: str, batch: int, tokens: int) -> float:
        return (10 + batch * tokens) * (1e-4 if role == "draft" else 1e-3)

    target, draft = TableEngine(1, closeness=0.8), TableEngine(2, closeness=0.8)
    runtime = Untimed(target, draft, CODEC, eos_token_ids=())
    advice = advise(
        teacher_forced(target),
        [
            Contender("model", "draft_target", runtime, teacher_forced(draft), forward_s),
            Contender("ngram", "ngram", runtime, None, forward_s),
        ],
        Question(PROMPTS[:12], 24, None, "auto", max_draft_len=3, batches=(1, 4)),
        lookup=lambda: Lookup(3),
        probabilities=probabilities,
        progress=lambda *_: None,
    )
    assert advice.costs_are == "predicted"
    assert advice.speculate
    costs = {(cost.batch, cost.draft_len): cost for cost in advice.candidates[0].costs["greedy"]}
    assert costs[4, 3].verify_ms == pytest.approx(26.0)
    assert costs[4, 3].draft_ms == pytest.approx(3 * 1.4)
    assert (costs[1, 0].host_ms, costs[1, 0].samples) == (0.0, 0)


def test_the_advice_agrees_with_the_interval_that_it_prints(good: Advice) -> None:
    """For one request at a time, the interval over both modes decides, even if the lower end of
    each single mode is below 1.
    """
    best = good.candidates[0]
    wide = tuple(replace(one, low=0.97) if one.batch == 1 else one for one in best.predictions)
    assert schedule_of(replace(best, predictions=wide), (1, 2))[0].draft_len == best.draft_len
    assert (
        schedule_of(replace(best, low=0.99, predictions=slower(best, 0.5)), (1, 2))[0].draft_len
        == 0
    )


# Texts that take the place of those that the target would write.


def on_texts(texts: Sequence[Text], temperature: float | None = TEMPERATURE) -> Advice:
    """The advice on given texts, with nothing in memory that could write or be timed."""
    target, draft = TableEngine(1, closeness=0.8), TableEngine(2, closeness=0.8)

    def forward_s(role: str, batch: int, tokens: int) -> float:
        return 0.001 if role == "draft" else 0.010

    return advise(
        teacher_forced(target),
        [Contender("model", "draft_target", None, teacher_forced(draft), forward_s)],
        Question(
            [(text.domain, text.prompt) for text in texts],
            48,
            temperature,
            "rejection",
            max_draft_len=5,
            batches=(1,),
            given=GivenTexts(texts, "completions"),
        ),
        lookup=lambda: Lookup(3),
        probabilities=probabilities,
        progress=lambda *_: None,
    )


def test_on_the_targets_own_greedy_texts_greedy_acceptance_is_exact(good: Advice) -> None:
    """Every count of the replay, at every length, is that of the advisor whose target writes."""
    runtime = MeasuredRuntime(TableEngine(1, closeness=0.8), None, CODEC, eos_token_ids=())
    outputs = runtime.write([ids for _, ids in PROMPTS], 48, 0.0)
    texts = [
        Text(domain, ids, output, 48)
        for (domain, ids), output in zip(PROMPTS, outputs, strict=True)
    ]
    given = on_texts(texts)
    assert (given.texts_are, given.first_choices) == ("completions", 1.0)
    assert (good.texts_are, good.first_choices) == ("written by the target", None)
    assert of(given, "greedy") == of(good, "greedy")
    lengths = [
        {
            prediction.draft_len: prediction.acceptance_length
            for prediction in advice.candidates[-1].predictions
            if (prediction.mode, prediction.batch) == ("greedy", 1)
        }
        for advice in (given, replace(good, candidates=good.candidates[:1]))
    ]
    assert lengths[0] == lengths[1]
    assert from_json(Advice, to_json(given)) == given


def test_on_other_texts_alpha_is_the_overlap_of_the_distributions_there() -> None:
    """Of greedy decoding, that of the first choices; and the advice says how foreign they are."""
    generator = np.random.default_rng(3)
    texts = [
        Text("all", ids, tuple(generator.integers(0, 40, 20).tolist()), 48) for _, ids in PROMPTS
    ]
    given = on_texts(texts)
    overlaps, agreements, own = [], [], []
    for text in texts:
        p_logits, q_logits = (
            np.concatenate(list(teacher_forced(TableEngine(seed, closeness=0.8))(text)))
            for seed in (1, 2)
        )
        overlaps += np.minimum(probabilities(p_logits), probabilities(q_logits)).sum(-1).tolist()
        agreements += (p_logits.argmax(-1) == q_logits.argmax(-1)).tolist()
        own += (p_logits.argmax(-1) == text.output[1:]).tolist()
    assert of(given, "rejection").estimate == pytest.approx(np.mean(overlaps))
    assert of(given, "greedy").estimate == pytest.approx(np.mean(agreements))
    assert given.first_choices == pytest.approx(np.mean(own))
    assert given.first_choices < 0.2
