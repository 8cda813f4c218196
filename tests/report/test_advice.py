"""What `toolkit tune` prints: the verdict and the choice first, beside what the YAML has and
what was served.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from toolkit.config.schema import SpeculationConfig
from toolkit.records.advice import Advice
from toolkit.records.report import ValidationReport
from toolkit.report.advice import print_advice, print_grid
from toolkit.report.expected import grid_plot
from toolkit.report.outlook import outlook_tables


def printed(advice: Advice, **how: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=120)
    print_advice(advice, console, **how)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.fixture
def advice(advised: ValidationReport) -> Advice:
    assert advised.advice is not None
    return advised.advice


def test_verdict_and_choice_come_first_and_fit_a_screen(advice: Advice) -> None:
    lines = printed(advice)
    assert lines[0] == advice.reason
    assert lines[1:5] == [
        "speculation:",
        "  kind: draft_target",
        "  max_draft_len: 4",
        "  draft_len_schedule: {1: 4, 4: 2, 8: 0}",
    ]
    assert len(lines) <= 16
    assert "--details" in lines[-1] and "alpha, greedy" not in "\n".join(lines)
    detailed = "\n".join(printed(advice, details=True))
    assert (
        "speed-up over draft length" in detailed
        and "a <draft>: alpha" in detailed
        and "--details" not in detailed
    )


def test_a_schedule_that_cannot_be_set_is_told_and_not_put_into_the_yaml(advice: Advice) -> None:
    assert advice.max_concurrency == 4
    limited = printed(advice, schedule=False)
    assert limited[1:5] == [
        "speculation:",
        "  kind: draft_target",
        "  max_draft_len: 4",
        "  max_concurrency: 4",
    ]
    lines = printed(advice, schedule=False, max_concurrency=False)
    assert lines[1:4] == ["speculation:", "  kind: draft_target", "  max_draft_len: 4"]
    assert lines[4].startswith(
        "best are 4 from 1 request at once on, 2 from 4 requests at once on, 0 from 8 requests at"
        " once on;"
    )


def test_numbers_stand_to_the_right(advice: Advice) -> None:
    short = replace(advice.candidates[1], acceptance_length=12.5)
    rows = [
        line
        for line in printed(replace(advice, candidates=(advice.candidates[0], short)))
        if "draft_target " in line or " ngram " in line
    ]
    ends = [re.search(r"\d\d?\.\d\d +1\.90", line) for line in rows]
    assert len(rows) == 2 and all(ends)
    assert len({found.end() for found in ends if found}) == 1
    assert {found[0][:2] for found in ends if found} == {"3.", "12"}


@pytest.mark.parametrize(
    "most, words", [(1, "up to 1 request at once"), (4, "up to 4 requests at once")]
)
def test_one_request_is_no_plural(advice: Advice, most: int, words: str) -> None:
    assert f"it pays {words}, and not beyond" in printed(replace(advice, max_concurrency=most))


@pytest.mark.parametrize(
    "present, own, words",
    [
        ({"max_draft_len": 4}, "a <draft>", "with max_draft_len 4, predicted 1.84"),
        ({"max_draft_len": 4}, "a <draft>", "x: keep it"),
        ({"max_draft_len": 1}, "a <draft>", "x: this gains "),
        ({"max_draft_len": "auto"}, "a <draft>", "sets this by itself"),
        ({"kind": "none"}, None, "does not speculate: this gains 62.0%"),
        ({"kind": "ngram", "max_draft_len": 2}, None, "the YAML has ngram with max_draft_len 2"),
    ],
)
def test_the_choice_is_set_beside_the_yaml_s(
    advice: Advice, present: dict[str, Any], own: str | None, words: str
) -> None:
    lines = printed(advice, present=SpeculationConfig(**present), own_draft=own)
    assert any(words in line for line in lines), lines


def test_a_draft_that_loses_at_every_length_is_said_to(advice: Advice) -> None:
    lookup, draft = (
        advice.candidates[1],
        replace(advice.candidates[0], name="bad", speedup=0.9, low=0.8, high=0.97),
    )
    against = replace(
        advice,
        drafter="ngram",
        draft=None,
        candidates=(replace(lookup, speedup=1.2, low=1.1, high=1.3), draft),
    )
    lines = printed(against, present=SpeculationConfig(), own_draft="bad")
    assert any("bad loses at every length: this gains " in line for line in lines), lines


def test_advice_against_speculation_says_what_becomes_of_the_yaml_s(advice: Advice) -> None:
    against = replace(
        advice, speculate=False, drafter="none", max_draft_len=0, schedule=(), max_concurrency=None
    )
    assert any(
        line.endswith(": leave it out")
        for line in printed(against, present=SpeculationConfig(), own_draft="a <draft>")
    )
    assert "the YAML already says so" in printed(against, present=SpeculationConfig(kind="none"))


def test_a_prediction_is_set_beside_what_was_served(
    advice: Advice, advised: ValidationReport
) -> None:
    text = " ".join(" ".join(printed(advice)).split())
    assert "through Triton: `toolkit build` measures it on the endpoint" in text
    lines = printed(advice, present=SpeculationConfig(), own_draft="a <draft>", served=advised)
    greedy = next(line for line in lines if line.startswith("  greedy: "))
    assert advised.speedup is not None
    assert greedy.startswith(f"  greedy: {advised.speedup.estimate:.2f}x (") and greedy.endswith(
        "x predicted"
    )
    elsewhere = printed(replace(advice, costs_are="predicted"), served=advised)
    assert any("measure on that machine" in line for line in elsewhere) and not any(
        "greedy: " in line for line in elsewhere
    )


def test_costs_of_a_server_are_not_said_to_be_of_this_process(
    advice: Advice, advised: ValidationReport
) -> None:
    served = replace(advice, costs_are="measured on the server")
    text = " ".join(" ".join(printed(served)).split())
    assert "predicted from steps that a client timed on the server" in text
    assert "through Triton" not in text and "measure on that machine" not in text
    assert "costs measured on the server" in text
    lines = printed(served, present=SpeculationConfig(), own_draft="a <draft>", served=advised)
    assert any(line.startswith("  greedy: ") for line in lines)


def test_acceptance_on_other_texts_is_called_an_approximation(
    advice: Advice, advised: ValidationReport
) -> None:
    assert not any("teacher forcing" in line for line in printed(advice))
    for share, claim in (
        (0.43, "43.0% of whose tokens are the target's first choice: an approximation"),
        (1.0, "100.0% of whose tokens are the target's first choice: exact for greedy decoding"),
    ):
        foreign = replace(advice, texts_are="held-out text", first_choices=share)
        assert claim in " ".join(" ".join(printed(foreign)).split())
        tables = outlook_tables(replace(advised, advice=foreign))
        assert any(claim in (table.note or "") for table in tables)
    assert advised.grid is not None
    grid = replace(advised.grid, texts_are="completions")
    console = Console(file=io.StringIO(), width=300)
    print_grid(grid, console)
    assert isinstance(console.file, io.StringIO)
    claim = "on the completions of validation.prompts: an approximation"
    assert claim in console.file.getvalue()
    tables = outlook_tables(replace(advised, grid=grid))
    assert any(claim in (table.note or "") for table in tables)


def test_what_was_served_leads_where_the_prediction_is_not_decided(
    advice: Advice, advised: ValidationReport
) -> None:
    assert advised.speedup is not None
    pays = replace(
        advised, sampled=replace(advised.sampled, speedup=replace(advised.speedup, low=1.2))
    )
    pays = replace(pays, speedup=replace(advised.speedup, low=1.2))
    undecided = replace(advice, decided=False, reason="undecided: 1.10x (0.90 to 1.30)")
    lines = printed(undecided, present=SpeculationConfig(), own_draft="a <draft>", served=pays)
    assert any(line.startswith("the interval contains 1") for line in lines)
    assert any(line.startswith("the measurement on the endpoint decides") for line in lines)
    for other, served in ((undecided, advised), (advice, pays)):
        assert not any(
            "decides" in line for line in printed(other, present=SpeculationConfig(), served=served)
        )


def test_a_predicted_grid_says_so_wherever_its_speeds_stand(advised: ValidationReport) -> None:
    assert advised.grid is not None
    predicted = replace(
        advised.grid, costs_are="predicted for H200", left_out=("target W8A16: not established",)
    )
    for grid, count in ((advised.grid, 0), (predicted, 2)):
        report = replace(advised, grid=grid)
        console = Console(file=io.StringIO(), width=200)
        print_grid(grid, console)
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        assert text.count("speeds and speed-ups predicted for H200") == count
        assert ("left out: target W8A16: not established" in text) == bool(count)
        tables = {one.title: one.note for one in outlook_tables(report)}
        assert sum("predicted for H200" in title for title in tables) == count
        note = next(
            note
            for title, note in tables.items()
            if title.startswith("Precisions of target and draft")
        )
        assert (
            "intervals cover acceptance alone. Left out: target W8A16: not established." in note
        ) == bool(count)
        plot = grid_plot(report)
        assert (
            plot is not None and f"best draft length, {grid.costs_are}, one request" in plot.caption
        )
