"""A chat endpoint gets messages, every other one the text that a template makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_templates import write_chat_tokenizer
from tests.support.stub import Script, StubServer
from toolkit.bench.arrivals import uniquely
from toolkit.bench.prompts import Conversation, name_of, read_unwritten, text_of
from toolkit.bench.run import BenchOptions, bench
from toolkit.errors import UsageError

DATA = Path(__file__).parents[1] / "data"
MESSAGES = DATA / "messages.jsonl"
ONE_WORD = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "Which month follows May?"},
]


@pytest.fixture(scope="module")
def stub() -> Iterator[StubServer]:
    with StubServer(Script(chunks=((2.0, "a", 1), (1.0, "b", 1)), log=True)) as server:
        yield server


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    return write_chat_tokenizer(tmp_path / "chat", "chatml")


def sent(stub: StubServer, url: str, prompts: Path, **asked: Any) -> list[dict[str, Any]]:
    """What the endpoint was asked."""
    before = len(stub.log())
    bench(url, BenchOptions(prompts=prompts, max_tokens=64, warm_up=0, **asked))
    return [entry["asked"] for entry in stub.log()[before:]]


def test_a_chat_endpoint_gets_the_messages_up_to_the_question(stub: StubServer) -> None:
    asked = sent(stub, f"{stub.http}/v1", MESSAGES)
    assert ONE_WORD in [request["messages"] for request in asked]
    assert max(len(request["messages"]) for request in asked) == 3


@pytest.mark.parametrize("protocol", ["openai-completions", "triton-http"])
def test_an_endpoint_of_text_gets_what_the_template_writes(
    stub: StubServer, chat: Path, protocol: str
) -> None:
    asked = sent(stub, stub.http, MESSAGES, chat=chat, protocol=protocol)
    texts = [request.get("prompt", request.get("text_input")) for request in asked]
    assert any(
        text.endswith("user\nWhich month follows May?<|im_end|>\n<|im_start|>assistant\n")
        for text in texts
    )


@pytest.mark.parametrize("where", ["grpc", "http"])
def test_an_endpoint_of_text_needs_a_template(stub: StubServer, where: str) -> None:
    with pytest.raises(UsageError, match=r"line 1 has messages, and no .*\n  Name one with --tok"):
        sent(stub, stub.grpc if where == "grpc" else stub.http, MESSAGES)


def test_published_questions_are_raw_text_where_no_template_is_known(stub: StubServer) -> None:
    asked = sent(stub, stub.http, DATA / "question.jsonl", protocol="triton-http")
    assert "What is 12 times 12?" in [request["text_input"] for request in asked]


def test_a_repeated_conversation_is_numbered_before_the_template_writes_it(chat: Path) -> None:
    prompts, _ = read_unwritten(MESSAGES, 2, chat)
    unique = uniquely(prompts, 6)
    assert len({name_of(prompt) for prompt in unique}) == 6
    assert isinstance(unique[3], Conversation)
    assert unique[3].messages == [
        {"role": "system", "content": "2. Answer in one word."},
        {"role": "user", "content": "Which month follows May?"},
    ]
    assert text_of(unique[3]).startswith("<|im_start|>system\n2. Answer in one word.<|im_end|>")
    assert text_of(unique[1]).startswith("<|im_start|>system\nAnswer in one word.<|im_end|>")
