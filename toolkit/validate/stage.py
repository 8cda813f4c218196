"""The validate stage: measure a running endpoint, judge it by the gates of the YAML, and return a
report with a verdict.

Nothing here starts a server or an engine. The endpoint, its counters and the reference models are
arguments.

The timed requests carry no seed, like those of most clients, so at temperature > 0 they run under
the deployment's own accept rule. At temperature 0 the same requests prove parity, together with
untimed ones at other draft lengths and through the speculative path that accepts nothing. Then each
arm gets each prompt once more at temperature > 0, with a seed under the `coupled` rule, where the
texts have to be the same again. Finally a few prompts are drawn many times without a seed, to judge
the distribution of the sampled tokens. `diagnose` names what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.bench import metrics
from toolkit.bench.counters import client_counts, counters_finding, reconcile
from toolkit.bench.definitions import METRICS
from toolkit.bench.prompts import read_prompts
from toolkit.bench.verdict import INCONCLUSIVE, verdict
from toolkit.config.schema import LatencyGates, LoadGates, ValidationConfig
from toolkit.errors import UsageError
from toolkit.facts.capabilities import EMBEDDED, Capabilities
from toolkit.interfaces import Progress
from toolkit.pipeline.rows import read_rows
from toolkit.pipeline.texts import PROMPT_KEYS
from toolkit.records.bench import BenchRun
from toolkit.records.build import CompiledEngine, Quality, StageCost
from toolkit.records.judged import Parity, Sampled
from toolkit.records.load import LoadRun
from toolkit.records.measured import Acceptance, Arms, CounterCheck, Finding, Gate, Speedup
from toolkit.records.report import REPORT_SCHEMA_VERSION, ValidationReport
from toolkit.validate.arms import (
    ARMS,
    WARM_UP_PROMPTS,
    Alternating,
    Endpoint,
    Measured,
    Sender,
    StreamShift,
    run_rounds,
    run_turns,
)
from toolkit.validate.correctness import (
    Case,
    References,
    correctness_gates,
    judge_correctness,
    not_measured,
    planned_requests,
)
from toolkit.validate.gates import (
    latency_gates,
    not_judged,
    parity_gate,
    quality_gates,
    ratio_gates,
    speedup_gate,
)
from toolkit.validate.load import judge_load, load_findings
from toolkit.validate.parity import unrepeatable
from toolkit.validate.reference import Reference
from toolkit.validate.replay import Replay
from toolkit.words import ReportedPlainArm, SamplingRule, SentArm

__all__ = [
    "VERSION",
    "Alternating",
    "Endpoint",
    "Origin",
    "Reference",
    "References",
    "Served",
    "rounds_wanted",
    "validate",
]

VERSION = 16
BURSTS = 0.1  # share of requests delivered late above which the report has a note
DRIFT = 0.15  # change of plain decoding from round to round above which the report has a note
# Largest factor by which more rounds may have to narrow an interval. An estimate exactly on its
# limit is never decided, and would ask for endless rounds.
MOST_NARROWING = 100
SHIFTED = (
    "this runtime ignores seeds, and begins every start with the same random numbers. To make the"
    " sampled texts of {starts} starts independent, one token was drawn after the first start, two"
    " after the second, and so on, and every round sent the prompts in another order"
)
NO_LOAD = (
    "speed and latency with several requests at a time (validation.latency.concurrency: [1, 4, 16])"
)
NOT_DRAWN = (
    "whether sampled tokens are distributed as the target's own (validation.distribution.enabled:"
    " true)"
)
LOOPING = 0.5  # share of distinct 4-grams below which texts repeat themselves


@dataclass(frozen=True, slots=True)
class Served:
    """A started deployment that is to be measured.

    endpoint: a client of one server, or one that starts a server per arm. max_draft_len 0: the
    deployment does not speculate, and only the plain arm is measured. rule: accepts draft tokens at
    temperature > 0. counters: reads the server's counters, name -> value; None: they are not
    compared, and the report says so. sweep: measures both arms at each of the given numbers of
    concurrent requests; it is called if config.latency.concurrency lists any. load: measures both
    arms in an open loop, from the rate at which one request follows another; it is called if
    config.load is set. has_second_server: the endpoint sends requests with draft length 0 to a
    server without speculation.
    """

    endpoint: Endpoint | Alternating
    max_draft_len: int
    can: Capabilities = EMBEDDED
    rule: SamplingRule = EMBEDDED.acceptance[0]
    counters: Callable[[], Mapping[str, float]] | None = None
    sweep: Callable[[Sequence[int]], BenchRun] | None = None
    load: Callable[[LoadGates, float], tuple[LoadRun, BenchRun | None]] | None = None
    has_second_server: bool = False


@dataclass(frozen=True, slots=True)
class Origin:
    """What the report says about where a deployment comes from.

    engines: by role, "target" and "draft". environment: versions and hardware, name -> text.
    findings: of earlier stages; all but those that are ok go into the report. replaced: in a
    rehearsal, what stands in for what; speed and quality are then measured but not judged.
    """

    name: str
    quality: Quality
    engines: Mapping[str, CompiledEngine]
    environment: Mapping[str, str]
    findings: Sequence[Finding] = ()
    stages: Sequence[StageCost] = ()
    replaced: Sequence[str] = ()


def validate(
    served: Served,
    config: ValidationConfig,
    references: References,
    origin: Origin,
    *,
    chat: Path | None = None,
    keep_replay: Callable[[Replay], str] | None = None,
    progress: Progress | None = None,
) -> ValidationReport:
    """Measure and judge a served deployment. Sends about (2 x rounds + 2) x prompts requests per
    arm, and more rounds if the speed-up is undecided.

    config.prompts is read here (toolkit.pipeline.rows). chat: the checkpoint whose template writes
    conversations. references: judge the texts.
    keep_replay: stores what `toolkit validate --replay` needs for one divergence, and returns the
    file's name.

    Raises UsageError for a prompts file that cannot be used, StageError if the endpoint refuses a
    request or breaks.
    """
    endpoint, can, max_draft_len = served.endpoint, served.can, served.max_draft_len
    counters, quality = served.counters, origin.quality
    prompts = read_prompts(config.prompts, config.max_prompts, chat)
    rows = read_rows(config.prompts, *PROMPT_KEYS, limit=config.max_prompts)
    domains = [row.domain for row in rows]
    arms = ARMS if max_draft_len > 0 else ARMS[:1]
    shown = _Shown(progress, planned_requests(config, len(prompts), max_draft_len, can))
    by_request = can.draft_len_per_request or served.has_second_server
    shift = None
    if isinstance(endpoint, Alternating) and can.seeds == "ignored":
        shift = StreamShift(prompts[0], config.temperature)
    sender = Sender(
        endpoint, config.max_tokens, shown.sent, plain_by_request=by_request, shift=shift
    )
    before = counters() if counters is not None else {}
    by_restarts = isinstance(endpoint, Alternating) and max_draft_len > 0
    measured = _measure(sender, prompts, arms, config, shown, by_restarts=by_restarts)
    checks: tuple[CounterCheck, ...] = ()
    if counters is not None and can.counted == "requests to their length" and not by_restarts:
        # Timed requests have no stop words; those that follow have some.
        checks = reconcile(counters, before, client_counts(sender.sent, before))
    greedy, sampled = measured[0.0], measured[config.temperature]
    case = Case(
        sender=sender,
        prompts=prompts,
        greedy=greedy,
        config=config,
        references=references,
        rule=served.rule,
        max_draft_len=max_draft_len,
        can=can,
        keep_replay=keep_replay,
        say=shown.say,
        on_step=shown.step,
    )
    correctness = judge_correctness(case, quality.target)

    if counters is not None and can.counted == "every request":
        checks = reconcile(counters, before, client_counts(sender.sent))
    loaded = _sweep(served, config, sender, arms[-1])
    open_loop, open_run = _open_loop(served, config, sender, arms[-1], greedy)
    greedy_arms, greedy_speedup, greedy_acceptance = _figures(greedy, config, max_draft_len)
    sampled_arms, sampled_speedup, sampled_acceptance = _figures(sampled, config, max_draft_len)
    target = origin.engines.get("target")
    gates = [
        *_gates(config, greedy_arms, greedy_speedup, correctness.parity, 0.0),
        *_gates(config, sampled_arms, sampled_speedup, correctness.seeded, config.temperature),
        *correctness_gates(correctness),
        *quality_gates(
            quality.target,
            config.quality,
            quantized=_is_quantized(target),
            fp8_kv_at_1=target is not None and target.has_fp8_kv_at_1,
        ),
        *(() if loaded is None else loaded.gates),
        *(() if config.load is None or open_loop is None else judge_load(open_loop, config.load)),
    ]
    gates = not_judged(gates) if origin.replaced else gates
    loaded_findings = () if loaded is None else loaded.findings
    return ValidationReport(
        schema_version=REPORT_SCHEMA_VERSION,
        name=origin.name,
        verdict=verdict(gates),
        gates=tuple(gates),
        arms=greedy_arms,
        speedup=greedy_speedup,
        acceptance=greedy_acceptance,
        parity=correctness.parity,
        sampled=Sampled(
            temperature=config.temperature,
            rule=served.rule,
            arms=sampled_arms,
            speedup=sampled_speedup,
            acceptance=sampled_acceptance,
            parity=correctness.seeded,
        ),
        agreements=correctness.agreements,
        draft_check=correctness.draft_check,
        stop_check=correctness.stop_check,
        distribution=correctness.distribution,
        quality=quality,
        counters=checks,
        findings=(
            *(finding for finding in origin.findings if finding.severity != "ok"),
            *correctness.diagnoses,
            *(finding for finding in loaded_findings if finding.severity != "ok"),
            *(() if open_loop is None else load_findings(open_loop, open_run)),
            *not_measured(max_draft_len, references, can, greedy_acceptance),
            *_of_random_numbers(shift),
            *_findings(checks, measured, {0.0: greedy_arms, config.temperature: sampled_arms}),
            *_not_asked_for(config, max_draft_len),
        ),
        environment=dict(origin.environment),
        engines=dict(origin.engines),
        stages=tuple(origin.stages),
        definitions=METRICS,
        loads=() if loaded is None else loaded.points,
        crossover=None if loaded is None else loaded.crossover,
        load=open_loop,
        replaced=tuple(origin.replaced),
        plain_arm=_plain_arm(by_restarts, served.has_second_server),
        acceptance_slices=metrics.acceptance_slices(
            (timing for row in (*greedy.speculative, correctness.reused) for timing in row),
            dict(zip(prompts, domains, strict=True)),
        ),
        acceptance_over_time=metrics.acceptance_over_time(
            timing for row in greedy.speculative for timing in row
        ),
    )


def _plain_arm(by_restarts: bool, has_second_server: bool) -> ReportedPlainArm:
    if by_restarts:
        return "restarts"
    return "server" if has_second_server else "request"


def _sweep(
    served: Served, config: ValidationConfig, sender: Sender, last_arm: SentArm
) -> BenchRun | None:
    """Measure both arms under load, if the YAML lists any concurrency."""
    if not config.latency.concurrency:
        return None
    if served.sweep is None:
        raise UsageError("validation.latency.concurrency is set, and nothing here can measure it")
    sender.turn_to(last_arm)  # the sweep loads the server that is running
    return served.sweep(config.latency.concurrency)


def _open_loop(
    served: Served, config: ValidationConfig, sender: Sender, last_arm: SentArm, greedy: Measured
) -> tuple[LoadRun | None, BenchRun | None]:
    """Measure both arms at a rate, if the YAML has one or wants one found."""
    if config.load is None:
        return None, None
    if served.load is None:
        raise UsageError("validation.load is set, and nothing here can measure it")
    sender.turn_to(last_arm)
    deployed = [request for answers in greedy.speculative or greedy.plain for request in answers]
    elapsed_s = sum(request.e2e_ns or 0 for request in deployed) / 1e9
    return served.load(config.load, len(deployed) / elapsed_s if elapsed_s else 1.0)


def _of_random_numbers(shift: StreamShift | None) -> Iterator[Finding]:
    if shift is not None and shift.starts > 1:
        yield Finding("random numbers", "note", SHIFTED.format(starts=shift.starts))


def _not_asked_for(config: ValidationConfig, max_draft_len: int) -> Iterator[Finding]:
    """Name what the YAML did not ask to measure."""
    if not config.latency.concurrency and config.load is None:
        yield Finding("not measured", "note", NO_LOAD)
    if max_draft_len > 0 and not config.distribution.enabled:
        yield Finding("not measured", "note", NOT_DRAWN)


class _Shown:
    """Shows how far validation is: either how many of the planned requests were sent, or the steps
    of other work.
    """

    def __init__(self, progress: Progress | None, planned: int) -> None:
        self._progress = progress or (lambda done, total, what: None)
        self._sent, self._planned, self._what = 0, planned, ""
        self._by_steps = False

    def plan(self, more: int, what: str) -> None:
        """Plan so many more requests. what: the purpose of the next requests."""
        self._planned += more
        self._what, self._by_steps = what, False

    def say(self, what: str, *, by_steps: bool = False) -> None:
        """Say what is done now. by_steps: `step` shows its progress, not the requests sent."""
        self._what, self._by_steps = what, by_steps
        self._progress(0, None, what)

    def sent(self) -> None:
        self._sent += 1
        if not self._by_steps:
            self._progress(self._sent, max(self._planned, self._sent), f"{self._what}, requests")

    def step(self, done: int, total: int) -> None:
        self._progress(done, total, self._what)


def _measure(
    sender: Sender,
    prompts: Sequence[str],
    arms: Sequence[SentArm],
    config: ValidationConfig,
    shown: _Shown,
    *,
    by_restarts: bool,
) -> dict[float, Measured]:
    """Send the timed requests, at temperature 0 and at the YAML's temperature, after a warm-up
    that is not counted.
    """
    temperatures = (0.0, config.temperature)
    warm_up = prompts[:WARM_UP_PROMPTS]
    doing = "warming up"
    added: dict[str, int] = {}  # what is measured -> rounds beyond config.rounds
    shown.plan(2 * len(arms) * (len(warm_up) + config.rounds * len(prompts)), doing)

    def undecided(so_far: Measured) -> bool:
        made, more = len(so_far.plain), _rounds_wanted(so_far, config)
        before, added[doing] = added.get(doing, 0), made - config.rounds + more
        rounds = f"{more} more round{'s' if more > 1 else ''}"
        what = f"{doing}, about {rounds} for the wanted precision" if more else doing
        shown.plan((added[doing] - before) * len(arms) * len(prompts), what)
        return more > 0

    round_options: dict[str, Any] = {
        "rounds": config.rounds,
        "max_rounds": config.max_rounds,
        "undecided": undecided,
        "seed": config.seed,
    }
    if by_restarts:
        doing = "measuring, with a restart between the arms"
        shown.plan(0, doing)
        return run_turns(sender, prompts, temperatures=temperatures, **round_options)
    for index, prompt in enumerate(warm_up):
        for arm in arms:
            for temperature in temperatures:
                sender.send(index, prompt, arm, temperature=temperature)
    measured: dict[float, Measured] = {}
    for temperature in temperatures:
        doing = f"measuring at temperature {temperature:g}"
        shown.plan(0, doing)
        measured[temperature] = run_rounds(
            sender, prompts, arms=arms, options={"temperature": temperature}, **round_options
        )
    return measured


def _is_quantized(engine: CompiledEngine | None) -> bool:
    return engine is not None and (
        engine.quant_algo is not None or engine.kv_cache_quant_algo is not None
    )


def _rounds_wanted(measured: Measured, config: ValidationConfig) -> int:
    if not measured.speculative:
        return 0
    speedup = metrics.speedup(measured.speculative, measured.plain, seed=config.seed)
    return min(rounds_wanted(speedup, config.latency), max(0, config.max_rounds - speedup.rounds))


def rounds_wanted(speedup: Speedup, limits: LatencyGates) -> int:
    """Estimate how many more rounds would decide the speed-up; 0 if it is decided.

    An interval narrows with the square root of the number of rounds.
    """
    half, wanted = (speedup.high - speedup.low) / 2, limits.precision * speedup.estimate
    straddles = any(gate.outcome == INCONCLUSIVE for gate in speedup_gate(speedup, limits))
    if half <= wanted and not straddles:
        return 0
    if straddles and limits.min_speedup is not None:
        wanted = min(wanted, abs(speedup.estimate - limits.min_speedup))
    if wanted <= half / MOST_NARROWING:
        return (MOST_NARROWING**2 - 1) * speedup.rounds
    return max(1, math.ceil(speedup.rounds * (half / wanted) ** 2) - speedup.rounds)


def _figures(
    measured: Measured, config: ValidationConfig, max_draft_len: int
) -> tuple[Arms, Speedup | None, Acceptance | None]:
    plain = metrics.arm(measured.plain, seed=config.seed)
    if not measured.speculative:
        return Arms(plain, None), None, None
    speedup = metrics.speedup(measured.speculative, measured.plain, seed=config.seed)
    latencies = metrics.latency_ratios(measured.speculative, measured.plain, seed=config.seed)
    return (
        Arms(plain, metrics.arm(measured.speculative, seed=config.seed)),
        replace(speedup, latencies=latencies),
        metrics.acceptance(
            (request for answers in measured.speculative for request in answers),
            draft_len=max_draft_len,
        ),
    )


def _gates(
    config: ValidationConfig,
    arms: Arms,
    speedup: Speedup | None,
    parity: Parity | None,
    temperature: float,
) -> list[Gate]:
    limits, ratios = config.latency, () if speedup is None else speedup.latencies
    gates = [] if parity is None else [parity_gate(parity, config.parity, temperature)]
    gates += speedup_gate(speedup, limits, temperature)
    gates += ratio_gates(ratios, limits, temperature)
    return gates + latency_gates(arms.speculative or arms.plain, limits, temperature)


def _findings(
    checks: Sequence[CounterCheck],
    measured: Mapping[float, Measured],
    arms: Mapping[float, Arms],
) -> list[Finding]:
    """Return what a reader should know and no gate judges."""
    return [
        counters_finding(checks, unread="the server's counters were not read"),
        *_looping(arms),
        *_late_delivery(measured),
        *_drift(measured),
        *_repeatability(measured),
    ]


def _looping(arms: Mapping[float, Arms]) -> Iterator[Finding]:
    for temperature, pair in arms.items():
        for name, arm in (("plain", pair.plain), ("speculative", pair.speculative)):
            if (
                arm is not None
                and arm.distinct_4grams is not None
                and arm.distinct_4grams < LOOPING
            ):
                flatters = ", which flatters the speed-up" if pair.speculative is not None else ""
                detail = (
                    f"texts of the {name} arm at temperature {temperature:g} repeat themselves:"
                    f" {arm.distinct_4grams:.2f} of their 4-grams are distinct (below"
                    f" {LOOPING}){flatters}; choose other prompts"
                )
                yield Finding("looping texts", "warning", detail)


def _late_delivery(measured: Mapping[float, Measured]) -> Iterator[Finding]:
    delivery = metrics.delivery(
        request
        for arms in measured.values()
        for rounds in (arms.plain, arms.speculative)
        for answers in rounds
        for request in answers
    )
    late, judged = delivery.late, delivery.judged
    if late > BURSTS * judged:
        split = ""
        if delivery.same_clock == judged:
            split = (
                f" (a tenth on the way in alone, before the server had the request:"
                f" {delivery.late_in:,}; on the way out alone, after it had the token:"
                f" {delivery.late_out:,}; the others by both together)"
            )
        detail = (
            f"{late:,} of {judged:,} requests ({late / judged:.0%}) got their first token late: a"
            f" tenth of the request or more passed between client and server{split}. Their TTFT,"
            " and of those late on the way out ITL and ICL, show a busy machine, not the engine;"
            " e2e and tokens/s hold"
        )
        yield Finding("streaming", "note", detail)


def _repeatability(measured: Mapping[float, Measured]) -> Iterator[Finding]:
    for name, rounds in (
        ("plain", measured[0.0].plain),
        ("speculative", measured[0.0].speculative),
    ):
        if count := unrepeatable(rounds):
            detail = (
                f"the {name} arm gave another text in another round for {count} prompts at"
                " temperature 0: it is not repeatable"
            )
            yield Finding("repeatability", "warning", detail)


def _drift(measured: Mapping[float, Measured]) -> Iterator[Finding]:
    """Report changes of speed that only the machine can cause.

    Every round of plain decoding is the same work, and sampling is more work than greedy decoding.
    """
    seen: list[str] = []
    for temperature, arms in measured.items():
        rates = [metrics.throughput(answers) for answers in arms.plain]
        if max(rates) > (1 + DRIFT) * min(rates):
            spread = f"{min(rates):,.0f} to {max(rates):,.0f} tokens/s"
            seen.append(f"{spread} from round to round at temperature {temperature:g}")
    (_, greedy), *others = [
        (
            temperature,
            metrics.throughput(request for answers in arms.plain for request in answers),
        )
        for temperature, arms in measured.items()
    ]
    for temperature, rate in others:
        if rate > (1 + DRIFT) * greedy:
            seen.append(
                f"{greedy:,.0f} tokens/s at temperature 0 and {rate:,.0f} at {temperature:g},"
                " though to sample is more work"
            )
    if seen:
        detail = (
            f"plain decoding ran at {'; at '.join(seen)}: the machine is busy, or changes its"
            " clock. tokens/s and latencies of one arm hold for now alone; a speed-up less so,"
            " since its two arms took turns"
        )
        yield Finding("drift", "note", detail)
