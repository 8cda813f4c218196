"""Print what the advisor found: what to set, how the ways to draft compare, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from toolkit.config.schema import SpeculationConfig
from toolkit.records.advice import Advice, Candidate, Grid, SpeedupPrediction
from toolkit.records.measured import Interval
from toolkit.records.report import ValidationReport
from toolkit.words import TextSource

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = [
    "against_present",
    "at_once",
    "deployed",
    "print_advice",
    "print_grid",
    "teacher_forcing_note",
    "yaml_of",
]

DASH = "-"
# Advice.costs_are if the costs were timed on this machine: on the runtime, or on a server.
MEASURED, SERVED = "measured", "measured on the server"


def yaml_of(advice: Advice, *, schedule: bool = True, max_concurrency: bool = True) -> str:
    """Return the lines of the YAML that follow the advice.

    schedule: whether the server can choose the draft length by load. max_concurrency: whether the
    server can stop speculating above a given load.
    """
    if not advice.speculate:
        return "speculation: {kind: none}"
    lines = [
        "speculation:",
        f"  kind: {advice.drafter}",
        f"  max_draft_len: {advice.max_draft_len}",
    ]
    if schedule and len(advice.schedule) > 1:
        steps = ", ".join(f"{step.batch}: {step.draft_len}" for step in advice.schedule)
        lines.append(f"  draft_len_schedule: {{{steps}}}")
    elif max_concurrency and advice.max_concurrency is not None:
        lines.append(f"  max_concurrency: {advice.max_concurrency}")
    return "\n".join(lines)


def teacher_forcing_note(texts_are: TextSource, first_choices: float | None = None) -> str | None:
    """What acceptance is worth that was measured on texts which the target did not write for it;
    None if it wrote them. first_choices: as in Advice.
    """
    if texts_are == "written by the target":
        return None
    texts = {
        "completions": "the completions of validation.prompts",
        "held-out text": "held-out text",
        "prompts": "the prompts themselves",
    }[texts_are]
    share = ""
    if first_choices is not None:
        share = f", {first_choices:.1%} of whose tokens are the target's first choice"
    if first_choices == 1.0:
        return (
            f"acceptance by teacher forcing on {texts}{share}: exact for greedy decoding, and an"
            " approximation for sampling, whose texts differ"
        )
    return (
        f"acceptance by teacher forcing on {texts}{share}: an approximation, exact for greedy"
        " decoding only where the target itself wrote the texts"
    )


def print_grid(grid: Grid, console: Console) -> None:
    """Print every pair of precisions with the best one marked, then what each precision does to
    target and draft.
    """
    from rich.text import Text

    speeds = "" if grid.costs_are == MEASURED else f"; speeds and speed-ups {grid.costs_are}"
    cells = [
        (
            "*" if cell.best else "",
            cell.target,
            cell.draft,
            _interval(cell.alpha, 3),
            str(cell.draft_len),
            _interval(cell.acceptance_length, 2),
            _interval(cell.tokens_per_s, 0),
            _interval(cell.speedup, 2),
        )
        for cell in grid.cells
    ]
    titles = (
        "",
        "target",
        "draft",
        "alpha, greedy",
        "length",
        "tokens/step",
        "tokens/s",
        "speed-up over its plain decoding",
    )
    console.print(_table(f"pairs, one request at a time{speeds}", titles, cells, words=titles[:3]))
    target_columns = ("target", "KL to the unquantized, nats", "perplexity", "tokens")
    targets = [
        (
            target.quant_algo,
            _interval(target.kl, 4),
            _interval(target.perplexity, 2),
            str(target.tokens),
        )
        for target in grid.targets
    ]
    console.print(
        _table("targets on held-out text", target_columns, targets, words=target_columns[:1])
    )
    drafts = [
        (
            cost.target,
            cost.draft,
            f"{cost.alpha_lost:.1%}",
            f"{cost.draft_time_saved:.1%}",
            _interval(cost.speed, 3),
            cost.verdict,
        )
        for cost in grid.drafts
    ]
    draft_columns = (
        "target",
        "draft",
        "alpha lost",
        "draft time saved",
        "speed / unquantized draft's",
        "quantizing the draft",
    )
    console.print(
        _table(
            f"what quantizing the draft does{speeds}",
            draft_columns,
            drafts,
            words=("target", "draft", "quantizing the draft"),
        )
    )
    console.print(
        f"* the fastest pair whose target stays within KL {grid.max_kl:g} by its upper bound;"
        f" {grid.prompts} prompts, intervals at {grid.confidence:.0%}"
        + (", for acceptance alone" if speeds else ""),
        style="dim",
    )
    note = teacher_forcing_note(grid.texts_are)
    if note is not None:
        console.print(Text(note), highlight=False)
    for line in grid.left_out:
        console.print(Text(f"left out: {line}"), highlight=False)


def _interval(value: Interval, digits: int) -> str:
    return f"{value.estimate:.{digits}f} ({value.low:.{digits}f} to {value.high:.{digits}f})"


def print_advice(
    advice: Advice,
    console: Console,
    *,
    present: SpeculationConfig | None = None,
    own_draft: str | None = None,
    schedule: bool = True,
    max_concurrency: bool = True,
    served: ValidationReport | None = None,
    details: bool = False,
) -> None:
    """Print what to set, what that gains over the YAML's own setting, and how the ways to draft
    compare. `details` adds the reasons.

    present: the YAML's own setting. own_draft: the name of its draft. schedule: whether the server
    can choose the draft length by load. max_concurrency: whether the server can stop speculating
    above a given load. served: the deployment's last report.
    """
    from rich.text import Text

    console.print(
        Text(advice.reason, style="bold" if advice.speculate and advice.decided else "bold yellow")
    )
    lines = yaml_of(advice, schedule=schedule, max_concurrency=max_concurrency)
    console.print(Text(lines), highlight=False)
    if not schedule and len(advice.schedule) > 1:
        best = ", ".join(
            f"{step.draft_len} from {at_once(step.batch)} on" for step in advice.schedule
        )
        console.print(f"best are {best}; but this server takes one length only", highlight=False)
    if not advice.decided:
        console.print(
            "the interval contains 1, so the choice rests on the estimate alone: tune again on a"
            " quiet machine, or build and measure"
        )
    if advice.max_concurrency is not None:
        console.print(f"it pays up to {at_once(advice.max_concurrency)}, and not beyond")
    own = None if present is None else _own(advice, present, own_draft)
    for line in (
        None if present is None else against_present(advice, present, own),
        teacher_forcing_note(advice.texts_are, advice.first_choices),
        *_trust(advice, present, own, served),
    ):
        if line is not None:
            console.print(Text(line), highlight=False)
    console.print()
    console.print(_ranking(advice))
    for candidate in advice.candidates if details else ():
        console.print()
        console.print(_by_length(candidate))
        console.print(_alphas(candidate))
    console.print(
        f"costs {advice.costs_are}; {advice.prompts} prompts, {advice.tokens} tokens; intervals at"
        f" {advice.confidence:.0%}; took {advice.seconds:.1f} s"
        + ("" if details else "; --details prints alpha and every draft length"),
        style="dim",
    )


def deployed(advice: Advice) -> Candidate:
    """Return the deployment's own way to draft, which is the one that was served. If it was not
    compared, return the best one.
    """
    return next(
        (candidate for candidate in advice.candidates if candidate.name == advice.own),
        advice.candidates[0],
    )


def at_once(requests: int) -> str:
    return f"{requests} {'request' if requests == 1 else 'requests'} at once"


def against_present(
    advice: Advice, present: SpeculationConfig, own: Candidate | None
) -> str | None:
    """Say what the advice changes in the YAML, and the predicted gain for one request at a time."""
    best = advice.candidates[0]
    if not present.is_enabled:
        if not advice.speculate:
            return "the YAML already says so"
        return f"the YAML does not speculate: this gains {best.speedup - 1:.1%}"
    if present.max_draft_len == "auto":
        return "the YAML has max_draft_len: auto, so `toolkit build` sets this by itself"
    now = None if own is None else _speedup(own, present.max_draft_len)
    if now is None:
        return None
    has = (
        f"the YAML has {present.kind} with max_draft_len {present.max_draft_len}, predicted"
        f" {now:.2f}x"
    )
    if not advice.speculate:
        return f"{has}: leave it out"
    if own is best and present.max_draft_len == advice.max_draft_len:
        return f"{has}: keep it"
    if own is not None and own.high < 1.0:
        return f"{has}; {own.name} loses at every length: this gains {best.speedup / now - 1:.1%}"
    return f"{has}: this gains {best.speedup / now - 1:.1%}"


def _own(advice: Advice, present: SpeculationConfig, own_draft: str | None) -> Candidate | None:
    """Return the YAML's own way to draft, or None if it was not compared."""
    name = own_draft if present.has_draft_model else present.kind
    return next(
        (
            candidate
            for candidate in advice.candidates
            if (candidate.drafter, candidate.name) == (present.kind, name)
        ),
        None,
    )


def _speedup(candidate: Candidate, draft_len: int) -> float | None:
    """Return the predicted speed-up for one request at a time; greedy and sampled count alike."""
    speedups = [
        prediction.speedup
        for prediction in candidate.predictions
        if (prediction.batch, prediction.draft_len) == (1, draft_len)
    ]
    return math.prod(speedups) ** (1 / len(speedups)) if speedups else None


def _trust(
    advice: Advice,
    present: SpeculationConfig | None,
    own: Candidate | None,
    served: ValidationReport | None,
) -> Iterator[str]:
    """Say what the prediction leaves out, and what the last report measured on the endpoint."""
    if advice.costs_are not in (MEASURED, SERVED):
        yield (
            "the costs assume a GPU at its limits and leave out host and server: measure on that"
            " machine before you rely on them"
        )
        return
    basis = "predicted in this process, without the cost of sending chunks through Triton"
    if advice.costs_are == SERVED:
        basis = (
            "predicted from steps that a client timed on the server at a few draft lengths; what"
            " they take beyond plain ones counts as drafting"
        )
    sampled = None if served is None else served.sampled.speedup
    if served is None or served.speedup is None or sampled is None:
        yield f"{basis}: `toolkit build` measures it on the endpoint"
        return
    measured = (("greedy", served.speedup), (f"T = {served.sampled.temperature:g}", sampled))
    yield f"{basis}; on the endpoint, the last report measured"
    for (name, speedup), mode in zip(measured, ("greedy", "sampled"), strict=True):
        length = None if present is None else present.max_draft_len
        length = advice.max_draft_len if length == "auto" else length
        predictions = () if own is None else own.predictions
        predicted = [
            prediction.speedup
            for prediction in predictions
            if (prediction.mode, prediction.batch, prediction.draft_len) == (mode, 1, length)
        ]
        beside = f", {predicted[0]:.2f}x predicted" if predicted else ""
        yield f"  {name}: {speedup.estimate:.2f}x ({speedup.low:.2f} to {speedup.high:.2f}){beside}"
    if not (advice.speculate and advice.decided) and all(
        speedup.low > 1.0 for _, speedup in measured
    ):
        decides = "the measurement on the endpoint decides: speculation pays there"
        if advice.costs_are == MEASURED:
            decides += ", since a step streams one chunk for several tokens"
        yield decides


def _ranking(advice: Advice) -> RenderableType:
    rows = [
        (
            candidate.name,
            candidate.drafter,
            str(candidate.draft_len),
            f"{candidate.speedup:.2f} ({candidate.low:.2f} to {candidate.high:.2f})",
            f"{candidate.acceptance_length:.2f}",
            f"{candidate.break_even_length:.2f}",
            DASH if candidate.break_even_alpha is None else f"{candidate.break_even_alpha:.2f}",
        )
        for candidate in advice.candidates
    ]
    titles = (
        "drafts",
        "drafter",
        "best length",
        "speed-up",
        "tokens/step",
        "break-even",
        "break-even alpha",
    )
    return _table(
        "best first, one request at a time, greedy and sampled alike",
        titles,
        rows,
        words=titles[:2],
    )


def _by_length(candidate: Candidate) -> RenderableType:
    """Tabulate the predicted speed-up of each draft length for one request at a time, and what
    makes it differ from the formula.
    """
    rows = [
        (
            prediction.mode,
            str(prediction.draft_len),
            f"{prediction.speedup:.2f} ({prediction.low:.2f} to {prediction.high:.2f})",
            _measured(prediction),
            f"{prediction.acceptance_length:.2f}",
            f"{prediction.formula:.2f}",
            f"x {prediction.dependence:.2f}",
            f"x {prediction.verification:.2f}",
            f"x {prediction.host:.2f}",
        )
        for prediction in candidate.predictions
        if prediction.batch == 1
    ]
    titles = (
        "mode",
        "length",
        "predicted",
        "measured",
        "tokens/step",
        "formula",
        "dependence",
        "verify cost",
        "host, prefill",
    )
    return _table(f"{candidate.name}: speed-up over draft length", titles, rows, words=titles[:1])


def _measured(prediction: SpeedupPrediction) -> str:
    if prediction.measured is None:
        return DASH
    return (
        f"{prediction.measured:.2f} ({prediction.measured_low:.2f} to"
        f" {prediction.measured_high:.2f})"
    )


def _alphas(candidate: Candidate) -> RenderableType:
    rows = [
        (
            alpha.rule,
            alpha.domain or "all",
            f"{alpha.estimate:.3f} ({alpha.low:.3f} to {alpha.high:.3f})",
            str(alpha.tokens),
        )
        for alpha in candidate.alphas
    ]
    return _table(
        f"{candidate.name}: alpha",
        ("rule", "domain", "alpha", "tokens"),
        rows,
        words=("rule", "domain"),
    )


def _table(
    title: str, titles: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[str]
) -> RenderableType:
    """words: the columns that hold text; the others hold numbers and are aligned to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for name in titles:
        table.add_column(name, justify="left" if name in words else "right")
    for row in rows:
        table.add_row(*row)
    return table
