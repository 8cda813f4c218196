"""The validate stage: a running endpoint and the gates of the YAML in, a report with a verdict out.

Nothing here starts a server or an engine: the endpoint, its counters and the reference model come in as arguments.

Two kinds of requests are sent. Those that are timed carry no seed, as most clients' do, so at temperature > 0 they run under
the deployment's own acceptance rule; at temperature 0 the same requests prove parity, beside untimed ones at other draft
lengths and through the speculative path that keeps nothing. Then each prompt is sent once more per arm at temperature > 0
with a seed under the `coupled` rule, where the texts have to be the same again. What is wrong is named by `diagnose`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from toolkit.config.schema import ValidationConfig
from toolkit.interfaces import Progress
from toolkit.records import (
    Acceptance,
    Arms,
    CompiledEngine,
    CounterCheck,
    Divergence,
    Finding,
    Gate,
    Parity,
    Quality,
    Sampled,
    Speedup,
    StageCost,
    ValidationReport,
)
from toolkit.validate import metrics
from toolkit.validate.agreement import agreement
from toolkit.validate.arms import ARMS, Endpoint, Measured, Sender, run_rounds
from toolkit.validate.counters import client_counts, reconcile
from toolkit.validate.diagnose import diagnose
from toolkit.validate.drafts import check_drafts
from toolkit.validate.gates import (
    INCONCLUSIVE,
    agreement_gate,
    check_gates,
    latency_gates,
    parity_gate,
    quality_gates,
    speedup_gate,
    verdict,
)
from toolkit.validate.parity import ArmTexts, Judge, compare, first_difference, unrepeatable
from toolkit.validate.prompts import read_prompts
from toolkit.validate.reference import Reference
from toolkit.validate.replay import Replay, replay_of
from toolkit.validate.stops import check_stops

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = ["SCHEMA_VERSION", "VERSION", "Endpoint", "Reference", "validate"]

VERSION = 2
SCHEMA_VERSION = 2
WARM_UP_PROMPTS = 2
BURSTS = 0.05  # share of requests delivered late above which we say so
LOOPING = 0.5  # distinct 4-grams below this: the texts repeat themselves


def validate(
    endpoint: Endpoint,
    config: ValidationConfig,
    *,
    name: str,
    max_draft_len: int,
    acceptance: str,
    reference: Reference,
    source: Reference | None = None,
    source_same_precision: bool = False,
    verify_arm: bool = True,
    quality: Quality,
    engines: Mapping[str, CompiledEngine],
    environment: Mapping[str, str],
    keep_replay: Callable[[Replay], str] | None = None,
    counters: Callable[[], Mapping[str, float]] | None = None,
    preceding: Sequence[Finding] = (),
    stages: Sequence[StageCost] = (),
    progress: Progress | None = None,
) -> ValidationReport:
    """Measure and judge a served deployment. Sends about (2 x rounds + 2) x prompts requests per arm, and more rounds if
    undecided.

    endpoint: a started server's client, `Client(server.grpc_url)`. counters: reads the server's own counters, for instance
    `lambda: read_counters(server.metrics_url)` of `toolkit.validate.counters`; None leaves them out, which is reported.
    reference: judges divergences; `reference_from_engine` of `toolkit.validate.reference` makes one of the target's engine.
    source: the unquantized checkpoint, None: not asked; source_same_precision: the deployment computes what that one does, up
    to rounding (nothing is quantized, and float32). verify_arm: the endpoint knows the acceptance rule `verify_only`.
    keep_replay: stores what `toolkit validate --replay` needs of one divergence, and returns the file's name.
    max_draft_len 0: the deployment does not speculate, and only the plain arm is measured. acceptance: the deployment's
    `speculation.acceptance`. environment: versions and hardware, name -> text. engines: by role, "target" and "draft".
    preceding: findings of earlier stages that a reader of the report must know; those that warn are taken over.
    config.prompts is read here (JSON Lines with a `prompt` per line, already resolved to a readable path).

    Raises UsageError for a prompts file that cannot be used, StageError when the endpoint refuses or breaks.
    """
    prompts = read_prompts(config.prompts, config.max_prompts)
    arms = ARMS if max_draft_len > 0 else ARMS[:1]
    report_progress = progress or (lambda done, total, what: None)
    what = "warming up"
    sender = Sender(endpoint, config.max_tokens, lambda: report_progress(len(sender.sent), None, what))
    before = counters() if counters is not None else {}
    for index, prompt in enumerate(prompts[:WARM_UP_PROMPTS]):
        for arm in arms:
            for temperature in (0.0, config.temperature):
                sender.send(index, prompt, arm, temperature=temperature)

    measured: dict[float, Measured] = {}
    for temperature in (0.0, config.temperature):
        what = f"measuring at temperature {temperature:g}"
        measured[temperature] = run_rounds(
            sender,
            prompts,
            arms=arms,
            rounds=config.rounds,
            max_rounds=config.max_rounds,
            undecided=lambda so_far: _undecided(so_far, config),
            seed=config.seed,
            options={"temperature": temperature},
        )
    greedy, sampled = measured[0.0], measured[config.temperature]
    plain = greedy.plain[0]
    parity, seeded, draft_check, stop_check = None, None, None, None
    judge = Judge(reference, config.parity.near_tie_margin)
    keep = _keeper(name, config, keep_replay)
    if max_draft_len > 0:
        what = "comparing draft lengths"
        arms_said = [ArmTexts("speculative", max_draft_len, list(zip(*greedy.speculative, strict=True)))]
        for arm, draft_len in _more_arms(config, max_draft_len, verify_arm):
            options = {"temperature": 0.0, "num_draft_tokens": draft_len}
            said = [sender.send(index, prompt, arm, **options) for index, prompt in enumerate(prompts)]
            arms_said.append(ArmTexts(arm, draft_len, [[one] for one in said]))
        what = "stop words"
        same = [first_difference(*pair) is None for pair in zip(plain, greedy.speculative[0], strict=True)]
        stop_check = check_stops(sender, prompts, plain, same, seed=config.seed)
        what = "seeded requests"
        seeds = [_seed(config, index) for index in range(len(prompts))]
        seeded_plain, seeded_said = _seeded_texts(sender, prompts, config)
        what = "asking the reference about divergences"
        parity = compare(plain, arms_said, judge, keep=keep)
        seeded_judge = replace(judge, temperature=config.temperature, seeds=seeds)
        seeded = compare(seeded_plain, [ArmTexts("speculative", max_draft_len, seeded_said)], seeded_judge, keep=keep)
        draft_check = check_drafts(greedy.speculative[0], max_draft_len, reference)
    what = "asking the reference about every token"
    agreements = [agreement("engine", plain, reference, judge.near_tie_margin, same_precision=True, seed=config.seed)]
    if source is not None:
        what = "asking the unquantized model about every token"
        report_progress(len(sender.sent), None, what)
        agreements.append(
            agreement("source", plain, source, judge.near_tie_margin, same_precision=source_same_precision, seed=config.seed)
        )
    diagnoses = diagnose(
        plain=plain,
        parity=parity,
        agreements=agreements,
        draft_check=draft_check,
        stop_check=stop_check,
        overrun=sum((one.output_tokens or 0) > config.max_tokens for one in sender.sent),
        reference=reference,
        near_tie_margin=judge.near_tie_margin,
    )

    checks = () if counters is None else reconcile(counters, before, client_counts(sender.sent))
    greedy_arms, greedy_speedup, greedy_acceptance = _figures(greedy, config)
    sampled_arms, sampled_speedup, sampled_acceptance = _figures(sampled, config)
    gates = [
        *_gates(config, greedy_arms, greedy_speedup, parity, ("parity", "speedup", "")),
        *_gates(config, sampled_arms, sampled_speedup, seeded, ("seeded_parity", "speedup_sampled", "_sampled")),
        *(gate for one in agreements if (gate := agreement_gate(one, quality.target)) is not None),
        *check_gates(draft_check, stop_check, diagnoses),
        *quality_gates(quality.target, config.quality),
    ]
    return ValidationReport(
        schema_version=SCHEMA_VERSION,
        name=name,
        verdict=verdict(gates),
        gates=tuple(gates),
        arms=greedy_arms,
        speedup=greedy_speedup,
        acceptance=greedy_acceptance,
        parity=parity,
        sampled=Sampled(
            temperature=config.temperature,
            rule="rejection" if acceptance == "auto" else acceptance,
            arms=sampled_arms,
            speedup=sampled_speedup,
            acceptance=sampled_acceptance,
            parity=seeded,
        ),
        agreements=tuple(agreements),
        draft_check=draft_check,
        stop_check=stop_check,
        quality=quality,
        counters=checks,
        findings=(
            *(finding for finding in preceding if finding.severity != "ok"),
            *diagnoses,
            *_findings(counters is not None, checks, greedy, {0.0: greedy_arms, config.temperature: sampled_arms}),
        ),
        environment=dict(environment),
        engines=dict(engines),
        stages=tuple(stages),
        definitions=metrics.DEFINITIONS,
    )


def _seed(config: ValidationConfig, index: int) -> int:
    return config.seed + index


def _more_arms(config: ValidationConfig, max_draft_len: int, verify_arm: bool) -> list[tuple[str, int]]:
    """(arm, draft length) of what is compared beside the arms that are timed."""
    asked = config.parity.draft_lens or (1, (max_draft_len + 1) // 2)
    shorter = sorted({draft_len for draft_len in asked if draft_len < max_draft_len})
    return [*([("verify", max_draft_len)] if verify_arm else []), *(("speculative", draft_len) for draft_len in shorter)]


def _seeded_texts(
    sender: Sender, prompts: Sequence[str], config: ValidationConfig
) -> tuple[list[RequestTiming], list[list[RequestTiming]]]:
    plain: list[RequestTiming] = []
    said: list[list[RequestTiming]] = []
    for index, prompt in enumerate(prompts):
        options = {"temperature": config.temperature, "seed": _seed(config, index), "acceptance": "coupled"}
        one, other = (sender.send(index, prompt, arm, **options) for arm in ARMS)
        plain.append(one)
        said.append([other])
    return plain, said


def _keeper(
    name: str, config: ValidationConfig, keep_replay: Callable[[Replay], str] | None
) -> Callable[[Divergence, RequestTiming, RequestTiming], str | None]:
    def keep(one: Divergence, plain: RequestTiming, other: RequestTiming) -> str | None:
        return None if keep_replay is None else keep_replay(replay_of(name, config, one, plain, other))

    return keep


def _undecided(measured: Measured, config: ValidationConfig) -> bool:
    if not measured.speculative:
        return False
    gates = speedup_gate("speedup", metrics.speedup(measured.speculative, measured.plain, seed=config.seed), config.latency)
    return any(gate.outcome == INCONCLUSIVE for gate in gates)


def _figures(measured: Measured, config: ValidationConfig) -> tuple[Arms, Speedup | None, Acceptance | None]:
    plain = metrics.arm(measured.plain, seed=config.seed)
    if not measured.speculative:
        return Arms(plain, None), None, None
    return (
        Arms(plain, metrics.arm(measured.speculative, seed=config.seed)),
        metrics.speedup(measured.speculative, measured.plain, seed=config.seed),
        metrics.acceptance(request for one in measured.speculative for request in one),
    )


def _gates(
    config: ValidationConfig, arms: Arms, speedup: Speedup | None, parity: Parity | None, names: tuple[str, str, str]
) -> list[Gate]:
    parity_name, speedup_name, suffix = names
    gates = [] if parity is None else [parity_gate(parity_name, parity, config.parity)]
    gates += [] if speedup is None else speedup_gate(speedup_name, speedup, config.latency)
    return gates + latency_gates(arms.speculative or arms.plain, config.latency, suffix)


def _findings(
    has_counters: bool, checks: Sequence[CounterCheck], greedy: Measured, arms: Mapping[float, Arms]
) -> list[Finding]:
    """What a reader should know and no gate judges."""
    findings: list[Finding] = []
    wrong = [check for check in checks if not check.matches]
    if wrong:
        listed = ", ".join(f"{check.name} {check.server} against {check.client}" for check in wrong)
        detail = (
            f"the server's counters differ from the client's own counts: {listed}. Another client was served, or one is wrong."
        )
        findings.append(Finding("counters", "warning", detail))
    elif checks:
        findings.append(Finding("counters", "ok", f"{len(checks)} counters of the server equal the client's own counts"))
    elif not has_counters:
        findings.append(Finding("counters", "warning", "the server's counters were not read"))
    for temperature, pair in arms.items():
        for name, arm in (("plain", pair.plain), ("speculative", pair.speculative)):
            if arm is not None and arm.distinct_4grams is not None and arm.distinct_4grams < LOOPING:
                detail = (
                    f"texts of the {name} arm at temperature {temperature:g} repeat themselves: {arm.distinct_4grams:.2f} of "
                    f"their 4-grams are distinct (below {LOOPING}), which flatters the speed-up; choose other prompts"
                )
                findings.append(Finding("looping texts", "warning", detail))
    late, judged = metrics.delivered_late(
        request for rounds in (greedy.plain, greedy.speculative) for one in rounds for request in one
    )
    if late > BURSTS * judged:
        detail = (
            f"{late} of {judged} requests got their first token late: the server had it long before. Tokens wait on their way "
            "and arrive in bursts, so TTFT, ITL and ICL tell of a busy machine, not of the engine; e2e and tokens/s hold"
        )
        findings.append(Finding("streaming", "warning", detail))
    for name, rounds in (("plain", greedy.plain), ("speculative", greedy.speculative)):
        if count := unrepeatable(rounds):
            detail = (
                f"the {name} arm gave another text in another round for {count} prompts at temperature 0: it is not repeatable"
            )
            findings.append(Finding("repeatability", "warning", detail))
    return findings
