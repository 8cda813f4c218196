"""What `bench_peers` makes of its measurements: figures per engine and precision, a table for the
terminal, and the same in Markdown for docs/peers.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.resampling import Estimate, bootstrap_ratio, bootstrap_ratio_of_sums

BEGIN = "<!-- measured: python -m tests.benchmarks peers --markdown docs/peers.md -->"
END = "<!-- end of what was measured -->"
BUSY_CORES = 0.2  # work of others, in cores, above which the figures are marked

NOT_RUN = "not run"
HEADINGS = (
    "engine",
    "precision",
    "plain tokens/s",
    "speculative tokens/s",
    "speed-up",
    "acceptance length",
    "speculative text = plain text",
    "plain text = FP32 text",
)


@dataclass(frozen=True)
class Turn:
    """One arm's answers to all prompts of a round. steps: verify steps; None for plain decoding.
    others_cpu_s: processor time that other programs used meanwhile.
    """

    ids: list[list[int]]
    seconds: list[float]
    accepted: int | None = None
    steps: int | None = None
    idle_cpu_s: float = 0.0
    wall_s: float = 0.0
    others_cpu_s: float = 0.0


@dataclass
class Arm:
    """One way of decoding: its turns, or why there is none."""

    turns: list[Turn] = field(default_factory=list)
    missing: str | None = None

    @property
    def tokens(self) -> list[list[int]]:  # [rounds][prompts]
        return [[len(ids) for ids in turn.ids] for turn in self.turns]

    @property
    def seconds(self) -> list[list[float]]:
        return [turn.seconds for turn in self.turns]

    @property
    def rate(self) -> Estimate:
        """Tokens per second over all prompts and rounds, with its interval."""
        return bootstrap_ratio_of_sums(self.tokens, self.seconds)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verify step, the engine's own token included: 1 + accepted / steps."""
        steps = sum(turn.steps or 0 for turn in self.turns)
        return 1 + sum(turn.accepted or 0 for turn in self.turns) / steps if steps else None


@dataclass
class Row:
    """An engine in one precision."""

    engine: str
    precision: str
    plain: Arm = field(default_factory=Arm)
    speculative: Arm = field(default_factory=Arm)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> str | None:
        """Why the row is not complete."""
        return self.plain.missing or self.speculative.missing

    @property
    def speedup(self) -> Estimate:
        plain, fast = self.plain, self.speculative
        return bootstrap_ratio((fast.tokens, plain.tokens), (fast.seconds, plain.seconds))


@dataclass(frozen=True)
class Difference:
    """Where the text of a prompt first departs from another. tokens: of the text and of the other;
    None where it had ended.
    """

    prompt: int
    position: int
    tokens: tuple[int | None, int | None]


@dataclass(frozen=True)
class Comparison:
    """Texts against a reference's: how many prompts have the same text in every round, and where
    the others differ first.
    """

    prompts: int
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> int:
        return self.prompts - len(self.differences)


def compare_texts(arm: Arm, reference: Arm, eos: Sequence[int]) -> Comparison:
    """Compare the texts of every round with the reference's first. An end token is no part of a
    text: some engines return it, some do not.
    """
    differences = []
    for prompt, expected in enumerate(reference.turns[0].ids):
        texts = [_without_end(turn.ids[prompt], eos) for turn in arm.turns]
        expected = _without_end(expected, eos)
        differing = next((text for text in texts if text != expected), None)
        if differing is not None:
            differences.append(_first_difference(prompt, differing, expected))
    return Comparison(len(reference.turns[0].ids), tuple(differences))


def _without_end(ids: list[int], eos: Sequence[int]) -> list[int]:
    return ids[:-1] if ids and ids[-1] in eos else ids


def _first_difference(prompt: int, text: list[int], expected: list[int]) -> Difference:
    shorter = min(len(text), len(expected))
    position = next((i for i in range(shorter) if text[i] != expected[i]), shorter)
    first, second = (ids[position] if position < len(ids) else None for ids in (text, expected))
    return Difference(prompt, position, (first, second))


def others_cores(rows: Sequence[Row]) -> float:
    """Cores that other programs kept busy on average, during the turns."""
    turns = [turn for row in rows for arm in (row.plain, row.speculative) for turn in arm.turns]
    wall = sum(turn.wall_s for turn in turns)
    return sum(turn.others_cpu_s for turn in turns) / wall if wall else 0.0


# The table.


def cells(row: Row, own: Comparison | None, to_fp32: Comparison | None) -> tuple[str, ...]:
    """The row's cells, in the order of HEADINGS. own: speculative against plain texts; to_fp32:
    plain texts against those of the FP32 reference.
    """
    known = [row.engine, row.precision]
    for arm in (row.plain, row.speculative):
        if arm.missing is not None:
            known.append(f"{NOT_RUN}: {arm.missing}")
            return (*known, *[""] * (len(HEADINGS) - len(known)))
        known.append(_spanned(arm.rate, "{:.0f}"))
    length = row.speculative.acceptance_length
    return (
        *known,
        _spanned(row.speedup, "{:.2f}x"),
        "not told" if length is None else f"{length:.2f}",
        _share(own),
        _share(to_fp32),
    )


def _spanned(estimate: Estimate, form: str) -> str:
    value, low, high = (form.format(number) for number in estimate)
    return f"{value} ({low.rstrip('x')} to {high.rstrip('x')})"


def _share(comparison: Comparison | None) -> str:
    return "-" if comparison is None else f"{comparison.equal} of {comparison.prompts}"


def as_text(table: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their cells; the reason of a row that was not run takes the rest of it."""
    complete = [line for line in table if not any(cell.startswith(NOT_RUN) for cell in line)]
    widths = [max(len(line[i]) for line in complete) for i in range(len(HEADINGS))]
    for i in (0, 1):
        widths[i] = max(len(line[i]) for line in table)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def as_markdown(table: Sequence[Sequence[str]]) -> str:
    ruled = [table[0], ["---"] * len(HEADINGS), *table[1:]]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in ruled
    )


def told(
    row: Row, comparison: Comparison, gap: Callable[[Difference], float], near_tie_margin: float
) -> list[str]:
    """A line per text that differs from the row's plain one. gap: how far the lower of both tokens
    lies below the best, in logits of the float32 model.
    """
    lines = []
    for difference in comparison.differences:
        distance = gap(difference)
        kind = "a near-tie" if distance <= near_tie_margin else "not a near-tie"
        lines.append(
            f"{row.engine}, {row.precision}: prompt {difference.prompt + 1} differs from plain"
            f" decoding at token {difference.position + 1}, {kind} ({distance:.4f} logits of the"
            " float32 model)"
        )
    return lines


def write_block(page: Path, block: str) -> None:
    """Replace what lies between the two marks of the page. Raises ValueError if they are not
    there.
    """
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page} needs the lines {BEGIN!r} and {END!r}, once each")
    head, rest = text.split(BEGIN)
    page.write_text(
        f"{head}{BEGIN}\n\n{block.strip()}\n\n{END}{rest.split(END)[1]}", encoding="utf-8"
    )


def versions_of(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """engine -> package -> version."""
    return {row.engine: row.versions for row in rows if row.versions}
