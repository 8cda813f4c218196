"""Benches of an endpoint that counts and refuses as vLLM does, and of vLLM itself."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.fake_vllm import NO_TEMPLATE, FakeVllm
from toolkit.bench.compare import read_run
from toolkit.bench.run import BenchOptions, bench
from toolkit.errors import StageError
from toolkit.records.bench import BenchRun
from toolkit.records.codec import to_json
from toolkit.report.bench import print_run

COUNT = 6
COUNTING = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TOTAL = {"stream_options": {"include_usage": True}}
IDS = {**TOTAL, "return_token_ids": True}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(COUNT)))
    return path


Run = Callable[..., BenchRun]


@pytest.fixture
def run(prompts: Path) -> Run:
    def measured(server: FakeVllm | str, **options: Any) -> BenchRun:
        url = server if isinstance(server, str) else server.url
        return bench(url, BenchOptions(prompts, **{"warm_up": 2, "timeout_s": 5.0, **options}))

    return measured


def said(run: BenchRun, check: str) -> list[tuple[str, str]]:
    return [
        (finding.severity, finding.detail) for finding in run.findings if finding.check == check
    ]


def printed(run: BenchRun) -> str:
    console = Console(file=io.StringIO(), width=160)
    print_run(run, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_acceptance_is_read_from_the_counters_without_the_warm_up(run: Run) -> None:
    """Every request drafts 3 tokens in each of 4 steps, and 3, 1, 0 and 2 of them are accepted."""
    with FakeVllm() as server:
        result = run(server, rounds=2)
    (arm,) = result.points[0].arms
    acceptance = arm.acceptance
    assert (acceptance.verify_steps, acceptance.drafted, acceptance.accepted) == (
        2 * COUNT * 4,
        2 * COUNT * 12,
        2 * COUNT * 6,
    )
    assert (acceptance.rate, acceptance.length) == (0.5, 2.5)
    assert [place.joint for place in acceptance.by_position] == [0.75, 0.5, 0.25]
    assert [place.conditional for place in acceptance.by_position] == pytest.approx(
        [0.75, 2 / 3, 0.5]
    )
    assert arm.acceptance_source == "counters"
    assert arm.acceptance_length_by_round == (2.5, 2.5)
    assert {check.name: check.server for check in result.counters} == {
        "vllm:request_success_total": 2 * COUNT,
        "vllm:generation_tokens_total": 2 * COUNT * 11,
    }
    assert all(check.matches for check in result.counters)
    ((severity, detail),) = said(result, "acceptance")
    assert severity == "note" and "from the server's counters" in detail
    text = printed(result)
    assert "0.75 / 0.50 / 0.25" in text and "0.75 / 0.67 / 0.50" in text


def test_tokens_of_chunks_and_acceptance_of_requests_are_those_that_the_server_tells(
    run: Run,
) -> None:
    with FakeVllm(tells="detailed") as server:
        result = run(server)
        assert all(body["stream_options"] == COUNTING["stream_options"] for _, body in server.asked)
    (arm,) = result.points[0].arms
    assert [tokens for _, tokens in result.requests[0].chunks] == [1, 4, 2, 1, 3]
    assert (arm.acceptance_source, arm.acceptance.length) == ("requests", 2.5)
    assert [place.joint for place in arm.acceptance.by_position] == [0.75, 0.5, 0.25]
    assert arm.acceptance.alpha is not None
    assert arm.acceptance_rate_by_round == (0.5,)
    assert said(result, "acceptance") == []
    assert len(result.counters) == 8 and all(check.matches for check in result.counters)
    assert said(result, "counters") == [
        ("ok", "8 counters of the server equal the client's own counts")
    ]


def test_positions_are_told_by_summaries_of_full_blocks_and_not_of_others(run: Run) -> None:
    with FakeVllm(tells="summary") as server:
        full = run(server).points[0].arms[0].acceptance
    with FakeVllm(tells="summary", steps=((3, 3), (1, 1))) as server:
        cut = run(server).points[0].arms[0].acceptance
    assert [place.joint for place in full.by_position] == [0.75, 0.5, 0.25]
    assert (cut.rate, cut.length, cut.by_position) == (1.0, 3.0, ())


def test_blocks_of_unequal_lengths_are_told(run: Run) -> None:
    with FakeVllm(steps=((3, 3), (1, 1))) as server:
        result = run(server)
    acceptance = result.points[0].arms[0].acceptance
    assert acceptance.rate == 1.0
    assert [place.joint for place in acceptance.by_position] == [1.0, 0.5, 0.5]
    assert "of all verify steps" in " ".join(detail for _, detail in said(result, "acceptance"))


def test_requests_of_other_clients_in_the_window_are_told(run: Run) -> None:
    with FakeVllm(foreign=2) as server:
        result = run(server)
    ((severity, detail),) = said(result, "counters")
    assert severity == "warning"
    assert detail.endswith(f"{2 * COUNT} requests of other clients were served in the same time")
    assert said(result, "acceptance")[1] == (
        "warning",
        f"served arm: the acceptance includes {2 * COUNT} requests of other clients, which the"
        " server's counters do not tell apart",
    )


def test_requests_that_tell_otherwise_than_the_counters_are_a_finding(run: Run) -> None:
    class Forgetful(FakeVllm):
        def count(self) -> None:
            super().count()
            self.totals["accepted"] -= 1
            self.totals["accepted 2"] -= 1

    with Forgetful(tells="detailed") as server:
        result = run(server)
    ((severity, detail),) = said(result, "counters")
    assert severity == "warning"
    assert f"accepted_tokens_total {5 * COUNT} against {6 * COUNT}" in detail
    assert f'position="2"}} 0 against {COUNT}' in detail


def test_two_servers_have_counters_of_their_own(run: Run) -> None:
    with FakeVllm(speculates=False) as plain, FakeVllm() as speculative:
        result = run(speculative, baseline=plain.url, rounds=1, max_rounds=1)
    first, last = result.points[0].arms
    assert (first.acceptance.length, first.acceptance_source) == (None, None)
    assert (last.acceptance.length, last.acceptance_source) == (2.5, "counters")
    assert {check.name: check.matches for check in result.counters} == {
        f"{arm} vllm:{name}_total": True
        for arm in ("baseline", "served")
        for name in ("request_success", "generation_tokens")
    }


def test_acceptance_is_gated_by_rounds(run: Run) -> None:
    with FakeVllm() as server:
        met = run(server, rounds=2, gates=("acceptance_length>=2.4", "acceptance_rate>=0.5"))
        missed = run(server, rounds=2, gates=("acceptance_rate>=0.51",))
        single = run(server, gates=("acceptance_rate>=0.4",))
    with FakeVllm(speculates=False) as server:
        nothing = run(server, gates=("acceptance_rate>=0.4",))
    assert [gate.outcome for gate in met.gates] == ["PASS", "PASS", "PASS"]
    assert (missed.gates[-1].outcome, missed.gates[-1].measured) == ("FAIL", 0.5)
    assert single.gates[-1].outcome == "INCONCLUSIVE"
    assert nothing.gates[-1].outcome == "FAIL"
    assert "tells nothing of draft tokens" in nothing.gates[-1].detail


def test_a_model_without_a_chat_template_is_measured_by_completions(run: Run) -> None:
    with FakeVllm(chat_template=False) as server:
        result = run(server)
        paths = [path for path, _ in server.asked]
    assert (result.endpoints[0].protocol, result.verdict) == ("openai-completions", "PASS")
    assert result.endpoints[0].address == f"{server.url}/v1/completions"
    assert paths.count("/v1/chat/completions") == 1
    ((severity, detail),) = said(result, "protocol")
    assert severity == "note" and detail.startswith("served arm: text completions were measured")
    assert NO_TEMPLATE in detail
    assert "text completions were measured" in printed(result)


@pytest.mark.parametrize("path", ["", "/v1/chat/completions"])
def test_a_chat_that_the_user_chose_is_not_replaced(run: Run, path: str) -> None:
    protocol = "auto" if path else "openai-chat"
    with (
        FakeVllm(chat_template=False) as server,
        pytest.raises(StageError, match="chat template") as caught,
    ):
        run(server.url + path, protocol=protocol)
    assert caught.value.hint == "Measure text completions: --protocol openai-completions."
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("refusal", "falls_back"),
    [
        ((404, "no chat_template is configured"), True),
        ((500, "the chat template could not be loaded"), False),
        ((400, "this model is not allowed to chat"), False),
    ],
)
def test_only_a_missing_template_leads_to_completions(
    run: Run, refusal: tuple[int, str], falls_back: bool
) -> None:
    with FakeVllm(chat_template=False, refusal=refusal) as server:
        if falls_back:
            assert run(server).endpoints[0].protocol == "openai-completions"
            return
        with pytest.raises(StageError, match=refusal[1]):
            run(server)
        assert all(path == "/v1/chat/completions" for path, _ in server.asked)


@pytest.mark.parametrize(
    ("server", "kept", "chunks"),
    [
        (FakeVllm(), COUNTING, [1, 4, 2, 1, 3]),
        (FakeVllm(refused=("continuous_usage_stats", "return_token_ids")), TOTAL, None),
        (FakeVllm(counts="ids"), IDS, [1, 4, 2, 1, 3]),
        (FakeVllm(counts="ids", refused=("return_token_ids",)), TOTAL, None),
        (FakeVllm(counts="last"), {}, None),
        (FakeVllm(counts="ids", refused=("stream_options", "return_token_ids")), {}, None),
    ],
)
def test_tokens_of_a_chunk_are_asked_for_as_the_server_allows(
    run: Run, server: FakeVllm, kept: dict[str, Any], chunks: list[int] | None
) -> None:
    """And where only the whole answer is counted, every chunk with text is timed, and no chunk's
    tokens are guessed.
    """
    with server:
        result = run(server)
        _, body = server.asked[-1]
    assert {key: body[key] for key in ("stream_options", "return_token_ids") if key in body} == kept
    assert [tokens for _, tokens in result.requests[0].chunks] == (chunks or [None] * 5)
    total = None if kept == {} and server.counts == "ids" else 11
    assert {request.output_tokens for request in result.requests} == {total}
    assert (result.points[0].arms[0].latencies["itl"].samples > 0) == (chunks is not None)


def test_figures_in_another_format_are_no_failure(run: Run) -> None:
    """vLLM calls them experimental; an answer is as good without them."""

    class Changed(FakeVllm):
        def metrics(self) -> dict[str, Any]:
            return {"metrics": {"speculative_decoding": {"steps": 3}}}

    with Changed() as server:
        (arm,) = run(server).points[0].arms
    assert (arm.failed, arm.acceptance_source) == (0, "counters")


def test_a_run_of_the_schema_before_is_still_read(run: Run, tmp_path: Path) -> None:
    with FakeVllm() as server:
        saved = to_json(run(server))
    saved["schema_version"] = 2
    for arm in saved["points"][0]["arms"]:
        for name in ("source", "rate_by_round", "length_by_round"):
            del arm[f"acceptance_{name}"]
    (tmp_path / "old.json").write_text(json.dumps(saved))
    assert read_run(tmp_path / "old.json").points[0].arms[0].acceptance_source is None
