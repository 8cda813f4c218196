"""The packaged model in a real tritonserver, over gRPC and HTTP: right answers, clear refusals, and
slots that become free again.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import (
    MAX_BATCH_SIZE,
    MAX_DRAFT_LEN,
    MAX_INPUT_LEN,
    MAX_QUEUE_SIZE,
    MAX_SEQ_LEN,
    package_pair,
)
from toolkit.client import Client, Completion, Options, RequestRefused
from toolkit.triton.process.server import TritonServer
from toolkit.triton.tensors.contract import METRICS

PROMPTS = tuple(f"def f{number}(x): return {'x' * (number % 7)}" for number in range(40))
LONG = MAX_SEQ_LEN - 40
CANCELLED = 400  # Triton 24.10 gives every error that a decoupled model sends this HTTP status


@pytest.fixture(scope="module")
def client(tiny_server: TritonServer) -> Iterator[Client]:
    with Client(tiny_server.grpc_url, timeout_s=120) as client:
        yield client


@pytest.fixture(scope="module")
def endless(client: Client) -> str:
    """A prompt whose greedy completion runs to the end of the sequence."""
    for prompt in PROMPTS:
        if client.generate(prompt, max_tokens=LONG).finish_reason == "length":
            return prompt
    raise AssertionError("every prompt of the random model ends early")


def page(server: TritonServer) -> str:
    text: str = urllib.request.urlopen(server.metrics_url, timeout=10).read().decode()
    return text


def metrics(server: TritonServer) -> dict[str, float]:
    """'name' or 'name:label' -> value, of our own metrics."""
    text = page(server)
    lines = re.findall(
        r'^(toolkit_\w+)\{model="tensorrt_llm"(?:,(?:outcome|reason)="([\w ]+)")?\} (\S+)$',
        text,
        re.MULTILINE,
    )
    return {f"{name}:{label}" if label else name: float(value) for name, label, value in lines}


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def settled(server: TritonServer) -> dict[str, float]:
    """The metrics, once nothing is running and they have not changed for a while."""
    before: dict[str, float] = {}
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        now = metrics(server)
        if now == before and now["toolkit_active_requests"] == now["toolkit_queued_requests"] == 0:
            return now
        before = now
        time.sleep(0.2)
    raise AssertionError(f"requests still hold slots: {before}")


def post(server: TritonServer, path: str, body: dict[str, Any] | bytes) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://{server.http_url}/v2/models/tensorrt_llm/{path}", data=data
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


MIXED = [
    Options(max_tokens=1),
    Options(max_tokens=13),
    Options(max_tokens=30, num_draft_tokens=0),
    Options(max_tokens=30, temperature=0.8, seed=7),
    Options(max_tokens=25, temperature=1.2, top_k=20, top_p=0.9, seed=8, num_draft_tokens=1),
    Options(max_tokens=20, stop=("e", "xyz")),
    Options(max_tokens=24, temperature=0.7, seed=9, frequency_penalty=0.5, presence_penalty=0.3),
]


@pytest.mark.parametrize("options", MIXED)
def test_streaming_gives_what_one_answer_gives(client: Client, options: Options) -> None:
    for prompt in PROMPTS[:3]:
        whole = client.generate(prompt, options)
        chunks = list(client.stream(prompt, options))
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
        assert chunks[-1].finish_reason == whole.finish_reason
        assert chunks[-1].output_tokens == len(whole.token_ids) == whole.statistics.output_tokens
        assert len(whole.token_ids) <= (options.max_tokens or 0)


def test_speculation_does_not_change_greedy_text_and_reports_itself(
    client: Client, endless: str
) -> None:
    plain = client.generate(endless, max_tokens=60, num_draft_tokens=0)
    assert plain.statistics.drafted == 0
    assert plain.statistics.acceptance_rate is None
    for draft_len in range(1, MAX_DRAFT_LEN + 1):
        speculative = client.generate(endless, max_tokens=60, num_draft_tokens=draft_len)
        figures = speculative.statistics
        assert speculative.token_ids == plain.token_ids
        assert figures.drafted is not None
        assert figures.drafted > 0
        assert figures.drafted_by_position is not None
        assert figures.accepted_by_position is not None
        assert sum(figures.drafted_by_position) == figures.drafted
        assert sum(figures.accepted_by_position) == figures.accepted
        assert figures.verify_steps is not None
        assert figures.accepted is not None
        assert figures.steps_by_reason == {"request": figures.verify_steps}
        assert 60 - 1 <= figures.verify_steps + figures.accepted <= 60 + draft_len


def test_http_generate_and_generate_stream_agree(tiny_server: TritonServer, client: Client) -> None:
    whole = client.generate(PROMPTS[0], max_tokens=12)
    body = {"text_input": PROMPTS[0], "sampling_param_max_tokens": 12}
    status, text = post(tiny_server, "generate", body)
    assert status == 200
    assert json.loads(text)["text_output"] == PROMPTS[0] + whole.text
    status, text = post(
        tiny_server, "generate", {**body, "sampling_param_exclude_input_from_output": True}
    )
    assert json.loads(text)["text_output"] == whole.text
    status, text = post(
        tiny_server, "generate_stream", {**body, "streaming": True, "return_token_ids": True}
    )
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert status == 200
    assert "".join(event["text_output"] for event in events) == whole.text
    ids = [event["output_ids"] for event in events if "output_ids" in event]
    assert [
        token for item in ids for token in (item if isinstance(item, list) else [item])
    ] == list(whole.token_ids)


def test_five_hundred_mixed_requests_are_all_right(
    client: Client, tiny_server: TritonServer
) -> None:
    cases = [(PROMPTS[number % len(PROMPTS)], MIXED[number % len(MIXED)]) for number in range(100)]
    alone = [client.generate(prompt, options) for prompt, options in cases]
    before = settled(tiny_server)

    def run(number: int) -> tuple[Completion | None, str, tuple[int, ...], str | None]:
        prompt, options = cases[number % len(cases)]
        if number % 3 == 0:
            completion = client.generate(prompt, options)
            return completion, completion.text, completion.token_ids, completion.finish_reason
        chunks = list(client.stream(prompt, options))
        ids = tuple(token for chunk in chunks for token in chunk.token_ids)
        return None, "".join(chunk.text for chunk in chunks), ids, chunks[-1].finish_reason

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(run, range(500)))
    for number, (_, text, ids, reason) in enumerate(results):
        expected = alone[number % len(cases)]
        assert (text, ids, reason) == (expected.text, expected.token_ids, expected.finish_reason), (
            cases[number % len(cases)]
        )

    after = settled(tiny_server)
    expected_tokens = sum(len(alone[number % len(cases)].token_ids) for number in range(500))
    assert after["toolkit_output_tokens"] - before["toolkit_output_tokens"] == expected_tokens
    ended = {
        name: after.get(name, 0) - before.get(name, 0)
        for name in ("toolkit_requests:stop", "toolkit_requests:length")
    }
    reasons = [alone[number % len(cases)].finish_reason for number in range(500)]
    assert ended == {
        f"toolkit_requests:{reason}": reasons.count(reason) for reason in ("stop", "length")
    }


def test_metrics_add_up_to_the_statistics_of_the_requests(
    client: Client, tiny_server: TritonServer
) -> None:
    before = settled(tiny_server)
    done = [client.generate(prompt, max_tokens=20).statistics for prompt in PROMPTS[:5]]
    with pytest.raises(RequestRefused):
        client.generate("x", max_tokens=0)
    after = settled(tiny_server)
    names = {spec.samples[-1] for spec in METRICS}
    assert names <= {name.split(":")[0] for name in after}
    for name, requests in (("ttft", 5), ("tpot", sum(one.output_tokens > 1 for one in done))):
        count, total = (f"toolkit_{name}_seconds_{part}" for part in ("count", "sum"))
        assert after[count] - before[count] == requests
        assert after[total] > before[total]

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("toolkit_queue_seconds_count") == 5
    assert 0 <= grown("toolkit_queue_seconds_sum") <= grown("toolkit_ttft_seconds_sum")
    # A step gives its accepted tokens and one more.
    assert grown("toolkit_tokens_per_step_count") == grown("toolkit_verify_steps")
    assert grown("toolkit_tokens_per_step_sum") == (
        grown("toolkit_verify_steps") + grown("toolkit_accepted_draft_tokens")
    )
    for metric, field in (
        ("toolkit_draft_tokens", "drafted"),
        ("toolkit_accepted_draft_tokens", "accepted"),
        ("toolkit_verify_steps", "verify_steps"),
        ("toolkit_output_tokens", "output_tokens"),
    ):
        assert after[metric] - before[metric] == sum(
            getattr(statistics, field) for statistics in done
        ), metric
    assert {reason for one in done for reason in one.steps_by_reason or {}} == {"fixed"}
    fixed = "toolkit_draft_len_steps:fixed"
    assert after[fixed] - before.get(fixed, 0) == sum(one.verify_steps or 0 for one in done)
    assert after["toolkit_requests:refused"] - before.get("toolkit_requests:refused", 0) == 1


def test_a_stream_fills_the_histograms_of_gaps_by_token(
    client: Client, tiny_server: TritonServer
) -> None:
    before = settled(tiny_server)
    chunks = list(client.stream(PROMPTS[0], max_tokens=20))
    after = settled(tiny_server)
    tokens = [len(chunk.token_ids) for chunk in chunks]
    assert len(tokens) > 1
    counts = {
        name: after[f"toolkit_{name}_seconds_count"] - before[f"toolkit_{name}_seconds_count"]
        for name in ("itl", "icl")
    }
    assert counts == {"itl": sum(tokens[1:]), "icl": len(tokens) - 1}
    sums = [
        after[f"toolkit_{name}_seconds_sum"] - before[f"toolkit_{name}_seconds_sum"]
        for name in ("itl", "icl")
    ]
    # Both share out the same time.
    assert sums[0] == pytest.approx(sums[1]) and sums[0] > 0
    buckets = [
        {
            label: float(value)
            for label, value in re.findall(
                rf'^toolkit_{name}_seconds_bucket\{{.*le="([^"]+)".*\}} (\S+)$',
                page(tiny_server),
                re.M,
            )
        }
        for name in ("itl", "icl", "ttft")  # ttft is Triton's own histogram
    ]
    for name, by_limit in zip(("itl", "icl", "ttft"), buckets, strict=True):
        counted = [by_limit[label] for label in sorted(by_limit, key=float)]
        assert counted == sorted(counted) and len(counted) in (14, 16)
        assert by_limit["+Inf"] == after[f"toolkit_{name}_seconds_count"]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", Options(), "text_input is empty"),
        ("x", Options(max_tokens=0), "sampling_param_max_tokens is 0"),
        ("x", Options(max_tokens=MAX_SEQ_LEN + 1), str(MAX_SEQ_LEN)),
        ("x" * (MAX_INPUT_LEN + 1), Options(max_tokens=1), str(MAX_INPUT_LEN)),
        (
            "x",
            Options(num_draft_tokens=MAX_DRAFT_LEN + 1),
            f"num_draft_tokens is {MAX_DRAFT_LEN + 1}",
        ),
        ("x", Options(top_p=-0.5), "sampling_param_top_p is -0.5"),
        ("x", Options(acceptance="hope"), "acceptance is 'hope'"),
        ("x", Options(stop=("",)), "empty stop word"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_server_goes_on(
    client: Client, prompt: str, options: Options, message: str
) -> None:
    with pytest.raises(RequestRefused, match=re.escape(message)):
        client.generate(prompt, options)
    with pytest.raises(RequestRefused, match=re.escape(message)):
        list(client.stream(prompt, options))
    assert client.generate(PROMPTS[0], max_tokens=2).token_ids


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text_input": "x", "max_tokens": 3}, "unknown input 'max_tokens'"),
        (
            {"text_input": "x", "sampling_param_beam_width": 2},
            "unknown input 'sampling_param_beam_width'",
        ),
        (
            {"text_input": "x", "sampling_param_best_of": 2},
            "sampling_param_best_of 2 is not supported",
        ),
        ({"text_input": ["x", "y"]}, "text_input takes one prompt, and 2 were sent"),
        ({"sampling_param_max_tokens": 2}, "text_input"),
        (
            {"text_input": "x", "sampling_param_temperature": -1},
            "sampling_param_temperature is -1.0",
        ),
        (b'{"text_input": "a\xff"}', "text_input is not valid UTF-8"),
    ],
)
def test_bad_http_requests_get_a_message(
    tiny_server: TritonServer, client: Client, body: dict[str, Any] | bytes, message: str
) -> None:
    status, text = post(tiny_server, "generate", body)
    assert status == 400
    assert message in json.loads(text)["error"]
    assert client.generate(PROMPTS[0], max_tokens=2).token_ids


def test_a_prompt_that_was_seen_is_not_computed_again(
    tiny_server: TritonServer, client: Client
) -> None:
    """It is told in the request's figures and in the metrics. A salt keeps requests apart, and what
    is measured has one of its own.
    """
    body = {
        "text_input": "def seen_before(x): return [x for x in range(9)]",
        "sampling_param_max_tokens": 8,
        "sampling_param_return_perf_metrics": True,
        "return_num_input_tokens": True,
    }
    before, answers = settled(tiny_server), []
    for salt in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}):
        _, text = post(tiny_server, "generate", {**body, **salt})
        answers.append(json.loads(text))
    after = settled(tiny_server)
    assert len({answer["text_output"] for answer in answers}) == 1
    tokens = answers[0]["num_input_tokens"]
    reused = [answer["kv_cache_reused_block"] for answer in answers]
    # Another test may have begun with the same few tokens.
    assert reused[0] < tokens // 2
    assert reused[1:] == [tokens - 1, 0, tokens - 1, 0]
    for name, added in (("prompt", 5 * tokens), ("reused_prompt", sum(reused))):
        assert after[f"toolkit_{name}_tokens"] - before[f"toolkit_{name}_tokens"] == added
    measured = client.measure([str(body["text_input"])] * 2, max_tokens=8)
    assert [timing.statistics.reused_blocks for timing in measured] == [0, 0]
    shared = client.measure([str(body["text_input"])], max_tokens=8, cache_salt="a")
    assert shared[0].statistics.reused_blocks == tokens - 1


def test_statistics_over_http_are_the_contract_s(tiny_server: TritonServer) -> None:
    body = {
        "text_input": PROMPTS[1],
        "sampling_param_max_tokens": 20,
        "sampling_param_return_perf_metrics": True,
        "return_num_input_tokens": True,
    }
    _, text = post(tiny_server, "generate", body)
    figures = json.loads(text)
    assert figures["kv_cache_alloc_total_blocks"] == figures["num_input_tokens"]
    assert figures["acceptance_rate"] == pytest.approx(
        figures["total_accepted_draft_tokens"] / figures["total_draft_tokens"]
    )
    times = [
        figures[name]
        for name in (
            "arrival_time_ns",
            "first_scheduled_time_ns",
            "first_token_time_ns",
            "last_token_time_ns",
        )
    ]
    assert times == sorted(times)
    assert "cumulative_logprob" not in figures
    _, text = post(tiny_server, "generate", {**body, "return_cumulative_logprob": True})
    assert -1000 < json.loads(text)["cumulative_logprob"] < 0


def test_a_deadline_ends_a_request(client: Client, tiny_server: TritonServer, endless: str) -> None:
    before = settled(tiny_server)
    with pytest.raises(RequestRefused, match="deadline of 15 ms passed after") as ended:
        client.generate(endless, max_tokens=LONG, timeout_ms=15)
    assert ended.value.outcome == "deadline"
    with pytest.raises(RequestRefused, match="deadline of 15 ms passed after"):
        list(client.stream(endless, max_tokens=LONG, timeout_ms=15))
    after = settled(tiny_server)
    assert after["toolkit_requests:deadline"] - before.get("toolkit_requests:deadline", 0) == 2


def cancelled(server: TritonServer) -> float:
    return metrics(server).get("toolkit_requests:cancelled", 0)


def test_leaving_a_stream_frees_its_slot(
    client: Client, tiny_server: TritonServer, endless: str
) -> None:
    before = settled(tiny_server)
    for _ in range(MAX_BATCH_SIZE + 2):
        chunks = client.stream(endless, max_tokens=LONG)
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]
    after = settled(tiny_server)
    assert (
        after["toolkit_requests:cancelled"] - before.get("toolkit_requests:cancelled", 0)
        == MAX_BATCH_SIZE + 2
    )
    assert client.generate(PROMPTS[0], max_tokens=2).token_ids


def test_a_request_is_cancelled_by_its_id(
    client: Client, tiny_server: TritonServer, endless: str
) -> None:
    chunks = client.stream(endless, max_tokens=LONG, request_id="the one")
    next(chunks)
    body = {"id": "the one", "text_input": "", "stop": True}
    status, text = post(tiny_server, "generate", body)
    assert status == CANCELLED, text
    with pytest.raises(RequestRefused, match="cancelled by the client"):
        list(chunks)
    status, text = post(tiny_server, "generate", {**body, "id": "nobody"})
    assert status == CANCELLED
    assert "no request with id 'nobody' is running" in text
    status, text = post(tiny_server, "generate", {"text_input": "", "stop": True})
    assert status == 400
    assert "stop came without a request id" in text


def test_an_id_that_two_requests_have_cancels_neither(
    client: Client, tiny_server: TritonServer, endless: str
) -> None:
    """Clients count their requests, so that another one's has the same id."""
    both = [client.stream(endless, max_tokens=LONG, request_id="1") for _ in range(2)]
    for chunks in both:
        next(chunks)
    status, text = post(tiny_server, "generate", {"id": "1", "text_input": "", "stop": True})
    assert status == 400
    assert "2 running requests have the id '1', so none is cancelled" in text
    for chunks in both:
        assert list(chunks)[-1].finish_reason == "length"


def test_a_killed_client_frees_its_slot(tiny_server: TritonServer, endless: str) -> None:
    before = settled(tiny_server).get("toolkit_requests:cancelled", 0)
    program = (
        "import sys; from toolkit.client import Client\n"
        f"chunks = Client(sys.argv[1]).stream(sys.argv[2], max_tokens={LONG}, num_draft_tokens=0)\n"
        "next(chunks); print('streaming', flush=True); import signal; signal.pause()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, tiny_server.grpc_url, endless], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    assert eventually(lambda: cancelled(tiny_server) == before + 1)
    settled(tiny_server)


def test_an_sse_client_that_hangs_up_frees_its_slot(
    tiny_server: TritonServer, endless: str
) -> None:
    before = settled(tiny_server).get("toolkit_requests:cancelled", 0)
    connection = http.client.HTTPConnection(tiny_server.http_url, timeout=30)
    body = {
        "text_input": endless,
        "streaming": True,
        "sampling_param_max_tokens": LONG,
        "num_draft_tokens": 0,
    }
    connection.request("POST", "/v2/models/tensorrt_llm/generate_stream", json.dumps(body))
    response = connection.getresponse()
    assert response.readline().startswith(b"data:")
    response.close()
    connection.close()
    assert eventually(lambda: cancelled(tiny_server) == before + 1)
    settled(tiny_server)


def test_overload_is_refused_at_once_and_the_rest_is_served(
    client: Client, tiny_server: TritonServer, endless: str
) -> None:
    request_count = MAX_BATCH_SIZE + MAX_QUEUE_SIZE + 24
    start = threading.Barrier(request_count)

    def run(_: int) -> str:
        start.wait()
        try:
            return client.generate(endless, max_tokens=60).text
        except RequestRefused as refused:
            return f"{refused.outcome}: {refused}"

    before = settled(tiny_server)
    with ThreadPoolExecutor(request_count) as pool:
        results = list(pool.map(run, range(request_count)))
    refusals = [result for result in results if result.startswith("overloaded: ")]
    assert 0 < len(refusals) <= 24
    assert all("being served or waiting" in refusal for refusal in refusals)
    assert len(set(results) - set(refusals)) == 1
    after = settled(tiny_server)
    assert after["toolkit_requests:overloaded"] - before.get(
        "toolkit_requests:overloaded", 0
    ) == len(refusals)


def test_a_damaged_draft_fails_no_request_and_everybody_is_told(
    client: Client, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    target, draft = tiny_pair
    shutil.copytree(draft, tmp_path / "damaged")
    (weights,) = (tmp_path / "damaged").glob("*.safetensors")
    damaged = {name: tensor * float("nan") for name, tensor in load_file(weights).items()}
    save_file(damaged, weights, {"format": "pt"})
    repository = package_pair((target, tmp_path / "damaged"), tmp_path / "packaged").path
    with (
        TritonServer(repository) as server,
        Client(server.grpc_url, timeout_s=60) as damaged_client,
    ):
        for options in (Options(max_tokens=20), Options(max_tokens=20, temperature=0.8, seed=7)):
            expected = client.generate(PROMPTS[0], options, num_draft_tokens=0)
            answer = damaged_client.generate(PROMPTS[0], options)
            assert answer.token_ids == expected.token_ids
            assert "not finite" in str(answer.statistics.draft_failure)
            chunks = list(damaged_client.stream(PROMPTS[0], options))
            assert "".join(chunk.text for chunk in chunks) == expected.text
            assert chunks[-1].statistics is not None
            assert "not finite" in str(chunks[-1].statistics.draft_failure)
        plain = damaged_client.generate(PROMPTS[0], max_tokens=20, num_draft_tokens=0).statistics
        assert plain.draft_failure is None
        status, text = post(
            server, "generate", {"text_input": PROMPTS[0], "sampling_param_max_tokens": 9}
        )
        assert "not finite" in json.loads(text)["draft_failure"], status
        assert eventually(
            lambda: metrics(server).get("toolkit_draft_len_steps:draft failed", 0) > 0
        )
        assert "since the draft failed" in server.log_path.read_text()
