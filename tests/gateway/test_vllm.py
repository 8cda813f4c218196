"""The gateway in front of vLLM itself, with a small random pair."""

from __future__ import annotations

import json
import re
import socket
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.cli import write_config
from tests.support.gateways import post, render, running
from tests.support.stages import Silent
from toolkit.client import Completion
from toolkit.config.load import load_config
from toolkit.gateway.app import Gateway
from toolkit.gateway.guard import Guard
from toolkit.openai_client import OpenAiClient
from toolkit.pipeline.store import Store
from toolkit.workflows.build import build
from toolkit.workflows.folders import Workplace
from toolkit.workflows.gateway import one_arm
from toolkit.workflows.serve import serve

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
MODEL = "tiny"
PROMPT = "def f(x):"
MAX_SEQ_LEN = 512
ENGINE = {
    "kind": "vllm",
    "dtype": "float32",
    "max_batch_size": 4,
    "max_input_len": 64,
    "max_seq_len": MAX_SEQ_LEN,
    "kv_cache_gib": 1,
}
COUNTED = re.compile(r"^vllm:(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)


class Front:
    """A gateway, and the vLLM behind it. lines: the gateway's log."""

    def __init__(self, url: str, address: str, lines: list[str]) -> None:
        self.url, self.address, self.lines = url, address, lines
        self.direct = OpenAiClient(address, MODEL)

    def counted(self, name: str, label: str = "") -> float:
        """A counter of vLLM's, over all its labels but `label`."""
        with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=30) as answer:
            page = answer.read().decode()
        return sum(float(n) for key, of, n in COUNTED.findall(page) if key == name and label in of)


@pytest.fixture(scope="module")
def front(
    vllm_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    root, lines = tmp_path_factory.mktemp("front"), []
    with (
        tempfile.TemporaryDirectory(prefix="t-") as short,  # vLLM's sockets lie in it
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(tempfile, "tempdir", short)
        models = {
            role: {"checkpoint": str(path), "quantization": {"quant_algo": "NO_QUANT"}}
            for role, path in zip(("target", "draft"), vllm_pair, strict=True)
        }
        config = load_config(write_config(root, vllm_pair, engine=ENGINE, **models))
        build(config, Workplace(root), Silent(), Store(root / "store"), until="package")
        with serve(config, Workplace(root).repository(MODEL)) as (_, servers):
            make_arms = one_arm(config, servers.address.url)

            def made() -> Gateway:
                guard = Guard((), None, 64, time.monotonic)
                return Gateway(config.gateway, MODEL, make_arms(), guard, render, str, lines.append)

            address = servers.address.url.removeprefix("http://").removesuffix("/v1")
            with running(config.gateway, made) as url:
                yield Front(url, address, lines)


def body(**keys: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 0, **keys}


def chat(**keys: Any) -> dict[str, Any]:
    asked = body(messages=[{"role": "user", "content": "Hi"}], **keys)
    del asked["prompt"]
    return asked


def client(front: Front) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=60)


def expected(front: Front, prompt: str = PROMPT) -> Completion:
    return front.direct.generate(prompt, max_tokens=20, temperature=0.0)


def test_a_whole_answer_is_that_of_our_own_client(front: Front) -> None:
    known = expected(front)
    status, headers, answer = post(front.url, "/v1/completions", body())
    assert status == 200
    choice, usage = answer["choices"][0], answer["usage"]
    assert (choice["text"], choice["finish_reason"]) == (known.text, "length")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (10, 20)
    drafted, accepted = known.statistics.drafted, known.statistics.accepted
    assert drafted
    assert headers["x-accepted-draft-tokens"] == f"{accepted}/{drafted}"
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == accepted


def test_a_stream_has_the_same_text_and_its_usage(front: Front) -> None:
    options = {"include_usage": True, "include_speculation": True}
    with client(front) as clients:
        events = list(clients.completions.create(**body(stream=True, stream_options=options)))
    assert "".join(event.choices[0].text for event in events if event.choices) == (
        expected(front).text
    )
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 20
    told = [event.speculation for event in events if hasattr(event, "speculation")]  # type: ignore[attr-defined]
    assert sum(each["tokens"] for each in told) == 20


def test_a_chat_is_rendered_here_and_continued_there(front: Front) -> None:
    known = expected(front, render([{"role": "user", "content": "Hi"}]))
    with client(front) as clients:
        whole = clients.chat.completions.create(**chat())
        events = list(clients.chat.completions.create(**chat(stream=True)))
    assert whole.choices[0].message.content == known.text
    assert "".join(event.choices[0].delta.content or "" for event in events) == known.text
    assert events[0].choices[0].delta.role == "assistant"


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_word_ends_the_text_before_it(front: Front, streams: bool) -> None:
    text = expected(front).text
    word = text[4:6]
    with client(front) as clients:
        answer = clients.completions.create(**body(stop=["nowhere", word], stream=streams))
        choices = [each.choices[0] for each in (answer if streams else [answer])]
    assert "".join(choice.text for choice in choices) == text[: text.index(word)]
    assert choices[-1].finish_reason == "stop"


def test_log_probabilities_are_the_server_s(front: Front) -> None:
    known = front.direct.generate(PROMPT, max_tokens=5, temperature=0.0, log_probs=True)
    assert known.statistics.log_probs is not None
    status, _, answer = post(front.url, "/v1/completions", body(max_tokens=5, logprobs=1))
    scores = answer["choices"][0]["logprobs"]
    assert status == 200
    assert scores["token_logprobs"] == pytest.approx(known.statistics.log_probs, abs=1e-5)
    best = [next(iter(top.values())) for top in scores["top_logprobs"]]
    assert best == scores["token_logprobs"]  # greedy: the chosen token is the likeliest
    status, _, answer = post(front.url, "/v1/chat/completions", chat(max_tokens=5, logprobs=True))
    assert status == 200
    assert len(answer["choices"][0]["logprobs"]["content"]) == 5


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5},
        {"top_k": 5, "top_p": 0.9},
        {"top_p": 0.5},
        {"frequency_penalty": 1.5, "presence_penalty": -1.0},
        {"temperature": 2},
    ],
)
def test_a_seed_repeats_a_sampled_text(front: Front, options: dict[str, Any]) -> None:
    asked = body(**{"temperature": 0.8, "seed": 7, **options})
    texts = []
    for _ in range(2):
        status, _, answer = post(front.url, "/v1/completions", asked)
        assert status == 200
        texts.append(answer["choices"][0]["text"])
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_hangs_up_ends_its_request_there(front: Front, streams: bool) -> None:
    """Else vLLM would write all of its tokens.

    It writes them in a fraction of a second, so a busy client may leave too late: then once more.
    """
    length = MAX_SEQ_LEN - 20
    outcomes = [hang_up(front, body(max_tokens=length, stream=streams))]
    while outcomes[-1][:2] != ("hung up", None) or outcomes[-1][2] >= length:
        assert len(outcomes) < 20, outcomes
        outcomes.append(hang_up(front, body(max_tokens=length, stream=streams)))


def hang_up(front: Front, asked: dict[str, Any]) -> tuple[str, int | None, float]:
    """Leave as soon as vLLM has begun: the gateway's status and output tokens, vLLM's tokens."""
    written, before = front.counted("generation_tokens_total"), len(front.lines)
    host, port = front.url.removeprefix("http://").split(":")
    data = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + data)
        until(lambda: front.counted("num_requests_running") == 1 or len(front.lines) > before)
    until(lambda: len(front.lines) > before)

    def is_idle() -> bool:
        """vLLM says so in its next step, so it is given one."""
        front.direct.generate("x", max_tokens=1)
        return front.counted("num_requests_running") == 0

    until(is_idle)
    line = json.loads(front.lines[-1])
    return line["status"], line["output_tokens"], front.counted("generation_tokens_total") - written


def until(condition: Any) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come about within 30 s")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_draft_tokens": 0}, "the draft length is fixed when the server starts"),
        ({"max_tokens": 2000}, f"max_model_len={MAX_SEQ_LEN}"),
        ({"prompt": "x" * 600}, f"maximum context length is {MAX_SEQ_LEN}"),
        ({"top_p": 0}, "top_p must be in"),
        ({"seed": 2**63}, "seed"),
        ({"tools": [{"type": "function"}]}, "tools"),
    ],
)
def test_what_vllm_cannot_do_is_a_400_in_its_words(
    front: Front, keys: dict[str, Any], words: str, streams: bool
) -> None:
    status, _, answer = post(front.url, "/v1/completions", body(stream=streams, **keys))
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert words in answer["error"]["message"]
    assert front.address not in answer["error"]["message"]


def test_of_a_key_that_comes_twice_the_last_one_counts_in_both(front: Front) -> None:
    data = b'{"model": "tiny", "prompt": "a", "temperature": 0, "max_tokens": 20, "prompt": "%s"}'
    texts = []
    for url in (front.url, f"http://{front.address}"):
        status, _, answer = post(
            url,
            "/v1/completions",
            data % PROMPT.encode(),
            {"Content-Type": "application/json"},
        )
        assert status == 200
        texts.append(answer["choices"][0]["text"])
    assert texts == [expected(front).text] * 2


def test_its_health_is_a_token_of_vllm(front: Front) -> None:
    with urllib.request.urlopen(f"{front.url}/health", timeout=60) as answer:
        assert json.loads(answer.read()) == {"status": "ready", "arms": {"served": "ready"}}
