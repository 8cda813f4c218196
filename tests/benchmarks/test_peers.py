"""What bench_peers makes of its measurements, and how it treats processes that do not answer. The
engines themselves run in the benchmark only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.benchmarks import bench_peers, peer_table
from tests.benchmarks.bench_peers import MissingError, Prepared, Process, measure, prepare_rows
from tests.benchmarks.peer_table import (
    Arm,
    Difference,
    Row,
    Turn,
    as_markdown,
    as_text,
    cells,
    compare_texts,
    told,
    write_block,
)

# Answers as peer_runner does: each prompt, doubled. Ends at a prompt that begins with 13.
ENGINE = """
import json, sys
print("loading", file=sys.stderr)
print(json.dumps({"versions": {"engine": "1.0"}}), flush=True)
for line in sys.stdin:
    prompts = json.loads(line)["prompts"]
    if prompts[0][0] == 13:
        raise ValueError("no thirteens")
    ids = [prompt * 2 for prompt in prompts]
    answer = {"ids": ids, "seconds": [0.5] * len(ids), "cpu_s": 0.0, "idle_cpu_s": 0.0}
    print(json.dumps({**answer, "accepted": 3, "steps": 2}), flush=True)
"""


@contextmanager
def process(folder: Path, source: str = ENGINE) -> Iterator[Process]:
    file = folder / "engine.py"
    file.write_text(source)
    started = Process([sys.executable, file], {}, folder / "engine.log", 1)
    try:
        yield started
    finally:
        started.stop()


def turn(ids: list[list[int]], seconds: float, **counts: int) -> Turn:
    return Turn(ids, [seconds] * len(ids), **counts)


def row(**arms: Arm) -> Row:
    return Row("ours", "FP32", **arms)


def measured() -> Row:
    """20 tokens in 2 s plainly; the same in 0.8 s with 12 accepted tokens in 4 steps."""
    texts = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    return row(
        plain=Arm([turn(texts, 0.5), turn(texts, 0.5)]),
        speculative=Arm([turn(texts, 0.2, accepted=6, steps=2)] * 2),
    )


def test_tokens_per_second_and_speed_up_are_ratios_of_sums() -> None:
    assert measured().plain.rate[0] == pytest.approx(10.0)
    assert measured().speculative.rate[0] == pytest.approx(25.0)
    assert measured().speedup == pytest.approx((2.5, 2.5, 2.5))


def test_a_slow_round_widens_the_interval() -> None:
    texts = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    rate, low, high = Arm([turn(texts, 0.5), turn(texts, 1.0)]).rate
    assert (rate, low, high) == pytest.approx((20 / 3, 5.0, 10.0))


def test_acceptance_length_counts_the_engines_own_token() -> None:
    assert measured().speculative.acceptance_length == pytest.approx(4.0)
    assert measured().plain.acceptance_length is None


def test_an_end_token_is_no_difference() -> None:
    with_end, without = Arm([turn([[5, 6, 1]], 1.0)]), Arm([turn([[5, 6]], 1.0)])
    assert compare_texts(with_end, without, eos=(1,)).equal == 1
    assert compare_texts(with_end, without, eos=(2,)).differences == (Difference(0, 2, (1, None)),)


def test_one_differing_round_is_a_difference_at_its_first_token() -> None:
    reference = Arm([turn([[1, 2, 3], [4, 5, 6]], 1.0)])
    arm = Arm([turn([[1, 2, 3], [4, 5, 6]], 1.0), turn([[1, 2, 3], [4, 9, 9]], 1.0)])
    comparison = compare_texts(arm, reference, eos=())
    assert (comparison.equal, comparison.prompts) == (1, 2)
    assert comparison.differences == (Difference(1, 1, (9, 5)),)


@pytest.mark.parametrize(("gap", "kind"), [(0.01, "a near-tie"), (0.3, "not a near-tie")])
def test_differences_are_named(gap: float, kind: str) -> None:
    arm, reference = Arm([turn([[1, 2]], 1.0)]), Arm([turn([[1, 3]], 1.0)])
    comparison = compare_texts(arm, reference, eos=())
    (line,) = told(row(), comparison, lambda difference: gap, near_tie_margin=0.05)
    assert line == (
        f"ours, FP32: prompt 1 differs from plain decoding at token 2, {kind}"
        f" ({gap:.4f} logits of the float32 model)"
    )


def test_a_row_that_was_not_run_says_why_in_both_tables() -> None:
    missing = Row("vLLM", "INT8", plain=Arm(missing="no .venv-vllm | `make vllm` makes it"))
    comparison = compare_texts(measured().speculative, measured().plain, eos=())
    lines = [
        peer_table.HEADINGS,
        cells(measured(), comparison, comparison),
        cells(missing, None, None),
    ]
    text, markdown = as_text(lines), as_markdown(lines)
    assert "not run: no .venv-vllm | `make vllm` makes it" in text
    assert "not run: no .venv-vllm \\| `make vllm` makes it" in markdown
    assert "10 (10 to 10)" in text
    assert "| 2.50x (2.50 to 2.50) | 4.00 | 2 of 2 | 2 of 2 |" in markdown
    counts = {line.replace("\\|", "").count("|") for line in markdown.splitlines()}
    assert counts == {len(peer_table.HEADINGS) + 1}


def test_a_plain_arm_is_shown_where_only_speculation_is_missing() -> None:
    partly = row(plain=measured().plain, speculative=Arm(missing="it ended: no such method"))
    shown = cells(partly, None, None)
    assert shown[2:5] == ("10 (10 to 10)", "not run: it ended: no such method", "")
    assert len(shown) == len(peer_table.HEADINGS)


def test_work_of_others_is_counted_in_cores() -> None:
    busy = Turn([[1]], [1.0], wall_s=2.0, others_cpu_s=1.0)
    quiet = Turn([[1]], [1.0], wall_s=2.0, others_cpu_s=0.0)
    rows = [row(plain=Arm([busy]), speculative=Arm([quiet]))]
    assert peer_table.others_cores(rows) == pytest.approx(0.25)


def test_only_the_marked_block_of_the_page_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "peers.md"
    page.write_text(f"before\n\n{peer_table.BEGIN}\nold\n{peer_table.END}\n\nafter\n")
    write_block(page, "new")
    write_block(page, "newer")
    assert page.read_text() == (
        f"before\n\n{peer_table.BEGIN}\n\nnewer\n\n{peer_table.END}\n\nafter\n"
    )
    page.write_text("no marks\n")
    with pytest.raises(ValueError, match="once each"):
        write_block(page, "new")


def test_the_page_of_the_docs_has_the_marks() -> None:
    text = (bench_peers.ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
    assert text.index(peer_table.BEGIN) < text.index(peer_table.END)


def test_arms_take_turns_forwards_and_backwards(tmp_path: Path) -> None:
    order: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, prompts: list[list[int]]) -> Turn:
            order.append(f"{self.name}{len(prompts)}")
            return turn([[1]] * len(prompts), 1.0)

    arms = [(Arm(), Named("a")), (Arm(), Named("b"))]
    measure(arms, [[1], [2], [3]], [[4]], rounds=2)  # type: ignore[arg-type]
    assert order == ["a1", "b1", "a3", "b3", "b3", "a3"]
    assert [len(arm.turns) for arm, _ in arms] == [2, 2]


def test_an_engine_that_dies_loses_its_turns_and_leaves_the_others(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    with process(tmp_path) as dying, process(tmp_path / "second") as living:
        arms = [(Arm(), dying), (Arm(), living)]
        for waiting in (dying, living):
            assert waiting.wait_until_ready() == {"engine": "1.0"}
        measure(arms[:1], [[2, 3]], [[4]], rounds=1)
        assert arms[0][0].turns[0].ids == [[2, 3, 2, 3]]
        assert arms[0][0].turns[0].accepted == 3
        measure(arms[:1], [[13]], [[4]], rounds=1)
        measure(arms, [[5]], [[4]], rounds=1)
    assert arms[0][0].missing == "it ended: ValueError: no thirteens"
    assert arms[0][0].turns == []
    assert [turn.ids for turn in arms[1][0].turns] == [[[5, 5]]]


def test_an_engine_that_does_not_answer_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_peers, "START_TIMEOUT_S", 0.2)
    with (
        process(tmp_path, "import time; time.sleep(60)") as sleeping,
        pytest.raises(MissingError, match="no answer within"),
    ):
        sleeping.wait_until_ready()
    assert sleeping.process.returncode is not None


def test_an_engine_that_is_not_there_is_a_row_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(precision: str) -> Prepared:
        raise MissingError("no .venv-vllm; `make vllm` makes it")

    monkeypatch.setitem(bench_peers.PREPARE, "vllm", absent)
    rows, ready = prepare_rows([("vllm", "FP32")])
    assert ready == []
    assert [row.missing for row in rows] == ["no .venv-vllm; `make vllm` makes it"]
