"""The gateway over HTTP, with clients that people use."""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from typing import Any, cast

import openai
import pytest

from tests.support.gateways import (
    MODEL,
    STATISTICS,
    ScriptedBackend,
    gateway,
    post,
    render,
    sent,
    until,
)
from toolkit.client import Options, RequestRefused, ServerUnavailable, Statistics
from toolkit.gateway.arms import SERVED, Arm, Choice, OneArm
from toolkit.gateway.backends import Overloaded
from toolkit.gateway.protocol import DRAFT_FAILED

KEY = "a-key-of-sixteen-characters"
BODY = {"model": MODEL, "prompt": "Hi", "max_tokens": 6}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


def client(url: str, key: str = "none", **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30, **options)


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_openai_s_client_reads_a_whole_chat_answer() -> None:
    with gateway() as served, client(served.url) as clients:
        raw = clients.chat.completions.with_raw_response.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=6
        )
        answer = raw.parse()
    assert answer.choices[0].message.content == " a b cé"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 3
    assert raw.headers["x-accepted-draft-tokens"] == "3/5"
    assert served.backend.seen[0][:2] == ("<user>Hi", Options(max_tokens=6, temperature=1.0))


def test_openai_s_client_streams_with_usage() -> None:
    with gateway() as served, client(served.url) as clients:
        stream = clients.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        events = list(stream)
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == " a b cé"
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 6


def test_openai_s_client_streams_completions_and_lists_models() -> None:
    with gateway() as served, client(served.url) as clients:
        stream = clients.completions.create(model=MODEL, prompt="Hi", stream=True)
        assert "".join(event.choices[0].text for event in stream) == " a b cé"
        assert [model.id for model in clients.models.list()] == [MODEL]
        assert clients.models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.NotFoundError, match="'tiny' is"):
            clients.models.retrieve("gpt-5")
        with pytest.raises(openai.NotFoundError):
            clients.completions.create(model="gpt-5", prompt="Hi")


def test_log_probabilities_come_where_the_engine_has_them() -> None:
    scored = Statistics(
        output_tokens=2, log_probs=(-0.1,) * 6, next_best=(7,) * 6, next_best_log_probs=(-3.0,) * 6
    )
    with gateway(ScriptedBackend(statistics=scored)) as served, client(served.url) as clients:
        answer = clients.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], logprobs=True
        )
        assert answer.choices[0].logprobs is not None
        assert [entry.token for entry in answer.choices[0].logprobs.content or ()][:2] == [
            "t0",
            "t1",
        ]
    refused = pytest.raises(openai.BadRequestError, match="return_log_probs")
    with gateway() as served, client(served.url) as clients, refused:
        clients.completions.create(model=MODEL, prompt="Hi", logprobs=0)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (RequestRefused("too long"), 400),
        (Overloaded("queue is full"), 503),
        (ServerUnavailable("went away"), 503),
    ],
)
def test_a_failure_before_the_first_word_has_a_status(
    failure: Any, status: int, streams: bool
) -> None:
    with gateway(ScriptedBackend(failure=failure)) as served:
        sent = post(served.url, "/v1/completions", {**BODY, "stream": streams})
    assert sent[0] == status
    # What is wrong with the server is for the log: it tells where the server is.
    assert (str(failure) in sent[2]["error"]["message"]) == (status == 400)
    assert str(failure) in json.loads(served.lines[0])["error"]
    assert ("retry-after" in sent[1]) == (status == 503)


def test_a_failure_in_the_midst_ends_the_stream_with_an_error() -> None:
    backend = ScriptedBackend(failure=ServerUnavailable("went away"), failing_after=2)
    with gateway(backend) as served, client(served.url) as clients:
        texts = []
        with pytest.raises(openai.APIError, match="unavailable"):
            for event in clients.completions.create(model=MODEL, prompt="Hi", stream=True):
                texts.append(event.choices[0].text)
        assert texts == [" a", " b"]
        until(lambda: len(served.lines) == 1)
        line = json.loads(served.lines[0])
        assert (line["status"], line["error"]) == ("503", "went away")


SECRET = "a secret of somebody"


class SecretError(Exception):
    """A planted fault, whose words hold what a client sent."""


@pytest.mark.parametrize("streams", [False, True])
def test_a_fault_of_the_gateway_is_a_500_and_its_place_is_logged(streams: bool) -> None:
    backend = ScriptedBackend(failure=SecretError(SECRET))
    with gateway(backend) as served:
        status, headers, body = post(
            served.url, "/v1/completions", {**BODY, "stream": streams}, {"X-Request-Id": "mine-1"}
        )
        until(lambda: len(served.lines) == 2)
        page = served.gateway.metrics.page().decode()
        assert served.gateway.guard.running == 0
        backend.failure = None
        assert post(served.url, "/v1/completions", BODY)[0] == 200
    assert (status, headers["x-request-id"]) == (500, "mine-1")
    assert body["error"] == {
        "message": "the gateway has failed at this request; its log has more under the id mine-1",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    fault, line = (json.loads(line) for line in served.lines[:2])
    assert fault["id"] == line["id"] == "mine-1"
    assert fault["fault"].endswith("SecretError")
    assert any("gateways.py" in frame and " in stream: " in frame for frame in fault["traceback"])
    assert (line["status"], line["error"]) == ("500", "internal_error")
    assert not any(SECRET in line for line in served.lines)
    assert 'requests_total{arm="served",path="/v1/completions",status="500"} 1.0' in page
    assert "hung up" not in page


def test_a_fault_in_the_midst_ends_the_stream_with_an_error() -> None:
    backend = ScriptedBackend(failure=KeyError("x"), failing_after=2)
    with gateway(backend) as served:
        with sent(served.url, {**BODY, "stream": True}) as connection:
            data = b""
            while b"\r\n0\r\n\r\n" not in data:  # the end that HTTP needs
                part = connection.recv(10_000)
                assert part, data
                data += part
        until(lambda: len(served.lines) == 2)
        assert json.loads(served.lines[1])["status"] == "500"
        assert served.gateway.guard.running == 0
    events = [line[6:] for line in data.splitlines() if line.startswith(b"data: ")]
    assert json.loads(events[-1])["error"]["code"] == "internal_error"
    assert len(events) == 3


def _broken(*_: object) -> Any:
    raise SecretError(SECRET)


@pytest.mark.parametrize("where", ["template", "choice", "summary", "health"])
def test_a_fault_outside_an_answer_is_told_in_the_same_way(where: str) -> None:
    arms = OneArm(Arm(SERVED, ScriptedBackend(failure=SecretError(SECRET))))
    if where in ("choice", "summary"):
        arms = BrokenArms(arms.arm)
    with gateway(arms=arms, renders=_broken) as served:
        if where == "template":
            status, _, body = post(served.url, "/v1/chat/completions", CHAT)
        elif where == "choice":
            status, _, body = post(served.url, "/v1/completions", BODY)
        else:
            status, text = get(f"{served.url}/{where.replace('summary', 'rollout.json')}")
            body = json.loads(text)
    if where == "health":
        assert (status, body["arms"]) == (503, {"served": "unavailable"})
    else:
        assert (status, body["error"]["code"]) == (500, "internal_error")
    assert json.loads(served.lines[0])["fault"].endswith("SecretError")
    assert not any(SECRET in line for line in served.lines)


class BrokenArms(OneArm):
    """Can do nothing."""

    def choose(self, session: str, ticket: str, prompt: str | None) -> Choice:
        return cast("Choice", _broken())

    def summary(self) -> None:
        _broken()


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_hangs_up_ends_its_request(streams: bool) -> None:
    backend = ScriptedBackend(hangs_after=1)
    with gateway(backend) as served:
        host, port = served.url.removeprefix("http://").split(":")
        body = json.dumps({**BODY, "stream": streams}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            until(lambda: backend.running == 1)
            if streams:
                assert b"200 OK" in connection.recv(100)
        until(lambda: backend.running == 0)
        assert backend.left == 1
        until(lambda: len(served.lines) == 1)
        assert json.loads(served.lines[0])["status"] == "hung up"
        assert served.gateway.guard.running == 0


def test_a_client_that_reads_nothing_loses_its_place() -> None:
    backend = ScriptedBackend(words=["x" * 1_000_000] * 100)
    with gateway(backend, request_timeout_s=0.3) as served:
        with sent(served.url, {**BODY, "stream": True}):
            until(lambda: backend.running == 1)
            until(lambda: served.gateway.guard.running == 0)
            until(lambda: len(served.lines) == 1)
        assert (backend.running, backend.left) == (0, 1)
        assert json.loads(served.lines[0])["status"] == "hung up"


def test_a_body_that_does_not_come_is_not_awaited() -> None:
    with gateway(request_timeout_s=0.3) as served:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
            )
            assert b" 408 " in connection.recv(1000)
            while connection.recv(1000):
                pass  # and the connection is closed


def test_a_key_is_needed_where_keys_are_set() -> None:
    with gateway(keys=(KEY,)) as served:
        with client(served.url, KEY) as clients:
            assert clients.completions.create(model=MODEL, prompt="Hi").choices
        with client(served.url, "wrong") as clients, pytest.raises(openai.AuthenticationError):
            clients.models.list()
        assert post(served.url, "/v1/completions", BODY)[0] == 401
        assert get(f"{served.url}/health")[0] == 200
        assert get(f"{served.url}/metrics")[0] == 200
        assert len(served.backend.seen) <= 2


def test_both_pages_can_send_a_key() -> None:
    """No browser runs here: every request of a page's own has to carry the headers."""
    with gateway(keys=(KEY,)) as served:
        assert get(f"{served.url}/rollout.json")[0] == 401
        for path, requests in (("/", 2), ("/rollout", 1)):
            status, text = get(f"{served.url}{path}")
            assert status == 200
            assert '<input id="key" type="password"' in text
            assert 'Authorization: "Bearer " + at("key").value' in text
            assert text.count("fetch(") == text.count("headers: headers()") == requests


def test_keys_share_no_kv_cache() -> None:
    """The server is told whose request it is, by a name that no client can choose."""
    other = f"{KEY}-of-another"
    with gateway(keys=(KEY, other)) as served:
        for key in (KEY, KEY, other):
            post(served.url, "/v1/completions", BODY, {"Authorization": f"Bearer {key}"})
        salted = {**BODY, "cache_salt": "mine"}
        status, _, body = post(
            served.url, "/v1/completions", salted, {"Authorization": f"Bearer {KEY}"}
        )
        assert (status, "cache_salt" in body["error"]["message"]) == (400, True)
        first, again, foreign = [
            options.cache_salt for prompt, options, _ in served.backend.seen if prompt == "Hi"
        ][-3:]
    assert first == again != foreign
    assert not {first, foreign} & {None, ""}
    with gateway() as served:
        post(served.url, "/v1/completions", BODY)
        assert {options.cache_salt for _, options, _ in served.backend.seen} == {None}


def test_more_requests_than_places_are_told_to_come_again() -> None:
    backend = ScriptedBackend(hangs_after=1)
    with gateway(backend, max_requests=1) as served:
        first = threading.Thread(target=lambda: get_events(served.url))
        first.start()
        until(lambda: backend.running == 1)
        status, headers, body = post(served.url, "/v1/completions", BODY)
        assert (status, body["error"]["code"]) == (503, "overloaded")
        assert int(headers["retry-after"]) >= 1
    first.join(10)


def get_events(url: str) -> None:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps({**BODY, "stream": True}).encode()
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()
    except OSError:
        pass  # the gateway stops before the answer ends
    except Exception as error:
        assert "IncompleteRead" in repr(error)


def test_more_requests_than_a_minute_has_are_refused() -> None:
    with gateway(requests_per_minute=2, now=lambda: 0.0) as served:
        statuses = [post(served.url, "/v1/completions", BODY)[0] for _ in range(3)]
    assert statuses == [200, 200, 429]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b"[1]", 400, "JSON object"),
        (b'{"model": "tiny", "prompt": "' + b"x" * 5000 + b'"}', 413, "4,096 bytes"),
        (b"\xff\xfe", 400, "not JSON"),
        (b'{"model": "tiny", "prompt": "a\\ud83d"}', 400, "surrogate"),
        (b'{"model": "tiny", "prompt": "a", "user": "\\uDE00"}', 400, "surrogate"),
        (b'{"model": "tiny", "prompt": "a", "\\ud800": 1}', 400, "surrogate"),
        (b'{"model": "tiny", "prompt": "a", "temperature": 1' + b"0" * 400 + b"}", 400, "from 0"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(body: bytes, status: int, words: str) -> None:
    limit = 200_000 if status == 400 else 4096
    with gateway(max_body_bytes=limit) as served:
        sent = post(served.url, "/v1/completions", body)
        assert sent[0] == status
        assert words in sent[2]["error"]["message"]
        assert post(served.url, "/v1/completions", BODY)[0] == 200


def test_a_body_nested_to_any_depth_is_answered() -> None:
    """Reading one and printing it end at different depths."""
    with gateway() as served:
        statuses = set()
        for depth in range(850, 1000):
            deep = b"[" * depth + b"]" * depth
            body = b'{"model": "tiny", "prompt": "a", "seed": ' + deep + b"}"
            statuses.add(post(served.url, "/v1/completions", body)[0])
    assert statuses == {400}


def test_an_emoji_spelled_as_a_surrogate_pair_is_text() -> None:
    with gateway() as served:
        body = b'{"model": "tiny", "prompt": "a\\ud83d\\ude00 \\\\ud83d"}'
        assert post(served.url, "/v1/completions", body)[0] == 200
        assert served.backend.seen[0][0] == "a\N{GRINNING FACE} \\ud83d"


def test_a_request_id_is_kept_and_no_text_is_logged() -> None:
    with gateway() as served:
        secret = {**BODY, "prompt": "a secret of somebody"}
        headers = {"X-Request-Id": "mine-1"}
        assert post(served.url, "/v1/completions", secret, headers)[1]["x-request-id"] == "mine-1"
        forged = {"X-Request-Id": "x" * 500}
        assert post(served.url, "/v1/completions", secret, forged)[1]["x-request-id"][:4] == "req-"
        until(lambda: len(served.lines) == 2)
        line = json.loads(served.lines[0])
    assert line["id"] == "mine-1"
    assert (line["output_tokens"], line["accepted"], line["drafted"]) == (6, 3, 5)
    assert not any("secret" in line or " b" in line for line in served.lines)


def test_a_draft_that_failed_is_counted_logged_and_told() -> None:
    failed = dataclasses.replace(
        STATISTICS, steps_by_reason={"draft failed": 3}, draft_failure="10.0.0.7:9999 is gone"
    )
    with gateway(ScriptedBackend(statistics=failed)) as served:
        _, _, answer = post(served.url, "/v1/completions", BODY)
        until(lambda: len(served.lines) == 1)
        page = urllib.request.urlopen(f"{served.url}/metrics", timeout=10).read().decode()
    assert json.loads(served.lines[0])["draft_failure"] == "10.0.0.7:9999 is gone"
    assert 'toolkit_gateway_draft_failures_total{arm="served"} 1.0' in page
    assert answer["usage"]["speculation"] == {
        "verify_steps": 3,
        "draft_len_reasons": {"draft failed": 3},
        "draft_failure": DRAFT_FAILED,
    }


def test_refused_requests_are_logged_without_what_they_hold() -> None:
    with gateway(keys=(KEY,)) as served:
        mine = {"X-Request-Id": "mine-1"}
        post(served.url, "/v1/completions", BODY, mine)
        authorized = {**mine, "Authorization": f"Bearer {KEY}"}
        for sent in (
            {**BODY, "a secret": 1},
            {**BODY, "tools": ["a secret"]},
            {**BODY, "temperature": "a secret"},
            {**BODY, "model": "a secret"},
            b'{"prompt": "a secret',
            ["a secret"],
        ):
            post(served.url, "/v1/completions", sent, authorized)
        lines = [json.loads(line) for line in served.lines]
    assert {line["id"] for line in lines} == {"mine-1"}
    assert [(line["status"], line["error"], line.get("param")) for line in lines] == [
        ("401", "missing_api_key", None),
        ("400", "unknown_parameter", None),  # its name is the client's own text
        ("400", "unsupported_parameter", "tools"),
        ("400", "refused", "temperature"),
        ("404", "model_not_found", "model"),
        ("400", "invalid_body", None),
        ("400", "invalid_body", None),
    ]
    assert lines[0]["key"] == "-" != lines[1]["key"]
    assert not any("secret" in line or KEY in line for line in served.lines)


def test_health_is_a_token() -> None:
    backend = ScriptedBackend()
    with gateway(backend) as served:
        assert get(f"{served.url}/health") == (
            200,
            '{"status":"ready","arms":{"served":"ready"}}',
        )
        assert backend.seen == [
            ("Hello", Options(max_tokens=1, temperature=0.0), "health"),
        ]
        assert get(f"{served.url}/health")[0] == 200
        assert len(backend.seen) == 1
    with gateway(ScriptedBackend(failure=ServerUnavailable("went away"))) as served:
        status, text = get(f"{served.url}/health")
        assert (status, json.loads(text)["arms"]) == (503, {"served": "unavailable"})
        assert "went away" in served.lines[0]


def test_a_failed_request_ends_what_was_known_of_the_health() -> None:
    backend = ScriptedBackend()
    with gateway(backend) as served:
        assert post(served.url, "/v1/completions", BODY)[0] == 200
        backend.failure = Overloaded("queue is full")
        assert post(served.url, "/v1/completions", BODY)[0] == 503
        assert get(f"{served.url}/health")[0] == 200
        backend.failure = ServerUnavailable("connection refused")
        assert post(served.url, "/v1/completions", BODY)[0] == 503
        assert get(f"{served.url}/health")[0] == 503
        backend.failure = None
        assert get(f"{served.url}/health")[0] == 200


def test_all_who_ask_for_the_health_share_one_probe() -> None:
    backend = ScriptedBackend(delay_s=0.3)
    with gateway(backend) as served:
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda: statuses.append(get(f"{served.url}/health")[0]))
            for _ in range(10)
        ]
        backend.failure = ServerUnavailable("went away")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert statuses == [503] * 10
        assert len(backend.seen) < 5
        backend.failure = None
        assert get(f"{served.url}/health")[0] == 200


def test_metrics_count_what_was_served() -> None:
    with gateway() as served:
        post(served.url, "/v1/completions", BODY)
        post(served.url, "/v1/completions", {**BODY, "n": 3})
        get_events(served.url)
        until(lambda: len(served.lines) == 3)
        status, text = get(f"{served.url}/metrics")
    lines = text.splitlines()
    served_ok = 'toolkit_gateway_requests_total{arm="served",path="/v1/completions",status="200"}'
    assert status == 200
    assert f"{served_ok} 2.0" in lines
    assert 'toolkit_gateway_accepted_draft_tokens_total{arm="served"} 6.0' in lines
    assert 'toolkit_gateway_ttft_seconds_count{arm="served"} 1.0' in lines
    assert 'toolkit_gateway_icl_seconds_count{arm="served"} 4.0' in lines
    assert "_created" not in text


def test_only_streams_have_a_ttft() -> None:
    with gateway() as served:
        post(served.url, "/v1/completions", BODY)
        until(lambda: len(served.lines) == 1)
        assert "toolkit_gateway_ttft_seconds_count" not in get(f"{served.url}/metrics")[1]
        get_events(served.url)
        until(lambda: len(served.lines) == 2)
        text = get(f"{served.url}/metrics")[1]
        whole, stream = (json.loads(line) for line in served.lines)
    assert 'toolkit_gateway_ttft_seconds_count{arm="served"} 1.0' in text.splitlines()
    assert 'toolkit_gateway_e2e_latency_seconds_count{arm="served"} 2.0' in text.splitlines()
    assert whole["ttft_ms"] is None
    assert stream["ttft_ms"] > 0


def test_other_paths_say_which_there_are() -> None:
    with gateway() as served:
        status, text = get(f"{served.url}/v1/embeddings")
        assert status == 404
        assert "/v1/chat/completions" in json.loads(text)["error"]["message"]


def test_another_method_is_told_which_are_allowed() -> None:
    with gateway() as served, pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{served.url}/v1/completions", timeout=30)
    with caught.value as error:
        assert (error.code, error.headers["allow"]) == (405, "POST")
        assert json.loads(error.read())["error"]["code"] == "method_not_allowed"


def test_of_a_key_that_comes_twice_the_last_one_counts() -> None:
    with gateway() as served:
        body = b'{"model": "tiny", "prompt": "a", "max_tokens": 1, "prompt": "b"}'
        assert post(served.url, "/v1/completions", body)[0] == 200
        assert served.backend.seen[0][0] == "b"


def test_a_long_conversation_holds_up_nobody_else() -> None:
    """It is rendered beside the event loop, which meanwhile answers others."""
    is_rendering, may_end = threading.Event(), threading.Event()

    def renders(messages: object) -> str:
        is_rendering.set()
        assert may_end.wait(30)
        return render(messages)

    answers: list[Any] = []
    long = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 100_000}]}
    with gateway(renders=renders) as served:
        thread = threading.Thread(
            target=lambda: answers.append(post(served.url, "/v1/chat/completions", long))
        )
        thread.start()
        assert is_rendering.wait(30)
        assert post(served.url, "/v1/completions", BODY)[0] == 200
        may_end.set()
        thread.join(30)
    assert answers[0][0] == 200
    assert served.backend.seen[1][0] == "<user>" + "x" * 100_000


def test_the_page_needs_nothing_from_elsewhere() -> None:
    with gateway() as served:
        status, text = get(f"{served.url}/")
    assert status == 200
    assert "http://" not in text
    assert "https://" not in text


def test_running_requests_may_end_when_it_stops() -> None:
    backend = ScriptedBackend(delay_s=0.2)
    answers: list[Any] = []
    with gateway(backend, stop_timeout_s=10) as served:
        thread = threading.Thread(
            target=lambda: answers.append(post(served.url, "/v1/completions", BODY))
        )
        thread.start()
        until(lambda: backend.running == 1)
    thread.join(10)
    assert answers[0][0] == 200
    assert backend.is_closed


def test_a_signal_ends_it_without_a_word() -> None:
    script = """
from tests.support.gateways import MODEL, ScriptedBackend
from toolkit.cli.foreground import Signal, interrupted_by_signals
from toolkit.config.schema import GatewayConfig
from toolkit.gateway.app import Gateway
from toolkit.gateway.arms import SERVED, Arm, OneArm
from toolkit.gateway.guard import Guard
from toolkit.gateway.program import run
import time
arms = OneArm(Arm(SERVED, ScriptedBackend()))
guard = Guard((), None, 1, time.monotonic)
try:
    with interrupted_by_signals():
        config = GatewayConfig()
        make = lambda: Gateway(config, MODEL, arms, guard)
        run(config, make, ready=lambda url: print(url, flush=True))
except Signal:
    print("stopped")
"""
    command = [sys.executable, "-c", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://")
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30) == ("stopped\n", "")
