"""The contents of a report as tables of plain text. Every renderer prints the same tables, so each
number is formatted in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from toolkit.bench.definitions import LATENCIES, METRICS, PERCENTILES, heading
from toolkit.bench.metrics import needed_words, too_few_words
from toolkit.records.build import CompiledEngine, LayerCounts, QuantizationQuality, TensorRtLlmBuild
from toolkit.records.judged import (
    Distribution,
    DistributionTest,
    Divergence,
    DraftCheck,
    MarginBin,
    Parity,
)
from toolkit.records.measured import Acceptance, Arm, Gate, Interval, Ratio, Speedup
from toolkit.records.report import ValidationReport
from toolkit.report.acceptance import acceptance_tables
from toolkit.report.advice import at_once
from toolkit.report.cells import DASH, Table, capital, interval, number, percent, size
from toolkit.report.expected import measured_peak
from toolkit.report.load import load_tables
from toolkit.report.outlook import outlook_tables
from toolkit.rounding import decimals

__all__ = [
    "gate_definitions",
    "gate_title",
    "gates_table",
    "headline",
    "next_steps",
    "notes",
    "ordered",
    "proviso",
    "shown",
    "tables",
]

LATENCY_LEGEND = " ".join(
    f"{METRICS[name].title}: {METRICS[name].spelled_out}." for name in LATENCIES
)
WORST_LAYERS = 8
SHOWN_DIVERGENCES = 20
OVER_PLAN = 1.1  # measured / planned memory; libraries and allocators alone vary by this much
UPPER_BOUNDS = {"parity", "seeded_parity", "wrong_choices"}  # metrics judged by an upper bound
REFERENCES = {"engine": "by the engine", "source": "by its source"}
REFERENCE_MODELS = {"engine": "compiled engine", "source": "unquantized, float32"}


def gate_title(gate: Gate) -> str:
    """Return the words for what a gate judges."""
    scope, title = gate.scope, METRICS[gate.metric].title
    title = capital(title) if scope.percentile is None else f"{title} p{scope.percentile}"
    if scope.over == "plain":
        title += " against plain"
    if scope.reference is not None:
        title += f", {REFERENCES[scope.reference]}"
    if scope.concurrency is not None:
        title += f", {at_once(scope.concurrency)}"
    if scope.rate is not None:
        title += f", {scope.rate:g} requests/s"
    if scope.temperature is not None:
        title += f", T = {scope.temperature:g}" if scope.temperature else ", greedy"
    return title


def gate_definitions(gate: Gate) -> tuple[str, ...]:
    """Return the names of the metrics that define a gate's figure."""
    if gate.scope.percentile is None:
        return (gate.metric,)
    is_ratio = gate.scope.over is not None
    return (gate.metric, "percentiles", *(("latency_ratio",) if is_ratio else ()))


def shown(gate: Gate) -> tuple[str, str]:
    """Return (measured, limit) of a gate, with units and the direction of the limit."""
    sign = "≥" if gate.direction == "at_least" else "≤"
    if gate.metric == "draft_check":  # its limit is an expected count, not a bound
        return _filled("{:,.0f} kept", gate.measured), _filled("about {:,.0f}", gate.limit)
    if gate.unit == "x":
        digits = 2 if gate.measured is None else decimals([gate.measured], gate.limit)
        pattern = f"{{:.{digits}f}}x"
        return _filled(pattern, gate.measured), f"{sign} {_filled(pattern, gate.limit)}"
    if gate.unit == "share":
        measured = _at_most(gate) if gate.metric in UPPER_BOUNDS else percent(gate.measured)
        is_none = gate.metric == "errors" and gate.limit == 0
        return measured, "none" if is_none else f"{sign} {percent(gate.limit)}"
    if gate.unit in ("tokens", "requests"):  # a count of wrong ones
        return _filled("{:.0f} wrong", gate.measured), "none"
    if gate.unit == "p-value":
        return _filled("p = {:.2g}", gate.measured), f"{sign} {_filled('{:g}', gate.limit)}"
    measured = DASH if gate.measured is None else f"{number(gate.measured)} {gate.unit}"
    return measured, f"{sign} {_filled('{:,g}', gate.limit)} {gate.unit}"


def _filled(pattern: str, value: float | None) -> str:
    return DASH if value is None else pattern.format(value)


def _at_most(gate: Gate) -> str:
    """Return the upper bound that a rate is judged by. The gate's detail holds the rate itself."""
    if gate.measured is None:
        return DASH
    digits = decimals(
        [100 * gate.measured], None if gate.limit is None else 100 * gate.limit, least=1
    )
    return f"at most {gate.measured:.{digits}%}"


def headline(report: ValidationReport) -> str:
    """Return one sentence that sums up the result."""
    if report.replaced:
        unjudged = sum(gate.outcome == "NOT JUDGED" for gate in report.gates)
        return (
            f"A rehearsal with small random models: {len(report.gates) - unjudged} gates were"
            f" judged and {unjudged} were not, among them those on speed and quality. It shows that"
            " the deployment is built and served correctly, and says nothing about its models."
        )
    if report.speedup is None or report.parity is None:
        plain = (
            f"Served without speculation at {number(report.arms.plain.tokens_per_s)} tokens/s, one"
            " request at a time."
        )
        if report.advice and is_left_out(report):
            return f"{plain} The advisor chose that: {report.advice.reason}."
        return plain
    seeded = report.sampled.parity
    same = report.parity.identical + (seeded.identical if seeded else 0)
    compared = report.parity.prompts + (seeded.prompts if seeded else 0)
    text = f"{same} of {compared} texts are the same, token for token"
    return f"{_effect(report.speedup)} at temperature 0, one request at a time, and {text}."


def _effect(speedup: Speedup) -> str:
    factor, low, high = speedup.estimate, speedup.low, speedup.high
    if low <= 1 <= high:
        return (
            "This run does not tell whether speculation makes this deployment faster"
            f" ({factor:.2f}x, {speedup.confidence:.0%} interval {low:.2f} to {high:.2f})"
        )
    speed = f"{factor:.2f}x faster" if factor >= 1 else f"{1 / factor:.2f}x slower"
    return f"Speculation makes this deployment {speed}"


def proviso(report: ValidationReport) -> str:
    """Return what the verdict alone would hide, or an empty text."""
    if report.replaced:
        unjudged = sum(gate.outcome == "NOT JUDGED" for gate in report.gates)
        return f"rehearsed with stand-ins, {unjudged} of {len(report.gates)} gates not judged"
    if is_left_out(report):
        return "without speculation: the advisor left it out"
    return "" if report.arms.speculative is not None else "without speculation"


def is_left_out(report: ValidationReport) -> bool:
    """Whether the advisor, which max_draft_len: auto calls, chose not to speculate."""
    return (
        report.arms.speculative is None
        and report.advice is not None
        and not report.advice.speculate
    )


def next_steps(report: ValidationReport) -> list[str]:
    """Return what to do now: the fixes of gates that did not pass, then warnings."""
    hints: dict[str, list[str]] = {}  # fix -> titles of the gates that ask for it
    for gate in ordered(report.gates):
        if gate.outcome not in ("PASS", "NOT JUDGED"):
            hints.setdefault(gate.next_step or gate.detail, []).append(gate_title(gate))
    steps = [f"{'; '.join(titles)}: {hint}" for hint, titles in hints.items()]
    steps += [
        f"{finding.check.capitalize()}: {finding.detail}"
        for finding in report.findings
        if finding.severity in ("warning", "error")
    ]
    if steps:
        return steps
    if report.replaced:
        return [
            "Nothing needs fixing. Build it where its models and its engine are: toolkit build"
            " CONFIG, without --rehearse."
        ]
    is_vllm = any(engine.kind == "vllm" for engine in report.engines.values())
    script = "launch_vllm.sh" if is_vllm else "launch.sh"
    return [
        "Nothing needs fixing. Serve it with toolkit serve CONFIG, or with the repository's own"
        f" {script}."
    ]


def notes(report: ValidationReport) -> list[str]:
    """Return what a reader should know but need not act on, such as what was not measured."""
    told = [
        f"{finding.check.capitalize()}: {finding.detail}"
        for finding in report.findings
        if finding.severity == "note"
    ]
    if report.crossover is not None:
        told.insert(0, f"Load: speculation is {report.crossover.detail}")
    return told + _over_plan(report)


def _over_plan(report: ValidationReport) -> list[str]:
    """Name the stages that took notably more memory than planned. Somebody may have relied on the
    plan for a larger model.
    """
    peaks = [(stage, measured_peak(stage, report.stages)) for stage in report.memory]
    return [
        f"Memory: {stage.stage} took {size(peak)} where {size(stage.total_bytes)} was planned"
        for stage, peak in peaks
        if peak is not None and peak > OVER_PLAN * stage.total_bytes
    ]


def ordered(gates: Sequence[Gate]) -> list[Gate]:
    """Put the gates that did not pass first, and keep the order otherwise."""
    order = ("FAIL", "INCONCLUSIVE", "PASS", "NOT JUDGED")
    return sorted(gates, key=lambda gate: order.index(gate.outcome))


def gates_table(report: ValidationReport) -> Table:
    rows = [
        (gate_title(gate), gate.outcome, *shown(gate), gate.detail)
        for gate in ordered(report.gates)
    ]
    return Table("Gates", ("gate", "outcome", "measured", "limit", "why"), tuple(rows), text=True)


def tables(report: ValidationReport) -> list[Table]:
    """Return all tables behind the verdict, in the order of a reader's questions."""
    shown_tables = [_replaced(report.replaced)] if report.replaced else []
    shown_tables += [_speed(report), _latencies(report), *load_tables(report.load)]
    if any(ratio.estimate is not None for _, ratios in _ratios(report) for ratio in ratios):
        shown_tables.append(_latency_ratios(report))
    if report.acceptance is not None:
        shown_tables.append(_acceptance(report))
    shown_tables += acceptance_tables(report)
    if report.parity is not None:
        shown_tables.append(_parity(report))
        shown_tables += [
            table
            for table in (_parity_arms(report), _severity(report), _divergences(report))
            if table.rows
        ]
    if report.agreements:
        shown_tables.append(_agreements(report))
    if report.draft_check is not None:
        shown_tables.append(_draft_check(report.draft_check))
    if report.distribution is not None:
        shown_tables.append(_distribution(report.distribution))
    if report.quality.target is not None or report.quality.draft is not None:
        shown_tables += [_quality(report), _layers(report)]
    shown_tables += outlook_tables(report)
    if report.counters:
        shown_tables.append(_counters(report))
    if report.stages:
        shown_tables.append(_stages(report))
    if report.engines:
        shown_tables.append(_engines(report))
    if report.environment:
        rows = tuple((name, value) for name, value in report.environment.items())
        shown_tables.append(Table("Environment", ("what", "which"), rows, text=True))
    return shown_tables


def _replaced(replaced: Sequence[str]) -> Table:
    rows = tuple((what, by.strip()) for what, _, by in (line.partition(":") for line in replaced))
    return Table("Replaced", ("what", "rehearsed with"), rows, text=True, is_brief=True)


def arm_columns(report: ValidationReport) -> list[tuple[str, Arm]]:
    """Return the measured arms with their headings, greedy first."""
    columns: list[tuple[str, Arm]] = []
    for label, arms in (
        ("T = 0", report.arms),
        (f"T = {report.sampled.temperature:g}", report.sampled.arms),
    ):
        columns.append((f"plain, {label}", arms.plain))
        if arms.speculative is not None:
            columns.append((f"spec., {label}", arms.speculative))
    return columns


def _speed(report: ValidationReport) -> Table:
    columns = arm_columns(report)
    arms = [arm for _, arm in columns]
    rows = [
        (METRICS["tokens_per_s"].title, *(number(arm.tokens_per_s, 4) for arm in arms)),
        ("requests", *(str(arm.requests) for arm in arms)),
        ("output tokens", *(f"{arm.output_tokens:,}" for arm in arms)),
        ("request time, s", *(number(arm.request_time_s, 4) for arm in arms)),
        (heading("distinct_4grams"), *(number(arm.distinct_4grams, 2) for arm in arms)),
        (
            "ended by",
            *(
                ", ".join(f"{name} {count}" for name, count in arm.finish_reasons.items())
                for arm in arms
            ),
        ),
    ]
    note = " ".join(
        _speedup_sentence(label, speedup)
        for label, speedup in (
            ("greedy", report.speedup),
            (f"T = {report.sampled.temperature:g}", report.sampled.speedup),
        )
        if speedup is not None
    )
    if report.speedup is not None:
        note += " An interval holds for this machine, as busy as it was then."
    if report.plain_arm == "restarts":
        note += " The plain arm is a server without speculation; the two were started in turns."
    if report.plain_arm == "server":
        note += " The plain arm is a second server without speculation, which ran beside the first."
    if report.sampled.speedup is not None:
        note += (
            " Timed requests carry no seed, so at temperature > 0 the accept rule is"
            f" {report.sampled.rule}."
        )
    return Table(
        "Speed",
        ("", *(name for name, _ in columns)),
        tuple(rows),
        ("tokens_per_s", "speedup", "distinct_4grams"),
        note,
        is_brief=True,
    )


def _speedup_sentence(label: str, speedup: Speedup) -> str:
    interval = f"{speedup.confidence:.0%} interval {speedup.low:.2f} to {speedup.high:.2f}"
    return (
        f"Speed-up, {label}: {speedup.estimate:.2f}x ({interval}, {speedup.prompts} prompts x"
        f" {speedup.rounds} rounds)."
    )


def _latencies(report: ValidationReport) -> Table:
    columns = arm_columns(report)
    rows: list[tuple[str, ...]] = []
    reasons: set[str] = set()
    for name in LATENCIES:
        for q in PERCENTILES:
            latencies = [arm.latencies[name] for _, arm in columns]
            figures = (number(getattr(latency, f"p{q}")) for latency in latencies)
            rows.append((f"{METRICS[name].title} p{q}", *figures))
            too_few = [
                latency.unsupported[f"p{q}"]
                for latency in latencies
                if f"p{q}" in latency.unsupported
            ]
            reasons |= {
                needed_words(q, few) if few.have else too_few_words(q, few) for few in too_few
            }
    note = LATENCY_LEGEND
    if reasons:
        note += f" {DASH}: too few samples ({'; '.join(sorted(reasons))})."
    return Table(
        f"Latency, {METRICS[LATENCIES[0]].unit}",
        ("", *(name for name, _ in columns)),
        tuple(rows),
        (*LATENCIES, "percentiles"),
        note,
        is_brief=True,
    )


def _ratios(report: ValidationReport) -> list[tuple[str, Sequence[Ratio]]]:
    pairs = (
        ("greedy", report.speedup),
        (f"T = {report.sampled.temperature:g}", report.sampled.speedup),
    )
    return [(label, speedup.latencies) for label, speedup in pairs if speedup is not None]


def _latency_ratios(report: ValidationReport) -> Table:
    columns = _ratios(report)
    by_name = [
        {(ratio.metric, ratio.percentile): ratio for ratio in ratios if ratio.estimate is not None}
        for _, ratios in columns
    ]
    keys = [(ratio.metric, ratio.percentile) for ratio in columns[0][1]]
    rows = tuple(
        (f"{METRICS[key[0]].title} p{key[1]}", *(_ratio(ratios.get(key)) for ratios in by_name))
        for key in keys
        if any(key in ratios for ratios in by_name)
    )
    note = "Below 1: faster with speculation. A ratio with too few samples is left out."
    return Table(
        "Latency, speculative / plain",
        ("", *(label for label, _ in columns)),
        rows,
        ("latency_ratio",),
        note,
    )


def _ratio(ratio: Ratio | None) -> str:
    return DASH if ratio is None else interval(ratio.estimate, ratio.low, ratio.high)


def _acceptance(report: ValidationReport) -> Table:
    pairs = [
        ("greedy", report.acceptance),
        (f"T = {report.sampled.temperature:g}", report.sampled.acceptance),
    ]
    measured = [(mode, acceptance) for mode, acceptance in pairs if acceptance is not None]
    rows = [
        (
            _with_formula("acceptance_rate"),
            *(f"{percent(a.rate)} ({a.accepted:,} / {a.drafted:,})" for _, a in measured),
        ),
        (
            _with_formula("acceptance_length"),
            *(f"{number(a.length)} ({a.verify_steps:,} steps)" for _, a in measured),
        ),
    ]
    if any(a.alpha is not None for _, a in measured):
        rows.append((_with_formula("acceptance_alpha"), *(_alpha(a.alpha) for _, a in measured)))
    for i in range(max((len(a.by_position) for _, a in measured), default=0)):
        rows.append(
            (f"position {i + 1}: joint, conditional", *(_position(a, i) for _, a in measured))
        )
    names = ("acceptance_rate", "acceptance_length", "acceptance_alpha", "acceptance_by_position")
    note = (
        "Joint: share of the tokens drafted at this position that were accepted. Conditional: the"
        " same, counting only steps that accepted every token before it."
    )
    return Table(
        "Acceptance",
        ("", *(mode for mode, _ in measured)),
        tuple(rows),
        names,
        note if len(rows) > 2 else "",
        is_brief=True,
    )


def _with_formula(name: str) -> str:
    return f"{METRICS[name].title}: {METRICS[name].formula}"


def _alpha(alpha: Interval | None) -> str:
    return DASH if alpha is None else interval(alpha.estimate, alpha.low, alpha.high)


def _position(acceptance: Acceptance, i: int) -> str:
    if i >= len(acceptance.by_position):
        return DASH
    position = acceptance.by_position[i]
    return f"{percent(position.joint)}, {percent(position.conditional)}"


def _checks(report: ValidationReport) -> list[tuple[str, Parity]]:
    pairs = [
        ("greedy", report.parity),
        (f"seeded, T = {report.sampled.temperature:g}", report.sampled.parity),
    ]
    return [(label, parity) for label, parity in pairs if parity is not None]


def _parity(report: ValidationReport) -> Table:
    checks = _checks(report)
    rows = [
        ("prompts", *(str(parity.prompts) for _, parity in checks)),
        ("identical", *(str(parity.identical) for _, parity in checks)),
        ("numerically equivalent", *(str(parity.equivalent) for _, parity in checks)),
        ("suspicious", *(str(parity.suspicious) for _, parity in checks)),
        ("broken", *(str(parity.broken) for _, parity in checks)),
        ("could not be judged", *(str(parity.unexplained) for _, parity in checks)),
        ("speculative arms equal one another", *(str(parity.arms_equal) for _, parity in checks)),
        ("diverge, same place at every length", *(str(parity.same_place) for _, parity in checks)),
        ("diverge, place moves with the length", *(str(parity.moved) for _, parity in checks)),
        (
            "rate of divergence, upper bound",
            *(f"{percent(p.rate)}, {percent(p.rate_high)}" for _, p in checks),
        ),
        ("tokens compared", *(f"{parity.compared_tokens:,}" for _, parity in checks)),
    ]
    columns = ("", *(label for label, _ in checks))
    note = (
        "Numerically equivalent: rounding explains the other token. Suspicious: rounding hardly"
        " explains it. Broken: rounding does not explain it. Upper bound: at"
        f" {checks[0][1].confidence:.0%} confidence."
    )
    return Table(
        "Speculative text against plain text",
        columns,
        tuple(rows),
        ("parity", "seeded_parity"),
        note,
    )


def _parity_arms(report: ValidationReport) -> Table:
    """Tabulate the outcome of every arm."""
    rows: list[tuple[str, ...]] = []
    for label, parity in _checks(report):
        for arm in parity.arms:
            name = "verify, keep nothing" if arm.arm == "verify" else "speculative"
            counts = (arm.identical, arm.equivalent, arm.suspicious, arm.broken, arm.unexplained)
            rows.append((f"{label}: {name}, draft length {arm.draft_len}", *map(str, counts)))
    columns = ("arm", "identical", "equivalent", "suspicious", "broken", "not judged")
    return Table("Every arm against plain text, prompts", columns, tuple(rows), ("parity",))


def _severity(report: ValidationReport) -> Table:
    """Tabulate how decided the reference was where texts diverge. Rounding makes them diverge at
    small margins only.
    """
    checks = [(label, parity) for label, parity in _checks(report) if parity.divergences]
    bins = [parity.severity for _, parity in checks]
    rows = tuple(
        (_range(row[0]), *(str(margin.differing) for margin in row))
        for row in zip(*bins, strict=True)
    )
    columns = ("the reference's margin, logits", *(label for label, _ in checks))
    return Table(
        "Divergences of all arms by how decided the reference was", columns, rows, ("parity",)
    )


def _range(margin: MarginBin) -> str:
    if margin.high is None:
        return f"from {margin.low:g}"
    if margin.low == 0:
        return f"below {margin.high:g}"
    return f"{margin.low:g} to {margin.high:g}"


def _agreements(report: ValidationReport) -> Table:
    """Tabulate token by token agreement, by how decided the reference was."""
    agreements = report.agreements
    rows: list[tuple[str, ...]] = [
        (
            "tokens that the reference chooses too",
            *(f"{a.rate:.2%} ({a.agreeing:,} / {a.tokens:,})" for a in agreements),
        ),
        ("interval", *(f"{a.rate_low:.2%} to {a.rate_high:.2%}" for a in agreements)),
        ("class", *(a.kind or "another precision" for a in agreements)),
        (
            "differ where the reference is decided",
            *(
                f"{a.decided_differing:,} / {a.decided:,}" if a.decided else DASH
                for a in agreements
            ),
        ),
        ("largest gap, logits", *(number(a.largest_gap) for a in agreements)),
    ]
    for i, margin in enumerate(agreements[0].margins):
        cells = (_share(a.margins[i]) for a in agreements)
        rows.append((f"differ where the margin is {_range(margin)}", *cells))
    columns = ("", *(REFERENCE_MODELS.get(a.against, a.against) for a in agreements))
    return Table(
        "Plain text against reference models, teacher-forced", columns, tuple(rows), ("agreement",)
    )


def _share(margin: MarginBin) -> str:
    return f"{margin.differing:,} / {margin.count:,}"


def _draft_check(check: DraftCheck) -> Table:
    rows = (
        ("steps", f"{check.after_full:,}", f"{check.earlier:,}"),
        (
            "first draft token is right, by the draft engine",
            f"{check.after_full_expected:,}",
            f"{check.earlier_expected:,}",
        ),
        (
            "first draft token was accepted by the server",
            f"{check.after_full_kept:,}",
            f"{check.earlier_kept:,}",
        ),
    )
    columns = ("", "after a fully accepted block", "before any")
    return Table(
        "The served draft against the draft engine, greedy", columns, rows, ("draft_check",)
    )


def _control(test: DistributionTest) -> str:
    return "not possible" if test.control_p_value is None else f"{test.control_p_value:.1g}"


def _distribution(distribution: Distribution) -> Table:
    rows = tuple(
        (
            test.name,
            f"{test.samples:,}",
            number(test.p_value),
            number(test.adjusted),
            "REJECTED" if test.rejected else "no",
            DASH if test.lean is None else f"{test.lean:+.1f}",
            number(test.detectable, 2),
            f"{number(test.control_effect, 2)}: {_control(test)}",
        )
        for test in distribution.tests
    )
    columns = (
        "test",
        "tokens or texts",
        "p",
        "adjusted p",
        "rejected",
        "lean, sigma",
        "detectable",
        "control: p",
    )
    if distribution.seeded:
        checks = (
            f"{distribution.outside_filters} tokens outside top-k or top-p;"
            f" {distribution.unrepeated} of {distribution.seeded} seeded requests did not repeat. "
        )
    else:
        checks = "The two arms are compared with each other, since the engine gives no logits. "
    note = (
        f"Temperature {distribution.temperature:g}, rule {distribution.rule},"
        f" {distribution.requests:,} requests in {distribution.seconds:.0f} s. {checks}All tests"
        f" together raise a false alarm once in {1 / distribution.false_alarm:,.0f} runs. Lean: how"
        " far the tokens lean towards the likeliest ones (or the draft's), in standard deviations."
        " Detectable: the smallest total variation that the test would detect. Control: p of the"
        " same tokens after they were bent by this much; it has to be small."
    )
    return Table(
        "Distribution of sampled tokens", columns, rows, ("distribution", "continuations"), note
    )


def _divergences(report: ValidationReport) -> Table:
    rows: list[tuple[str, ...]] = []
    for label, parity in _checks(report):
        rows += [_divergence(label, divergence) for divergence in parity.divergences]
    note = ""
    if len(rows) > SHOWN_DIVERGENCES:
        note = f"The first {SHOWN_DIVERGENCES} of {len(rows)}; report.json has all."
    columns = ("check", "prompt", "output token", "kind", "margin", "plain / speculative", "why")
    return Table(
        "Divergences",
        columns,
        tuple(rows[:SHOWN_DIVERGENCES]),
        ("parity",),
        note,
        text=True,
        is_brief=True,
    )


def _divergence(label: str, divergence: Divergence) -> tuple[str, ...]:
    tokens = " / ".join(
        "end" if token is None else str(token)
        for token in (divergence.plain_token, divergence.speculative_token)
    )
    why = divergence.detail
    if divergence.replay is not None:
        why += f" [{divergence.replay}]"
    return (
        f"{label}, {divergence.arm} {divergence.draft_len}",
        f"{divergence.prompt_index + 1}: {_short(divergence.prompt)}",
        str(divergence.position + 1),
        divergence.kind,
        number(divergence.margin),
        tokens,
        why,
    )


def _short(text: str, width: int = 40) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def _models(report: ValidationReport) -> list[tuple[str, QuantizationQuality]]:
    pairs = [("target", report.quality.target), ("draft", report.quality.draft)]
    return [(role, quality) for role, quality in pairs if quality is not None]


def _quality(report: ValidationReport) -> Table:
    models, kl = _models(report), METRICS["kl_mean"]
    rows = [
        (
            f"{kl.title}, mean, {kl.unit}",
            *(
                f"{number(q.kl_mean)} ({' to '.join(map(number, q.kl_interval))})"
                for _, q in models
            ),
        ),
        (f"{kl.title}, p99, {kl.unit}", *(number(q.kl_p99) for _, q in models)),
        (
            heading("top1_agreement"),
            *(
                f"{percent(q.top1_agreement)} ({' to '.join(map(percent, q.top1_interval))})"
                for _, q in models
            ),
        ),
        ("perplexity, source", *(number(q.source_perplexity, 4) for _, q in models)),
        ("perplexity, quantized", *(number(q.quantized_perplexity, 4) for _, q in models)),
        (f"largest {heading('layer_kl')}", *(_costliest(q) for _, q in models)),
        ("held-out tokens", *(f"{q.tokens:,}, of {q.texts:,} texts" for _, q in models)),
    ]
    note = ""
    if any(role == "draft" for role, _ in models):
        note = "The draft has no gate: its loss shows in acceptance."
    columns = ("", *(role for role, _ in models))
    return Table(
        "Quality of quantization",
        columns,
        tuple(rows),
        ("kl_mean", "top1_agreement", "layer_kl"),
        note,
    )


def _costliest(quality: QuantizationQuality) -> str:
    worst = max(quality.layer_kl, key=lambda layer: layer.kl)
    return f"{number(worst.kl)} ({worst.layer})"


def _layers(report: ValidationReport) -> Table:
    rows: list[tuple[str, ...]] = []
    for role, quality in _models(report):
        worst = sorted(quality.layers, key=lambda layer: -layer.relative_error)[:WORST_LAYERS]
        rows += [(f"{role}: {layer.layer}", percent(layer.relative_error)) for layer in worst]
    return Table(
        "Layers with the largest quantization error",
        ("layer", heading("layer_error")),
        tuple(rows),
        ("layer_error",),
    )


def _counters(report: ValidationReport) -> Table:
    rows = tuple(
        (
            c.name,
            f"{c.client:,}",
            DASH if c.server is None else f"{c.server:,}",
            "yes" if c.matches else "NO",
        )
        for c in report.counters
    )
    columns = ("counter", "client", "server", "equal")
    return Table("Counters of the server against the client's", columns, rows, ("counters",))


def _stages(report: ValidationReport) -> Table:
    rows = tuple(
        (
            cost.stage,
            f"{cost.seconds:,.1f}",
            size(cost.peak_memory_bytes),
            "reused" if cost.reused else "ran",
        )
        for cost in report.stages
    )
    note = ""
    if any(cost.stage == "validate" for cost in report.stages):
        note = "The time of validate includes serve, the server's own run. "
    if any(cost.peak_memory_bytes is None for cost in report.stages):
        note += f"{DASH}: not measured, or no more than the process held before the stage."
    return Table(
        "Stages",
        ("stage", "seconds", "peak memory", "this build"),
        rows,
        ("peak_memory",),
        note.rstrip(),
    )


def _engines(report: ValidationReport) -> Table:
    engines = report.engines.values()
    rows: list[tuple[str, ...]] = [
        ("precision", *(engine.quant_algo or "not quantized" for engine in engines)),
        ("KV cache", *(e.kv_cache_quant_algo or e.kv_dtype or e.dtype for e in engines)),
        ("mode", *(f"{engine.kind}, {engine.mode}, {engine.device}" for engine in engines)),
        ("activations", *(engine.dtype for engine in engines)),
        ("FP8 arithmetic", *(engine.fp8_compute or DASH for engine in engines)),
        ("weights", *(size(engine.weight_bytes) for engine in engines)),
        (
            "batch, input, sequence",
            *(f"{e.max_batch_size}, {e.max_input_len}, {e.max_seq_len}" for e in engines),
        ),
        ("draft length", *(str(engine.max_draft_len or DASH) for engine in engines)),
    ]
    if any(engine.tensorrt_llm is not None for engine in engines):
        rows += _tensorrt_llm_rows([engine.tensorrt_llm for engine in engines])
    notes = [
        f"{role}: {note}."
        for role, engine in report.engines.items()
        for note in (*engine.notes, *_executed_on_a_gpu(engine))
    ]
    return Table("Engines", ("", *report.engines), tuple(rows), note=" ".join(notes))


def _tensorrt_llm_rows(builds: Sequence[TensorRtLlmBuild | None]) -> list[tuple[str, ...]]:
    def row(name: str, text: Callable[[TensorRtLlmBuild], str]) -> tuple[str, ...]:
        return (name, *(DASH if build is None else text(build) or DASH for build in builds))

    rows = [
        row("TensorRT-LLM", lambda build: build.version),
        row("built by", lambda build: build.builder),
        row("ranks", lambda build: f"TP {build.tp_size}, PP {build.pp_size}"),
    ]
    if any(build is not None and build.layers is not None for build in builds):
        rows.append(row("layers", lambda build: _layer_counts(build.layers)))
    return rows


def _executed_on_a_gpu(engine: CompiledEngine) -> Iterator[str]:
    """Say what ran on a GPU and what did not, so that nobody takes the report for a measurement of
    what was never run.
    """
    if engine.tensorrt_llm is not None:
        yield from (f"executed on a GPU: {what}" for what in engine.tensorrt_llm.executed)
        yield from (f"not executed on a GPU: {what}" for what in engine.tensorrt_llm.not_executed)


def _layer_counts(counts: LayerCounts | None) -> str:
    if counts is None:
        return DASH
    precisions = ", ".join(f"{count} {name}" for name, count in counts.precisions.items())
    plugins = ", ".join(f"{count} {name}" for name, count in counts.plugins.items())
    parts = (
        f"{counts.layers}, {counts.fused} of them fused",
        precisions,
        f"plugins: {plugins}" if plugins else "",
    )
    return "; ".join(part for part in parts if part)
