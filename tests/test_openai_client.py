"""The client of vLLM's OpenAI server, against a server that answers from a script."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace

import pytest

from tests.support.vllm_stub import MODEL, PIECES, PROMPT_IDS, SPECULATION, Script, vllm_stub
from toolkit.client import Options, RequestRefused, ServerUnavailable, Statistics
from toolkit.openai_client import OpenAiClient

TEXT = "".join(text for text, _ in PIECES)
TOKENS = tuple(itertools.chain.from_iterable(tokens for _, tokens in PIECES))


def test_stream_gives_new_text_tokens_and_times_of_arrival() -> None:
    script = Script(delay_s=0.03)
    with vllm_stub(script) as url, OpenAiClient(url, MODEL) as client:
        began = time.monotonic_ns()
        chunks = list(client.stream("hi", max_tokens=5, temperature=0.0))
    assert [(chunk.text, chunk.token_ids) for chunk in chunks] == list(PIECES)
    assert [chunk.output_tokens for chunk in chunks] == [1, 4, 5]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]
    # The last chunk is held until its statistics come, and keeps the time at which it came.
    waits = [
        (later - earlier) / 1e9
        for earlier, later in itertools.pairwise([began, *(c.received_ns for c in chunks)])
    ]
    assert all(wait >= 0.025 for wait in waits)
    assert (time.monotonic_ns() - chunks[-1].received_ns) / 1e9 >= 0.025
    assert chunks[0].statistics is None
    assert chunks[-1].statistics == Statistics(input_tokens=2, output_tokens=5)


def test_measure_counts_the_servers_tokens_not_chunks() -> None:
    with vllm_stub(Script(speculation=SPECULATION)) as url, OpenAiClient(url, MODEL) as client:
        (timing,) = client.measure(["hi"], max_tokens=5)
    assert timing.text == TEXT
    assert timing.token_ids == TOKENS
    assert timing.finish_reason == "length"
    assert [tokens for _, tokens in timing.chunks] == [1, 3, 1]
    assert timing.output_tokens == 5
    assert timing.sent_ns <= timing.chunks[0][0] <= timing.chunks[-1][0]


@pytest.mark.parametrize("streamed", [True, False])
def test_speculation_of_a_request_comes_by_position(streamed: bool) -> None:
    with vllm_stub(Script(speculation=SPECULATION)) as url, OpenAiClient(url, MODEL) as client:
        if streamed:
            statistics = client.measure(["hi"])[0].statistics
        else:
            statistics = client.generate("hi").statistics
    assert (statistics.drafted, statistics.accepted, statistics.verify_steps) == (5, 2, 2)
    assert statistics.drafted_by_position == (2, 2, 1)
    assert statistics.accepted_by_position == (1, 1, 0)
    assert statistics.acceptance_length == 2.0


def test_speculation_without_steps_has_zeros_and_a_summary_no_drafted_positions() -> None:
    none = {
        "acceptance_histogram": [0, 0],
        "num_spec_steps": 0,
        "num_accepted_draft_tokens": 0,
        "num_draft_tokens": 0,
    }
    with vllm_stub(Script(speculation=none)) as url, OpenAiClient(url, MODEL) as client:
        statistics = client.generate("hi").statistics
    assert statistics.drafted_by_position == (0,)
    assert statistics.accepted_by_position == (0,)
    summary = {name: value for name, value in SPECULATION.items() if "per_step" not in name}
    with vllm_stub(Script(speculation=summary)) as url, OpenAiClient(url, MODEL) as client:
        statistics = client.generate("hi").statistics
    assert statistics.drafted_by_position is None
    assert statistics.accepted_by_position == (1, 1, 0)


def test_generate_returns_the_whole_answer() -> None:
    with vllm_stub(Script()) as url, OpenAiClient(f"http://{url}/", MODEL) as client:
        completion = client.generate("hi", max_tokens=5)
    assert (completion.text, completion.token_ids) == (TEXT, TOKENS)
    assert completion.finish_reason == "length"
    assert completion.statistics.output_tokens == 5


@pytest.mark.parametrize("streamed", [True, False])
def test_log_probs_are_of_the_chosen_and_the_next_best_token(streamed: bool) -> None:
    script = Script()
    with vllm_stub(script) as url, OpenAiClient(url, MODEL) as client:
        if streamed:
            statistics = client.measure(["hi"], log_probs=True)[0].statistics
        else:
            statistics = client.generate("hi", log_probs=True).statistics
    assert statistics.log_probs == (-0.25,) * 5
    assert statistics.next_best == tuple(token + 1 for token in TOKENS)
    assert statistics.next_best_log_probs == (-1.5,) * 5
    # With one, the next best is missing wherever the chosen token is the best.
    assert script.requests[0]["logprobs"] == 2
    assert script.requests[0]["return_tokens_as_token_ids"] is True


def test_request_carries_every_option_and_asks_for_counts() -> None:
    script = Script()
    options = Options(
        max_tokens=5,
        temperature=0.8,
        top_k=4,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        seed=3,
        stop=("\n", "x"),
    )
    with vllm_stub(script) as url, OpenAiClient(url, MODEL) as client:
        client.measure(["hi"], options)
    assert script.requests == [
        {
            "model": MODEL,
            "prompt": "hi",
            "return_token_ids": True,
            "max_tokens": 5,
            "temperature": 0.8,
            "top_k": 4,
            "top_p": 0.9,
            "frequency_penalty": 0.1,
            "presence_penalty": 0.2,
            "seed": 3,
            "stop": ["\n", "x"],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ]


@pytest.mark.parametrize(
    "options", [{"num_draft_tokens": 0}, {"acceptance": "coupled"}, {"timeout_ms": 5}]
)
def test_option_that_vllm_does_not_have_is_refused_before_it_is_sent(
    options: dict[str, int | str],
) -> None:
    script = Script()
    with (
        vllm_stub(script) as url,
        OpenAiClient(url, MODEL) as client,
        pytest.raises(RequestRefused, match=next(iter(options))),
    ):
        client.measure(["hi"], **options)
    assert script.requests == []


@pytest.mark.parametrize("streamed", [True, False])
def test_refusal_has_the_servers_words(streamed: bool) -> None:
    script = Script(status=400, message="max_tokens is too large")
    with (
        vllm_stub(script) as url,
        OpenAiClient(url, MODEL) as client,
        pytest.raises(RequestRefused, match=r"^max_tokens is too large$"),
    ):
        client.measure(["hi"]) if streamed else client.generate("hi")


def test_fault_of_the_server_is_no_refusal() -> None:
    script = Script(status=500, message="EngineCore encountered an issue")
    with (
        vllm_stub(script) as url,
        OpenAiClient(url, MODEL) as client,
        pytest.raises(ServerUnavailable, match="status 500: EngineCore encountered"),
    ):
        client.generate("hi")
    script = Script(error_event=1, message="EngineCore encountered an issue")
    with (
        vllm_stub(script) as url,
        OpenAiClient(url, MODEL) as client,
        pytest.raises(ServerUnavailable, match="EngineCore encountered"),
    ):
        client.measure(["hi"])


@pytest.mark.parametrize("cut", [0, 1, 3, 4])
def test_stream_that_breaks_off_is_not_an_answer(cut: int) -> None:
    """3: before the usage; 4: before [DONE]."""
    with (
        vllm_stub(Script(cut=cut)) as url,
        OpenAiClient(url, MODEL) as client,
        pytest.raises(ServerUnavailable),
    ):
        client.measure(["hi"])


def test_server_that_hangs_or_is_not_there_ends_the_call_in_time() -> None:
    with vllm_stub(Script(delay_s=0.3)) as url:
        for call in (OpenAiClient.measure, OpenAiClient.generate):
            began = time.monotonic()
            with (
                OpenAiClient(url, MODEL, timeout_s=0.1) as client,
                pytest.raises(ServerUnavailable, match=r"no answer within 0\.1 s"),
            ):
                call(client, ["hi"] if call is OpenAiClient.measure else "hi")
            assert time.monotonic() - began < 0.3
        # Each event comes in time, and the whole answer does not.
        with (
            OpenAiClient(url, MODEL, timeout_s=0.5) as client,
            pytest.raises(ServerUnavailable, match=r"no answer within 0\.5 s"),
        ):
            client.measure(["hi"])
    with OpenAiClient(url, MODEL) as client:
        assert not client.ready()
        with pytest.raises(ServerUnavailable, match="cannot be reached"):
            client.generate("hi")


def test_end_tokens_are_ignored_where_the_client_says_so() -> None:
    script = Script()
    with vllm_stub(script) as url:
        for ignored in (True, False):
            with OpenAiClient(url, MODEL, ignore_eos=ignored) as client:
                client.measure(["hi"], max_tokens=5)
    assert [body.get("ignore_eos") for body in script.requests] == [True, None]


def test_leaving_a_stream_cancels_the_request() -> None:
    script = Script(pieces=tuple((" a", (5,)) for _ in range(100)), delay_s=0.02)
    with vllm_stub(script) as url, OpenAiClient(url, MODEL) as client:
        stream = client.stream("hi")
        assert next(stream).text == " a"
        stream.close()  # type: ignore[attr-defined]
        assert script.broken_off.wait(5)


def test_prompt_that_the_server_encodes_otherwise_is_refused() -> None:
    with vllm_stub(Script()) as url:
        with OpenAiClient(url, MODEL, encode=lambda prompt: PROMPT_IDS) as client:
            assert client.generate("hi").text == TEXT
        with (
            OpenAiClient(url, MODEL, encode=lambda prompt: PROMPT_IDS[1:]) as client,
            pytest.raises(RequestRefused, match=r"2 tokens \[1, 7\].* 1 tokens \[7\]"),
        ):
            client.measure(["hi"])


def test_ready_wants_health_and_the_model() -> None:
    script = Script()
    with vllm_stub(script) as url:
        assert OpenAiClient(url, MODEL).ready()
        assert not OpenAiClient(url, "another").ready()
        script.healthy = False
        assert not OpenAiClient(url, MODEL).ready()
    assert replace(script, healthy=True).paths[:2] == ["/health", "/v1/models"]


def test_concurrent_requests_keep_the_order_of_their_prompts() -> None:
    with vllm_stub(Script(delay_s=0.01)) as url, OpenAiClient(url, MODEL) as client:
        timings = client.measure(["a", "b", "c", "d"], concurrency=4)
    assert [timing.prompt for timing in timings] == ["a", "b", "c", "d"]


def test_concurrent_requests_wait_until_all_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads may start slowly; a request that is over before the next is sent ran alone."""
    start = threading.Thread.start
    began: list[threading.Thread] = []
    sent_after: list[int] = []

    def slow_start(thread: threading.Thread) -> None:
        time.sleep(0.02)
        start(thread)
        began.append(thread)

    def timed(self: OpenAiClient, prompt: str, options: object) -> str:
        sent_after.append(len(began))
        return prompt

    monkeypatch.setattr(threading.Thread, "start", slow_start)
    monkeypatch.setattr(OpenAiClient, "_time", timed)
    client = OpenAiClient("127.0.0.1:1", MODEL)
    assert [*client.measure(["a", "b", "c"], concurrency=3)] == ["a", "b", "c"]
    assert min(sent_after) >= 2  # the last one counts itself only after it has started
    assert [*client.measure(["a", "b"], concurrency=8)] == ["a", "b"]


@pytest.mark.parametrize("url", ["", "127.0.0.1", "127.0.0.1:http", "127.0.0.1:70000"])
def test_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ServerUnavailable, match="not host:port"):
        OpenAiClient(url, MODEL)
