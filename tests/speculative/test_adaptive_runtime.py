"""Adaptive draft lengths in the runtime: the text stays what it is, and the caches stay healthy."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.runtimes import (
    EngineTime,
    Outcome,
    assert_idle,
    make_request,
    make_runtime,
    serve,
    serve_one,
    slow_clock,
)
from tests.support.step_engines import BurstingTableEngine, PackingTableEngine, TableEngine
from toolkit.interfaces import GenerationRequest, TokenEvent
from toolkit.speculative.adaptive import (
    AWAIT_STEPS_PLAIN,
    PROBED_ROWS,
    AdaptiveSettings,
    Controller,
)
from toolkit.speculative.bursts import MAX_STEPS
from toolkit.speculative.comparison import ComparedStep
from toolkit.speculative.costs import Figures, StepCosts
from toolkit.speculative.drafters import ModelDrafter, NgramDrafter
from toolkit.speculative.request_state import Sequence
from toolkit.speculative.runtime import (
    MOST_PLAIN_STEPS_UNNOTED,
    NOTE_EVERY_PLAIN_STEPS,
    SpeculativeRuntime,
)
from toolkit.speculative.trials import NOTED_STEPS, PLAIN_TRIAL_STEPS, UNSETTLED_STEPS, Trials

ADAPTIVE = AdaptiveSettings(probe_every_tokens=4)
PROMPTS = [
    tuple(int(t) for t in np.random.default_rng(i).integers(0, 40, size=1 + 3 * i))
    for i in range(8)
]
SEEDED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": {"frequency_penalty": 0.6, "presence_penalty": 0.4},
    "coupled": {"temperature": 0.8, "seed": 11},
    "coupled, filters": {"temperature": 1.1, "seed": 12, "top_k": 9, "top_p": 0.8},
    "sample_match": {"temperature": 0.9, "seed": 5, "acceptance": "sample_match"},
    "rejection": {"temperature": 0.9, "seed": 6, "acceptance": "rejection"},
}
MAX_ROWS = 8
MAX_DRAFT_LEN = 4


def requests_of(count: int, max_tokens: int, **fields: Any) -> list[GenerationRequest]:
    return [make_request(PROMPTS[i], max_tokens, f"r{i}", **fields) for i in range(count)]


def figures(draft: float, verify: float) -> Figures:
    """The same for every number of rows and tokens: drafts pay where they are accepted."""
    return Figures([[verify] * (MAX_ROWS + 1)] * 12, *[[draft] * (MAX_ROWS + 1)] * 2)


class RandomCosts(StepCosts):
    """Every question has another answer, so that lengths jump about."""

    def __init__(self, seed: int) -> None:
        super().__init__(figures(1.0, 1.0), 1.0)
        self._random = random.Random(seed)

    def draft_ns(self, rows: int, depth: int) -> float:
        return self._random.choice([0.0, 10.0, 1e6])

    def step_ns(self, rows: int, width: float) -> float:
        return self._random.choice([1e5, 1e6])


class StillCosts(StepCosts):
    """Costs that the test's own times do not change."""

    def note_step(self, *args: Any) -> None:
        pass

    def note_probe(self, *args: Any) -> None:
        pass

    def note_reading(self, *args: Any) -> None:
        pass


def still(figures: Figures, probe: float = 10.0, reading: float = 0.0) -> StillCosts:
    stills = StillCosts(figures, probe, reading=reading)
    stills._host = stills._host_alone = 1.0
    return stills


def engine(seed: int, **settings: Any) -> TableEngine:
    return TableEngine(seed, **{"max_seq_len": 512, **settings})


def adaptive(target: TableEngine, draft: TableEngine | None, **options: Any) -> SpeculativeRuntime:
    options.setdefault("costs", still(figures(300.0, 1000.0)))
    return make_runtime(target, draft, adaptive=options.pop("settings", ADAPTIVE), **options)


def leave_out_trials(runtime: SpeculativeRuntime) -> None:
    assert runtime._adaptive is not None
    runtime._adaptive.trials = runtime._adaptive.comparison = None


@settings(max_examples=60)
@given(
    draft_seed=st.integers(0, 1000),
    cost_seed=st.integers(0, 1000),
    closeness=st.sampled_from([0.0, 0.7, 0.95]),
    batch=st.sampled_from([1, 3, 8]),
    kind=st.sampled_from(sorted(SEEDED)),
    max_tokens=st.integers(1, 60),
    target_kind=st.sampled_from([TableEngine, BurstingTableEngine]),
)
def test_lengths_that_jump_about_change_no_text(
    draft_seed: int,
    cost_seed: int,
    closeness: float,
    batch: int,
    kind: str,
    max_tokens: int,
    target_kind: type[TableEngine],
) -> None:
    requests = requests_of(8, max_tokens, **SEEDED[kind])
    draft_len = 4
    plain = make_runtime(
        TableEngine(1, closeness=closeness),
        TableEngine(draft_seed, closeness=closeness),
        # With this rule the text depends on the draft length, so it is kept.
        max_draft_len=draft_len if kind == "rejection" else 0,
    )
    expected = [serve_one(plain, request).ids for request in requests]
    target = target_kind(1, closeness=closeness, max_batch_size=batch)
    draft = TableEngine(draft_seed, closeness=closeness, max_batch_size=batch)
    runtime = adaptive(target, draft, max_draft_len=draft_len, costs=RandomCosts(cost_seed))
    assert [outcome.ids for outcome in serve(runtime, requests)] == expected
    assert_idle(runtime, target, draft)


@pytest.mark.parametrize("kind", ["greedy", "coupled", "rejection without a seed", "in bursts"])
def test_a_bad_draft_is_given_up_and_its_steps_say_why(kind: str) -> None:
    sampling = SEEDED.get(kind, {} if kind == "in bursts" else {"temperature": 0.9})
    target = BurstingTableEngine(1, max_seq_len=512) if kind == "in bursts" else engine(1)
    runtime = adaptive(target, engine(99))
    stats = serve_one(runtime, make_request(PROMPTS[3], 200, **sampling)).stats
    assert stats.steps_by_reason["acceptance"] > 100
    assert sum(stats.steps_by_reason.values()) == stats.verify_steps
    assert stats.draft_len_changes >= 1
    assert 0 < stats.draft_probes < 30


def test_bursts_say_that_the_host_takes_nothing_of_a_request_alone() -> None:
    """But nothing of what it takes of batches."""
    target = BurstingTableEngine(1, max_seq_len=512)
    costs = StepCosts(figures(300.0, 1000.0), 10.0)
    runtime = adaptive(target, engine(99), costs=costs)
    host = costs._host
    serve_one(runtime, make_request(PROMPTS[3], 200))
    assert sum(target.bursts) > 150
    assert costs._host == host
    assert costs._host_alone < host / 10
    runtime.close()


def test_decisions_that_change_nothing_end_no_burst() -> None:
    """Each step of a burst is taken before the next one begins, as on a fast host."""
    target = BurstingTableEngine(1, max_seq_len=1024)
    runtime = adaptive(target, TableEngine(1, max_seq_len=1024))
    assert runtime._bursts is not None
    target.before_step = lambda step: runtime._bursts.take_known()
    stats = serve_one(runtime, make_request(PROMPTS[3], 600)).stats
    runtime.close()
    assert stats.draft_len_changes <= 2
    assert target.bursts.count(MAX_STEPS) >= 2


@pytest.mark.parametrize("doubts_every", [10**9, 7], ids=["in bursts", "and from Python"])
@pytest.mark.parametrize("draft_seed", [1, 99], ids=["drafting", "plain"])
def test_each_step_of_a_request_alone_is_counted_once(doubts_every: int, draft_seed: int) -> None:
    """Where steps are long, a burst has few: between two of them no step is counted twice."""
    target = BurstingTableEngine(1, max_seq_len=1024, doubts_every=doubts_every)
    runtime = adaptive(target, engine(draft_seed, max_seq_len=1024))
    assert runtime._bursts is not None and runtime._adaptive is not None
    bursts, controller = runtime._bursts, runtime._adaptive

    def before_step(step: int) -> None:
        bursts.take_known()
        if step == 2:
            bursts.interrupt()

    target.before_step = before_step
    counted = 0

    def pass_steps(_trials: Trials, _rows: int, steps: int = 1) -> bool:
        nonlocal counted
        counted += steps
        return False

    # Between probes a plain row takes bursts only if it is not drawn.
    drawn = {} if draft_seed == 99 else {"temperature": 0.9, "seed": 5}
    with (
        mock.patch.object(Trials, "pass_step", pass_steps),
        mock.patch.object(Trials, "pass_steps", pass_steps),
    ):
        stats = serve_one(runtime, make_request(PROMPTS[3], 400, **drawn)).stats
    runtime.close()
    assert len(target.bursts) > 10
    assert counted + controller.rest.taken == stats.verify_steps


def test_another_length_ends_no_burst() -> None:
    """Only that drafts end or begin does, since the draft's cache then falls behind."""
    target = BurstingTableEngine(1, max_seq_len=1024)
    runtime = adaptive(target, TableEngine(1, max_seq_len=1024))
    assert runtime._bursts is not None
    target.before_step = lambda step: runtime._bursts.take_known()
    lengths = itertools.cycle([3, 1, 2])
    drafted: list[int] = []

    def choose(rows: list[Sequence]) -> None:
        for row in rows:
            row.adaptation.draft_len = next(lengths)

    def noted(rows: int, drafting: list[int], *rest: object) -> None:
        drafted.append(len(drafting))

    runtime._choose_draft_lens = choose  # type: ignore[method-assign]
    with (
        mock.patch.object(Controller, "keeps", lambda self, rows: False),
        mock.patch.object(type(runtime._costs), "note_step", side_effect=noted),
    ):
        outcome = serve_one(runtime, make_request(PROMPTS[3], 400))
    runtime.close()
    plain = serve_one(make_runtime(engine(1, max_seq_len=1024)), make_request(PROMPTS[3], 400))
    assert outcome.ids == plain.ids
    assert target.bursts.count(MAX_STEPS) >= 3
    assert drafted[:9] in ([3, 1, 2] * 3, [1, 2, 3] * 3, [2, 3, 1] * 3)


class FadingDraft(TableEngine):
    """The target itself, or while `is_bad` something else."""

    is_bad = False

    def forward(self, slots: Any, tokens: Any, *, last_only: bool = False) -> Any:
        logits = super().forward(slots, tokens, last_only=last_only)
        return logits.roll(1, dims=-1) if self.is_bad else logits


@pytest.mark.parametrize("kind", ["greedy", "coupled", "rejection without a seed"])
def test_a_draft_that_is_right_again_is_used_again_with_a_whole_cache(kind: str) -> None:
    """In the end everything is accepted, which a cache with a hole in it would not give."""
    target, draft = engine(1), FadingDraft(1, max_seq_len=512)
    runtime = adaptive(target, draft)
    leave_out_trials(runtime)
    request = make_request(PROMPTS[2], 400, **SEEDED.get(kind, {"temperature": 0.9}))
    outcome = Outcome()

    def note(event: TokenEvent) -> None:
        outcome.events.append(event)
        draft.is_bad = 60 <= len(outcome.ids) < 200

    runtime.submit(request, note)
    while runtime.step():
        pass
    stats = outcome.stats
    assert list(stats.steps_by_reason) == ["pays", "acceptance"]
    assert stats.draft_probes > 1
    sizes = [len(event.token_ids) for event in outcome.events]
    assert sizes[-12:-2] == [5] * 10
    assert stats.steps_by_reason["acceptance"] > 80


@pytest.mark.parametrize("kind", ["greedy", "coupled"])
def test_a_probe_that_fails_leaves_its_requests_to_plain_decoding(kind: str) -> None:
    class NoProbes(ModelDrafter):
        probes = 0

        def probe(self, *args: Any) -> Any:
            self.probes += 1
            super().probe(*args)
            raise RuntimeError("planted fault")

    target, draft = engine(1), engine(99)
    drafter = NoProbes(draft)
    runtime = adaptive(target, draft, drafter=drafter)
    requests = [make_request(PROMPTS[i], 200, str(i), **SEEDED[kind]) for i in range(3)]
    outcomes = serve(runtime, requests)
    plain = make_runtime(engine(1), max_draft_len=0)
    assert [o.ids for o in outcomes] == [o.ids for o in serve(plain, requests)]
    assert 1 <= drafter.probes <= 3
    for stats in (outcome.stats for outcome in outcomes):
        assert stats.steps_by_reason["draft failed"] > 0
        assert "planted fault" in str(stats.draft_failure)
    assert_idle(runtime, target, draft)


def test_the_prompt_is_not_fed_to_a_draft_that_is_not_used() -> None:
    draft = TableEngine(99)
    runtime = adaptive(TableEngine(1), draft, costs=still(figures(1e6, 1000.0)))
    stats = serve_one(runtime, make_request(PROMPTS[5], 30)).stats
    assert draft.forwards == []
    assert stats.steps_by_reason == {"load": stats.verify_steps}


def test_a_request_behind_a_batch_drafts_when_no_others_have_followed_it() -> None:
    """Batches do not draft here, and their requests often come one by one. The draft has its text
    to read then, which one that soon ends is not worth.
    """
    verify = [[1000.0, 1000.0, *[4000.0 * width] * (MAX_ROWS - 1)] for width in range(12)]
    costs = still(Figures(verify, *[[300.0] * (MAX_ROWS + 1)] * 2), reading=400.0)
    runtime = adaptive(engine(1, max_batch_size=4), engine(1, max_batch_size=4), costs=costs)
    leave_out_trials(runtime)
    alone = serve_one(runtime, make_request(PROMPTS[0], 60)).stats
    assert set(alone.steps_by_reason) == {"pays"}
    for max_tokens, drafts in ((60, True), (24, False)):
        for outcome in serve(runtime, requests_of(4, 40)):
            assert set(outcome.stats.steps_by_reason) == {"load"}
        behind = serve_one(runtime, make_request(PROMPTS[0], max_tokens)).stats
        assert set(behind.steps_by_reason) == ({"load", "pays"} if drafts else {"load"})
        if drafts:
            assert behind.steps_by_reason["load"] <= AWAIT_STEPS_PLAIN


def noted_steps(runtime: SpeculativeRuntime, requests: list[GenerationRequest]) -> list[int]:
    """The numbers, from 1 on, of the plain steps whose times are noted."""
    noted: list[int] = []

    def note(_costs: object, rows: int, drafting: list[int], *_times: object) -> None:
        if not drafting:
            noted.append(runtime._totals.steps)

    with mock.patch.object(StillCosts, "note_step", note):
        serve(runtime, requests)
    return noted


SETTLED = [*range(UNSETTLED_STEPS + 1, PLAIN_TRIAL_STEPS + 1)]


def test_of_plain_steps_those_are_noted_in_which_the_caches_have_settled() -> None:
    """All of a trial from then on, later on every sixteenth, and much later every 64th."""
    engines = (engine(token, max_seq_len=2048) for token in (1, 99))
    runtime = adaptive(*engines, costs=still(figures(1e6, 1000.0)))
    later = range(PLAIN_TRIAL_STEPS + NOTE_EVERY_PLAIN_STEPS, 100, NOTE_EVERY_PLAIN_STEPS)
    noted = noted_steps(runtime, requests_of(4, 1500))
    assert noted[: len(SETTLED) + len(later)] == [*SETTLED, *later]
    assert noted[-1] - noted[-2] == MOST_PLAIN_STEPS_UNNOTED


def test_caches_settle_in_plain_steps_that_read_prompts_too() -> None:
    target = PackingTableEngine(1, max_seq_len=512, max_batch_size=3)
    draft = engine(99, max_batch_size=3)
    runtime = adaptive(target, draft, costs=still(figures(1e6, 1000.0)))
    lengths = (10, UNSETTLED_STEPS + 4, 60, 60, 60)  # the last two follow those that end
    requests = [
        make_request(max_tokens=length, request_id=str(i)) for i, length in enumerate(lengths)
    ]
    noted = noted_steps(runtime, requests)
    assert noted[: len(SETTLED) - 1] == [step for step in SETTLED if step != UNSETTLED_STEPS + 4]


def test_a_trial_of_plain_steps_goes_on_with_the_request_behind_one_alone() -> None:
    """It begins behind eight blocks, too late for the plain steps of the same request to settle."""
    runtime = adaptive(engine(1), engine(1), costs=still(figures(700.0, 1000.0)))
    noted = [noted_steps(runtime, requests_of(1, 56)) for _ in range(8)]
    assert max(map(len, noted)) >= NOTED_STEPS // 2


def test_of_a_finished_request_it_is_known_what_it_wrote_and_what_it_might_have() -> None:
    target = engine(1)
    ids = serve_one(make_runtime(target, None), make_request(PROMPTS[2], 10)).ids
    end = ids.index(ids[5])
    runtime = adaptive(engine(1), engine(1), eos_token_ids=(ids[5],))
    with mock.patch.object(Controller, "finish") as finish:
        serve_one(runtime, make_request(PROMPTS[2], 10))
    assert finish.call_args.kwargs == {
        "prompt_tokens": len(PROMPTS[2]),
        "output_tokens": end + 1,
        "max_tokens": 10,
    }


def test_a_request_may_state_its_own_length_beside_adaptive_ones() -> None:
    target, draft = engine(1, max_batch_size=3), engine(99, max_batch_size=3)
    runtime = adaptive(target, draft)
    requests = [
        make_request(PROMPTS[1], 80, "own", draft_len=3),
        make_request(PROMPTS[2], 80, "plain", draft_len=0),
        make_request(PROMPTS[3], 80, "adaptive"),
    ]
    own, plain, adapted = (outcome.stats for outcome in serve(runtime, requests))
    assert set(own.steps_by_reason) == set(plain.steps_by_reason) == {"request"}
    assert own.drafted > 2 * (own.verify_steps - 2)
    assert plain.drafted == 0
    assert set(adapted.steps_by_reason) <= {"pays", "acceptance", "load"}
    assert "pays" in adapted.steps_by_reason


def test_requests_with_long_prompts_decode_plainly() -> None:
    runtime = make_runtime(TableEngine(1), TableEngine(1), max_prompt_tokens=4)
    short = serve_one(runtime, make_request((1, 2, 3, 4), 12)).stats
    long = serve_one(runtime, make_request((1, 2, 3, 4, 5), 12)).stats
    asked = serve_one(runtime, make_request((1, 2, 3, 4, 5), 12, draft_len=2)).stats
    assert set(short.steps_by_reason) == {"fixed"}
    assert short.drafted > 0
    assert (set(long.steps_by_reason), long.drafted) == ({"prompt length"}, 0)
    assert (set(asked.steps_by_reason), asked.drafted > 0) == ({"request"}, True)


def test_a_seed_keeps_the_length_where_the_text_depends_on_it() -> None:
    runtime = adaptive(TableEngine(1), TableEngine(2))
    seeded = make_request(PROMPTS[1], 40, temperature=0.9, seed=3, acceptance="rejection")
    assert set(serve_one(runtime, seeded).stats.steps_by_reason) == {"seed"}


def test_the_schedule_is_an_upper_bound() -> None:
    runtime = adaptive(
        TableEngine(1),
        TableEngine(1),
        max_draft_len=4,
        draft_len_schedule=((1, 4), (3, 1)),
        clock=slow_clock(),
    )
    for outcome in serve(runtime, requests_of(4, 20)):
        early = outcome.events[1:5]
        assert all(len(event.token_ids) <= 2 for event in early)
    alone = serve_one(runtime, make_request(PROMPTS[0], 40))
    assert max(len(event.token_ids) for event in alone.events) == 5


def test_a_schedule_that_allows_drafts_again_is_noticed_at_once() -> None:
    """With the same requests, too: more time may have passed, or one that waited was cancelled."""
    runtime = adaptive(engine(1), engine(1), draft_len_schedule=[(1, 3)])
    runtime.submit(make_request(PROMPTS[0], 400), (outcome := Outcome()).events.append)
    assert runtime._schedule is not None
    with mock.patch.object(runtime._schedule, "length", return_value=0):
        for _ in range(40):
            runtime.step()
    plain = len(outcome.ids)
    assert plain <= 41
    for _ in range(3):
        runtime.step()
    assert len(outcome.ids) > plain + 3


def test_the_first_probe_of_a_request_reads_its_prompt() -> None:
    """Its text began without drafts, so the draft has read nothing of it. With its context a draft
    that is the target has everything right, and drafts from then on.
    """
    draft = engine(1, max_step_tokens=64)
    runtime = adaptive(engine(1, max_step_tokens=64), draft)
    assert runtime._adaptive is not None
    runtime._adaptive.expected_acceptance = 0.01
    prompt = tuple(range(30))
    outcome = serve_one(runtime, make_request(prompt, 120))
    probe_rows, probe_tokens = draft.forwards[0]
    assert probe_rows == 1
    assert probe_tokens > len(prompt)
    assert outcome.stats.draft_probes == 1
    assert outcome.stats.accepted == outcome.stats.drafted > 0


def test_a_probe_of_a_batch_looks_at_some_of_its_rows() -> None:
    """A draft that has read none of the texts would read all of them at once."""
    draft = engine(99, max_step_tokens=64, max_batch_size=MAX_ROWS)
    runtime = adaptive(engine(1, max_step_tokens=64, max_batch_size=MAX_ROWS), draft)
    assert runtime._adaptive is not None
    runtime._adaptive.expected_acceptance = 0.01
    outcomes = serve(runtime, requests_of(MAX_ROWS, 200))
    assert all(outcome.stats.drafted == 0 for outcome in outcomes)
    assert sum(outcome.stats.draft_probes for outcome in outcomes) > PROBED_ROWS
    assert max(rows for rows, _ in draft.forwards) == PROBED_ROWS < MAX_ROWS


def test_a_probe_while_a_request_is_awaited_begins_no_drafts_before_it_is_there() -> None:
    """Drafts pay for three requests here and not for four. The three would read their prompts in
    vain if a fourth follows, which it is given some steps for.
    """
    verify = [[1000.0 * max(1, rows - 2) ** width for rows in range(5)] for width in range(12)]
    target, draft = engine(1, max_batch_size=4), engine(1, max_batch_size=4)
    runtime = adaptive(target, draft, costs=still(Figures(verify, *[[10.0] * 5] * 2)))
    leave_out_trials(runtime)
    controller = runtime._adaptive
    assert controller is not None
    outcomes = [Outcome() for _ in range(4)]
    for index, outcome in enumerate(outcomes):
        length = 30 if index == 3 else 200
        runtime.submit(make_request(PROMPTS[index], length, str(index)), outcome.events.append)
    while outcomes[3].finish_reason is None:
        runtime.step()
    states = [row.adaptation for row in runtime._running]
    assert len(states) == 3 and {state.draft_len for state in states if state} == {0}
    for state in states:
        assert state is not None
        state.reason, state.plain_tokens, state.probe_after = "acceptance", 50, 1
    controller._steps_until_probe, controller._saved_ns = 0, 1e9
    controller._wake()
    for _ in range(AWAIT_STEPS_PLAIN - 2):
        runtime.step()
    assert all(state.probes for state in states if state)
    assert {state.draft_len for state in states if state} == {0}
    for _ in range(4):
        runtime.step()
    assert all(state.draft_len for state in states if state)
    runtime.close()


def test_a_request_adapts_behind_one_with_a_length_of_its_own() -> None:
    runtime = adaptive(engine(1, max_batch_size=2), engine(1, max_batch_size=2))
    requests = [
        make_request(PROMPTS[1], 60, "own", draft_len=0),
        make_request(PROMPTS[2], 60, "adaptive"),
    ]
    runtime.submit(requests[0], (own := Outcome()).events.append)
    runtime.step()
    runtime.submit(requests[1], (adapted := Outcome()).events.append)
    keeps = Controller.keeps
    with mock.patch.object(Controller, "keeps", autospec=True, side_effect=keeps) as asked:
        while runtime.step():
            pass
    assert own.stats.drafted == 0
    assert asked.call_count > 1
    assert adapted.stats.drafted > 0


class TimedEngine(TableEngine):
    """forward_ns[width]: of a forward of so many tokens per row."""

    def __init__(self, clock: EngineTime, forward_ns: list[float]) -> None:
        super().__init__(1, max_seq_len=512, max_batch_size=4)
        self._engine_time, self._forward_ns = clock, forward_ns

    def forward(self, slots: Any, tokens: Any, *, last_only: bool = False) -> Any:
        self._engine_time.now += int(self._forward_ns[min(tokens.shape[1], MAX_DRAFT_LEN + 1)])
        return super().forward(slots, tokens, last_only=last_only)


def linear(plain_ns: float, widest_ns: float) -> list[float]:
    """By width; width 0 is not used."""
    return [0.0, *np.linspace(plain_ns, widest_ns, MAX_DRAFT_LEN + 1).tolist()]


@pytest.mark.parametrize(
    ("true", "believed", "best", "other"),
    [
        (linear(10e6, 40e6), linear(10e6, 52e6), "pays", "load"),
        (linear(10e6, 56e6), linear(12.2e6, 56e6), "load", "pays"),
    ],
    ids=["drafts look too dear", "plain decoding looks too dear"],
)
@pytest.mark.parametrize("has_trials", [True, False])
def test_a_figure_that_keeps_itself_from_being_used_is_corrected_by_trials(
    true: list[float], believed: list[float], best: str, other: str, has_trials: bool
) -> None:
    """The draft is the target itself, so a step of the widest gives five tokens per row."""
    clock = EngineTime()
    engines = TimedEngine(clock, true), TimedEngine(clock, [1000.0] * (MAX_DRAFT_LEN + 2))
    verify = [[0.0] + [ns] * 4 for ns in believed]
    costs = StepCosts(Figures(verify, *[[0.0] + [1000.0] * 4] * 2), 1000.0)
    runtime = adaptive(*engines, costs=costs, clock=clock)
    if not has_trials:
        leave_out_trials(runtime)
    assert runtime._adaptive is not None
    runtime._adaptive.expected_acceptance = 0.99
    for _ in range(10):
        serve(runtime, requests_of(4, 300))
    for outcome in serve(runtime, requests_of(4, 300)):
        steps = outcome.stats.steps_by_reason
        usual = best if has_trials else other
        assert steps[usual] > 0.6 * sum(steps.values())
        assert ("measuring" in steps) <= has_trials


def test_what_is_compared_is_all_of_a_step() -> None:
    """Two requests, and a third whose prompt is read beside the blocks of one of them."""
    target = PackingTableEngine(1, max_seq_len=512, max_batch_size=2)
    runtime = adaptive(target, engine(1, max_batch_size=2), costs=still(figures(10.0, 1000.0)))
    prompt, steps = [1, 2, 3, 1, 2], list[ComparedStep]()
    requests = [
        make_request(prompt, length, str(length), temperature=0.0) for length in (9, 60, 50)
    ]
    with (
        mock.patch.object(Controller, "compares", True),
        mock.patch.object(Controller, "compare", lambda _, step: steps.append(step)),
    ):
        outcomes = serve(runtime, requests)
    assert [step.read for step in steps if step.read] == [len(prompt)]
    assert [step.fed for step in steps if step.read] == [len(prompt)]
    drafted = sum(sum(step.drafting) for step in steps)
    assert drafted == sum(outcome.stats.drafted for outcome in outcomes) > 0
    assert all(step.ns > 0 and step.rows in (1, 2) for step in steps)


def test_lengths_are_chosen_by_what_stands_in_the_slots_now() -> None:
    """Not each step is noted, so the last one that was may be of others."""
    seen = list[float]()

    class Seen(StillCosts):
        def set_context(self, tokens: float) -> None:
            seen.append(tokens)

    runtime = adaptive(TableEngine(1), TableEngine(2), costs=Seen(figures(300.0, 1000.0), 10.0))
    prompt = [1] * 40
    serve(runtime, [make_request(prompt, 8, str(index)) for index in range(3)])
    assert seen[0] == len(prompt)
    assert all(len(prompt) <= context <= len(prompt) + 8 for context in seen)


def test_what_the_draft_reads_of_prompts_is_timed() -> None:
    read = list[tuple[int, int]]()

    class Seen(StillCosts):
        def note_reading(self, tokens: int, read_ns: int) -> None:  # type: ignore[override]
            read.append((tokens, read_ns))

    clock = EngineTime()
    draft = TimedEngine(clock, [7000.0] * (MAX_DRAFT_LEN + 2))
    costs = Seen(figures(300.0, 1000.0), 10.0)
    runtime = adaptive(TableEngine(1, max_batch_size=4), draft, costs=costs, clock=clock)
    serve(runtime, [make_request([1, 2, 3, 4, 5], 8, "0")])
    assert read == [(5, 7000)]


def test_requests_with_a_length_of_their_own_save_nothing_for_probes() -> None:
    """Otherwise the requests that adapt would probe for more than their share of the time."""
    runtime = adaptive(TableEngine(1), TableEngine(2))
    controller = runtime._adaptive
    assert controller is not None
    controller.expected_acceptance = 0.01
    serve_one(runtime, make_request(PROMPTS[0], 40))
    controller._saved_ns = -1e9
    serve_one(runtime, make_request(PROMPTS[1], 40, draft_len=0))
    assert controller._saved_ns == -1e9
    serve_one(runtime, make_request(PROMPTS[2], 40))
    assert controller._saved_ns > -1e9


def test_look_ups_that_fail_are_given_up_and_probed() -> None:
    """Their probes look only at what was written since the text was last indexed."""
    drafter = NgramDrafter(2)
    verify = [[0.0] * 9, *([1000.0 * width] * 9 for width in range(1, 12))]
    costs = still(Figures(verify, *[[0.0] * 9] * 2), 1)
    runtime = adaptive(
        engine(1, vocab_size=12), None, drafter=drafter, costs=costs, max_draft_len=3
    )
    plain = make_runtime(engine(1, vocab_size=12), max_draft_len=0)
    request = make_request((1, 2, 1, 2, 3), 150)
    outcome = serve_one(runtime, request)
    assert outcome.ids == serve_one(plain, request).ids


def test_the_engines_are_timed_when_no_costs_are_given() -> None:
    target, draft = TableEngine(1, max_batch_size=2), TableEngine(1, max_batch_size=2)
    runtime = make_runtime(target, draft, adaptive=ADAPTIVE)
    assert target.forwards
    assert draft.forwards
    stats = serve_one(runtime, make_request(PROMPTS[1], 40)).stats
    assert sum(stats.steps_by_reason.values()) == stats.verify_steps
    assert_idle(runtime, target, draft)
