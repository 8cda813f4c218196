from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from toolkit.bench.gate import make_gate
from toolkit.errors import StageError
from toolkit.records.build import LayerCounts, StageCost, TensorRtLlmBuild
from toolkit.records.measured import Finding, Scope
from toolkit.records.report import REPORT_SCHEMA_VERSION, ValidationReport
from toolkit.report.cells import Table, number
from toolkit.report.expected import deployed_draft_len, draft_length_plot
from toolkit.report.figures import (
    gate_definitions,
    gate_title,
    gates_table,
    headline,
    next_steps,
    shown,
    tables,
)
from toolkit.report.html import render_html
from toolkit.report.markdown import render_markdown
from toolkit.report.plots import plots
from toolkit.report.render import print_report, read_report, render_json, write_report
from toolkit.validate.gates import not_judged


def printed(
    report: ValidationReport, *, width: int = 100, terminal: bool = False, full: bool = False
) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=terminal,
        color_system="standard" if terminal else None,
    )
    print_report(report, console, full=full)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("which", ["passing", "failing", "plain_only", "advised"])
def test_files_are_written_and_the_json_reads_back_equal(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    report: ValidationReport = request.getfixturevalue(which)
    paths = write_report(report, tmp_path / "out")
    assert [path.name for path in paths] == ["report.json", "report.md", "report.html"]
    assert read_report(paths[0]) == report


def test_json_has_the_promised_keys(failing: ValidationReport) -> None:
    data = json.loads(render_json(failing))
    assert data["schema_version"] == REPORT_SCHEMA_VERSION
    assert data["verdict"] == "FAIL"
    assert all(
        {"name", "outcome", "measured", "limit", "detail"} <= set(gate) for gate in data["gates"]
    )
    for arm in ("plain", "speculative"):
        assert data["arms"][arm]["tokens_per_s"] > 0
        assert {"p50", "p90", "p99"} <= set(data["arms"][arm]["latencies"]["ttft"])
    assert {"estimate", "low", "high"} <= set(data["speedup"])
    assert {"rate", "length", "by_position"} <= set(data["acceptance"])
    assert {"prompts", "identical", "divergences"} <= set(data["parity"])
    assert data["parity"]["divergences"][0]["position"] == 5
    assert data["quality"]["target"]["tokens"] == 5000
    assert data["definitions"]["speedup"]["formula"]
    assert {"environment", "engines", "stages", "sampled"} <= set(data)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be read"),
        ("{}", "is no report"),
        ("[1]", "not a JSON object"),
        ("null", "not a JSON object"),
        (f'{{"schema_version": {REPORT_SCHEMA_VERSION}}}', "is damaged"),
        (
            f'{{"schema_version": {REPORT_SCHEMA_VERSION - 1}}}',
            f"has schema_version {REPORT_SCHEMA_VERSION - 1}, .* validate",
        ),
        (
            f'{{"schema_version": {REPORT_SCHEMA_VERSION + 1}}}',
            f"has schema_version {REPORT_SCHEMA_VERSION + 1}, .* newer",
        ),
    ],
)
def test_a_file_that_is_no_report_of_this_version_is_refused(
    text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(StageError, match=f"(?s){said}"):
        read_report(path)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("name", 5, "name: 5 is not text"),
        ("verdict", "PASSED", "verdict: 'PASSED' is not 'PASS', 'FAIL' or 'INCONCLUSIVE'"),
        ("environment/cpu", 0, "environment.cpu: 0 is not text"),
        ("environment", [], r"environment: \[\] is not an object"),
        ("gates/0/name", None, r"gates\[0\].name: None is not text"),
        ("gates", "x", "gates: 'x' is not a list"),
        ("parity/prompts", 1.5, "parity.prompts: 1.5 is not a whole number"),
        ("parity/prompts", True, "parity.prompts: true is not a whole number"),
        ("speedup/estimate", "1.5", "speedup.estimate: '1.5' is not a finite number"),
        ("speedup/estimate", float("nan"), "speedup.estimate: nan is not a finite number"),
    ],
)
def test_a_value_of_another_kind_is_named(
    passing: ValidationReport, tmp_path: Path, path: str, value: object, said: str
) -> None:
    data = json.loads(render_json(passing))
    *above, last = path.split("/")
    place = data
    for key in above:
        place = place[int(key) if isinstance(place, list) else key]
    place[int(last) if isinstance(place, list) else last] = value
    (tmp_path / "report.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(StageError, match=said):
        read_report(tmp_path / "report.json")


def test_a_report_with_a_damaged_value_is_refused(
    passing: ValidationReport, tmp_path: Path
) -> None:
    data = json.loads(render_json(passing))
    path = tmp_path / "report.json"
    for key, value in (("gates", [1]), ("arms", []), ("findings", 3), ("quality", "none")):
        path.write_text(json.dumps({**data, key: value}))
        with pytest.raises(StageError, match="is damaged"):
            read_report(path)


def test_terminal_ends_with_gates_and_verdict(
    passing: ValidationReport, failing: ValidationReport
) -> None:
    assert printed(passing).rstrip().endswith("tiny: PASS")
    text = printed(failing)
    assert text.rstrip().endswith("tiny: FAIL")
    assert "counters" in text.lower()
    assert text.index("Speed") < text.index("Gates") < text.index("Speculation changes the output")


def test_terminal_lines_up_and_fits(failing: ValidationReport) -> None:
    for width in (80, 120):
        assert max(map(len, printed(failing, width=width, full=True).splitlines())) <= width


def test_colour_only_on_a_terminal(failing: ValidationReport) -> None:
    assert "\x1b[" not in printed(failing)
    assert "\x1b[" in printed(failing, terminal=True)


def test_markup_in_a_prompt_is_printed_as_it_is(failing: ValidationReport) -> None:
    assert "<script>" in printed(failing, width=400)


def test_what_failed_comes_before_what_was_not_decided(failing: ValidationReport) -> None:
    gate = failing.gates[0]
    undecided = replace(gate, outcome="INCONCLUSIVE", next_step="Measure more.")
    failed = replace(gate, outcome="FAIL", next_step="Mend it.")
    steps = next_steps(replace(failing, gates=(undecided, failed), findings=()))
    assert [step.split(": ")[-1] for step in steps] == ["Mend it.", "Measure more."]


def test_every_gate_that_did_not_pass_says_what_to_do(
    failing: ValidationReport, passing: ValidationReport
) -> None:
    assert all(gate.next_step for gate in failing.gates if gate.outcome != "PASS")
    steps = next_steps(failing)
    assert all(
        any(str(gate.next_step) in step for step in steps)
        for gate in failing.gates
        if gate.outcome != "PASS"
    )
    assert len(steps) == len(set(steps))
    assert any(step.startswith("Counters: ") for step in steps)
    assert next_steps(passing)[0].startswith("Nothing needs fixing")


def test_every_table_is_rectangular(
    failing: ValidationReport, plain_only: ValidationReport
) -> None:
    for report in (failing, plain_only):
        for table in [gates_table(report), *tables(report)]:
            assert all(len(row) == len(table.columns) for row in table.rows), table.title
            assert set(table.definitions) <= set(report.definitions)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0.00"),
        (0.0132, "0.0132"),
        (0.97, "0.970"),
        (9.876, "9.88"),
        (123.4, "123"),
        (12345.6, "12,346"),
        (2e-6, "2.0e-06"),
    ],
)
def test_numbers_keep_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_markdown_fits_a_comment_and_its_tables_hold(failing: ValidationReport) -> None:
    text = render_markdown(failing)
    assert len(text) < 65_000  # GitHub's limit of a comment is 65,536 characters
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows
    block: list[int] = []
    for line in text.splitlines():
        if line.startswith("|"):
            block.append(line.replace("\\|", "").count("|"))
        else:
            assert len(set(block)) <= 1
            block = []
    assert text.count("<details>") == text.count("</details>")


def test_markdown_of_any_length_fits_and_names_what_it_leaves_out(
    advised: ValidationReport,
) -> None:
    engine = replace(advised.engines["target"], notes=("a long note " * 6000,))
    stages = (StageCost("short", 1.0, None, reused=False),)
    text = render_markdown(replace(advised, engines={"target": engine}, stages=stages))
    assert len(text) <= 65_536
    assert text.rstrip().endswith("Left out for length, but in report.html: Engines.")
    assert "<summary>Stages</summary>" in text and "<summary>Environment</summary>" in text
    assert text.count("<details>") == text.count("</details>")
    endless = replace(
        advised, findings=tuple(Finding("x", "warning", f"{i} " + "long " * 300) for i in range(60))
    )
    assert len(render_markdown(endless)) <= 65_536


def test_gates_on_ratios_are_named_and_shown_as_ratios(failing: ValidationReport) -> None:
    scope = Scope(temperature=0.8, percentile=90, over="plain")
    gate = make_gate("ttft", scope, "FAIL", 1.25, 1.1, "worse")
    assert gate.name == "ttft_p90_ratio_sampled"
    assert gate_title(gate) == "TTFT p90 against plain, T = 0.8"
    failed = make_gate("errors", Scope(concurrency=4), "PASS", 0.0, 0.0, "")
    assert (failed.name, gate_title(failed), shown(failed)) == (
        "errors@4",
        "Failed requests, 4 requests at once",
        ("0.0%", "none"),
    )
    assert gate_definitions(failed) == ("errors",)
    assert shown(gate) == ("1.25x", "≤ 1.10x")
    slow = make_gate("ttft", Scope(percentile=99), "FAIL", 6086.0, 1000.0, "")
    assert shown(slow) == ("6,086 ms", "≤ 1,000 ms")
    assert set(gate_definitions(gate)) <= set(failing.definitions)


def test_every_plot_table_and_gate_has_a_definition(advised: ValidationReport) -> None:
    """But for tables of facts, in which nothing is computed."""
    facts = {"Engines", "Environment", "Divergences"}
    for one in [*plots(advised), *tables(advised)]:
        assert one.title in facts or one.definitions, one.title
        assert set(one.definitions) <= set(advised.definitions), one.title
    for gate in advised.gates:
        assert set(gate_definitions(gate)) <= set(advised.definitions), gate.name


def test_advice_load_and_memory_are_in_the_tables(advised: ValidationReport) -> None:
    found = {table.title: table for table in tables(advised)}
    ways = found["Advice: ways to draft, best first"]
    assert ways.rows[0][:3] == ("a <draft>", "4", "1.62 (1.50 to 1.70)")
    assert "4 from batch 1 on, 2 from batch 4 on, 0 from batch 8 on" in ways.note
    lengths = {row[0]: row for row in found["Speed-up over draft length, a <draft>"].rows}
    assert lengths["greedy, 4"][2:4] == (
        "1.70 (1.60 to 1.78)",
        f"{1.7 / advised_prediction(advised):.2f}",
    )
    assert lengths["greedy, 5"][2:4] == ("-", "-")
    assert deployed_draft_len(advised) == 4 and advised.sampled.speedup is not None
    served = advised.sampled.speedup
    assert (
        lengths["sampled, 4"][2]
        == f"{served.estimate:.2f} ({served.low:.2f} to {served.high:.2f}), served"
    )
    assert " ms a token as served and " in found["Speed-up over draft length, a <draft>"].note
    cells = found["Precisions of target and draft"].rows
    assert [row[:2] for row in cells if row[2].endswith(", best")] == [("W8A8_SQ_PER_CHANNEL",) * 2]
    assert [row[2] for row in found["What quantizing the target costs"].rows] == [
        "yes",
        "yes",
        "NO",
    ]
    load = found["Load: several requests at once"]
    assert [row[0] for row in load.rows] == ["1", "2", "4", "8"]
    assert load.rows[3][3] == "0.82 (0.78 to 0.86)"
    memory = {row[0]: row for row in found["Memory"].rows}
    assert memory["serve, the machine"][1:4] == ("631 MB", "944 MB", "25.8 GB")
    assert memory["quantize, the machine"][2] == "629 MB"
    assert (
        memory["compile, each GPU"][2] == "-"
    )  # what a stage takes on the host says nothing about a GPU


def test_divergences_are_counted_by_how_decided_the_reference_was(
    passing: ValidationReport, failing: ValidationReport
) -> None:
    title = "Divergences of all arms by how decided the reference was"
    (table,) = [one for one in tables(failing) if one.title == title]
    for column, parity in enumerate((failing.parity, failing.sampled.parity), start=1):
        assert parity is not None
        counts = {row[0]: int(row[column]) for row in table.rows}
        small = sum(one.margin is not None and one.margin < 0.01 for one in parity.divergences)
        assert counts["below 0.01"] == small
        assert sum(counts.values()) == len(parity.divergences) > small
    assert title not in [one.title for one in tables(passing)]


def test_too_few_samples_are_told_once_per_percentile(failing: ValidationReport) -> None:
    (latency,) = [one for one in tables(failing) if one.title == "Latency, ms"]
    assert latency.note.count("p90 needs 100") == latency.note.count("p99 needs 1000") == 1


def advised_prediction(report: ValidationReport) -> float:
    assert report.advice is not None
    predictions = report.advice.candidates[0].predictions
    return next(one.speedup for one in predictions if (one.mode, one.draft_len) == ("greedy", 4))


def test_the_deployment_s_own_way_to_draft_is_drawn_and_not_the_best(
    advised: ValidationReport,
) -> None:
    """What was served stands in the plot as dots: the lines have to be of the same drafter."""
    assert advised.advice is not None
    best, other = advised.advice.candidates
    own = replace(advised, advice=replace(advised.advice, candidates=(other, best)))
    plot = draft_length_plot(own)
    assert plot is not None
    assert plot.caption.startswith(best.name)
    assert any(best.name in table.title for table in tables(own))


def test_markdown_neutralises_what_a_prompt_holds(failing: ValidationReport) -> None:
    text = render_markdown(failing)
    assert "<script" not in text.replace("\\<script", "")
    assert "@you" not in text


def test_engines_that_no_gpu_has_seen_are_reported_so(passing: ValidationReport) -> None:
    counts = LayerCounts(
        layers=9, fused=4, plugins={"GPTAttention": 2}, precisions={"FP8": 5, "BF16": 4}
    )
    build = TensorRtLlmBuild(
        version="1.2.1",
        builder="container: image",
        command=("trtllm-build",),
        tp_size=2,
        pp_size=1,
        max_num_tokens=8192,
        checks=(),
        executed=("rank 0 was deserialized by TensorRT",),
        not_executed=("no token was generated with it",),
        layers=counts,
    )
    engine = replace(passing.engines["target"], kind="trt_engine", tensorrt_llm=build)
    (table,) = (
        table
        for table in tables(replace(passing, engines={"target": engine}))
        if table.title == "Engines"
    )
    rows = dict(table.rows)  # type: ignore[arg-type]
    assert rows["ranks"] == "TP 2, PP 1"
    assert rows["layers"] == "9, 4 of them fused; 5 FP8, 4 BF16; plugins: 2 GPTAttention"
    assert "target: executed on a GPU: rank 0 was deserialized by TensorRT." in table.note
    assert "target: not executed on a GPU: no token was generated with it." in table.note


def test_a_rehearsal_says_what_was_replaced_and_never_that_it_is_fast(
    passing: ValidationReport,
) -> None:
    gates = tuple(not_judged(passing.gates))
    report = replace(
        passing,
        gates=gates,
        replaced=("target big/Model: random weights, layers 80 -> 2", "engine x: the embedded one"),
    )
    for text in (printed(report), render_markdown(report), render_html(report)):
        assert "big/Model" in text and "NOT JUDGED" in text and "rehears" in text
        assert "x faster" not in text and "x slower" not in text
    assert printed(report).index("big/Model") < printed(report).index("output tokens/s")
    assert not any(
        gate.outcome == "PASS"
        for gate in gates
        if gate.metric in ("speedup", "kl_mean", "top1_agreement")
    )
    assert next_steps(replace(report, findings=()))[0].startswith(
        "Nothing needs fixing. Build it where"
    )


def test_a_verdict_says_what_it_would_hide(
    passing: ValidationReport, plain_only: ValidationReport, advised: ValidationReport
) -> None:
    assert printed(passing).rstrip().endswith(": PASS")
    assert advised.advice is not None
    refused = replace(plain_only, advice=replace(advised.advice, speculate=False))
    for text in (printed(refused), render_markdown(refused), render_html(refused)):
        assert "without speculation: the advisor left it out" in text
    assert printed(plain_only).rstrip().endswith("INCONCLUSIVE (without speculation)")
    rehearsed = replace(
        passing, gates=tuple(not_judged(passing.gates)), replaced=("target a/b: random weights",)
    )
    unjudged = sum(gate.outcome == "NOT JUDGED" for gate in rehearsed.gates)
    assert (
        f"PASS (rehearsed with stand-ins, {unjudged} of {len(rehearsed.gates)} gates not judged)"
        in printed(rehearsed)
    )


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (1.16, 1.52, "Speculation makes this deployment 1.31x faster"),
        (0.93, 1.81, "does not tell whether speculation makes this deployment faster"),
    ],
)
def test_nothing_is_said_to_be_faster_that_may_be_slower(
    passing: ValidationReport, low: float, high: float, said: str
) -> None:
    assert passing.speedup is not None
    speedup = replace(passing.speedup, estimate=1.31, low=low, high=high)
    assert said in headline(replace(passing, speedup=speedup))


def test_what_did_not_pass_stands_first(failing: ValidationReport) -> None:
    outcomes = [row[1] for row in gates_table(failing).rows]
    order = ["FAIL", "INCONCLUSIVE", "PASS", "NOT JUDGED"]
    assert outcomes == sorted(outcomes, key=order.index) and outcomes[0] == "FAIL"
    page = render_html(failing)
    assert page.index('class="outcome FAIL"') < page.index('class="outcome PASS"')


def test_terms_are_explained_where_they_stand(failing: ValidationReport) -> None:
    by_title = {table.title: table for table in tables(failing)}
    for title, terms in {
        "Latency, ms": ("TTFT", "TPOT", "ITL", "ICL"),
        "Acceptance": ("Joint", "Conditional"),
        "Speculative text against plain text": ("Suspicious", "Broken"),
    }.items():
        assert all(f"{term}:" in by_title[title].note for term in terms), title


def test_words_stand_to_the_left_and_numbers_to_the_right() -> None:
    table = Table(
        "t", ("name", "size", "made of"), (("a", "4e-15", "so many tokens"),), words=("made of",)
    )
    assert [table.right(index) for index in range(3)] == [False, True, False]
    assert [replace(table, text=True).right(index) for index in range(3)] == [False] * 3


def test_notes_are_remarks_and_no_steps(passing: ValidationReport) -> None:
    found = (
        Finding("drift", "note", "it <drifts>"),
        Finding("not measured", "note", "a"),
        Finding("not measured", "note", "b"),
    )
    report = replace(passing, findings=found)
    assert next_steps(report)[0].startswith("Nothing needs fixing")
    assert "- Drift: it <drifts>\n- Not measured: a\n- Not measured: b\n" in printed(report)
    assert "**Remarks**\n\n- Drift: it \\<drifts\\>\n" in render_markdown(report)
    assert "<h2>Remarks</h2>" in render_html(report) and "it &lt;drifts&gt;" in render_html(report)


def test_more_memory_than_planned_is_a_remark(advised: ValidationReport) -> None:
    assert "Memory: serve took 944 MB where 631 MB was planned" in printed(advised, width=200)
    (serve,) = (stage for stage in advised.memory if stage.stage == "serve")
    cost = StageCost("serve", 61.0, int(1.05 * serve.total_bytes), reused=False)
    assert "was planned" not in printed(replace(advised, stages=(cost,)), width=200)


def test_serving_without_speculation_says_who_chose_it(
    plain_only: ValidationReport, advised: ValidationReport
) -> None:
    assert "The advisor chose" not in printed(plain_only)
    assert advised.advice is not None
    refused = replace(
        advised.advice, speculate=False, reason="do not speculate: it would give 0.92x"
    )
    assert "The advisor chose that: do not speculate: it would give 0.92x." in printed(
        replace(plain_only, advice=refused), width=200
    )
