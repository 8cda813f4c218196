"""OpenAI's JSON, in and out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.gateways import STATISTICS, render
from toolkit.client import Options, Statistics
from toolkit.errors import RequestError
from toolkit.gateway.protocol import (
    DRAFT_FAILED,
    Answers,
    Asked,
    Refusal,
    log_probs,
    parse_chat,
    parse_completion,
)
from toolkit.openai_client import usage_counts

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**keys: Any) -> Asked:
    return parse_chat({"model": "m", "messages": MESSAGES, **keys}, render)


def completion(**keys: Any) -> Asked:
    return parse_completion({"model": "m", "prompt": "Hi", **keys})


def test_all_options_are_carried() -> None:
    asked = chat(
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        seed=3,
        stop=["a", "b"],
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        num_draft_tokens=2,
        stream=True,
        stream_options={
            "include_usage": True,
            "continuous_usage_stats": True,
            "include_speculation": True,
        },
        user="somebody",
    )
    assert asked == Asked(
        "chat",
        "m",
        "<user>Hi",
        Options(
            max_tokens=7,
            temperature=0.5,
            top_p=0.9,
            top_k=5,
            seed=3,
            stop=("a", "b"),
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            num_draft_tokens=2,
        ),
        streams=True,
        tells_usage=True,
        tells_tokens=True,
        tells_speculation=True,
        session="somebody",
    )


def test_the_default_temperature_is_that_of_openai() -> None:
    assert completion().options.temperature == 1.0
    assert completion(temperature=None).options.temperature == 1.0
    assert completion(temperature=0).options.temperature == 0.0


def test_defaults_that_clients_send_change_nothing() -> None:
    plain = completion()
    assert plain == completion(
        n=1,
        best_of=1,
        echo=False,
        suffix=None,
        stop=None,
        logit_bias={},
        frequency_penalty=0,
        presence_penalty=0.0,
        logprobs=None,
        stream=False,
        stream_options=None,
    )
    assert chat() == chat(
        tools=[], tool_choice="none", response_format={"type": "text"}, metadata={"a": "b"}
    )


def test_a_prompt_in_a_list_of_one_is_a_prompt() -> None:
    assert completion(prompt=["Hi"]) == completion()


@pytest.mark.parametrize(
    ("keys", "parameter", "words"),
    [
        ({"n": 2}, "n", "has to be 1"),
        ({"tools": [{"type": "function"}]}, "tools", "tool calls"),
        ({"response_format": {"type": "json_object"}}, "response_format", "guided decoding"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "bias"),
        ({"max_token": 5}, "max_token", "did you mean max_tokens?"),
        ({"max_tokens": 0}, "max_tokens", "from 1 to"),
        ({"max_tokens": True}, "max_tokens", "not true"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "send one"),
        ({"temperature": 2.5}, "temperature", "from 0 to 2"),
        ({"temperature": "0.5"}, "temperature", "number"),
        ({"temperature": float("nan")}, "temperature", "number"),
        ({"top_p": 1.5}, "top_p", "from 0 to 1"),
        ({"seed": -1}, "seed", "from 0"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": [5]}, "stop", "strings"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        (
            {"stream": True, "stream_options": {"nonsense": True}},
            "stream_options",
            "stream_options.nonsense",
        ),
        ({"stream": True, "logprobs": True}, "logprobs", "stream: false"),
        ({"logprobs": True, "top_logprobs": 5}, "top_logprobs", "from 0 to 1"),
        ({"top_logprobs": 1}, "top_logprobs", "needs logprobs"),
        ({"model": None}, "model", "name of the served model"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    keys: dict[str, Any], parameter: str, words: str
) -> None:
    with pytest.raises(Refusal) as caught:
        chat(**keys)
    assert caught.value.status == 400
    assert caught.value.parameter == parameter
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": [1, 2]}, "token ids"),
        ({"prompt": ""}, "not empty"),
        ({"prompt": None}, "not empty"),
        ({"best_of": 3}, "several sequences"),
        ({"echo": True}, "the prompt in the answer"),
        ({"suffix": "x"}, "gap"),
        ({"logprobs": 5}, "from 0 to 1"),
        ({"messages": MESSAGES}, "not a key of this endpoint"),
    ],
)
def test_completions_refuse_what_they_do_not_serve(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal) as caught:
        completion(**keys)
    assert words in caught.value.message


def test_a_refusal_is_short_however_long_the_key() -> None:
    with pytest.raises(Refusal) as refused:
        parse_completion({"model": "tiny", "prompt": "Hi", "k" * 500_000: 1})
    assert len(str(refused.value.body())) < 300


def test_a_checkpoint_without_a_template_has_no_chat() -> None:
    with pytest.raises(Refusal) as caught:
        parse_chat({"model": "m", "messages": MESSAGES}, None)
    assert "/v1/completions" in caught.value.message


def test_a_fault_of_the_messages_is_told() -> None:
    def refuse(messages: object) -> str:
        raise RequestError("messages[0].role: is missing")

    with pytest.raises(Refusal) as caught:
        parse_chat({"model": "m", "messages": [{}]}, refuse)
    assert caught.value.message == "messages[0].role: is missing"
    with pytest.raises(Refusal) as caught:
        parse_chat({"model": "m"}, render)
    assert caught.value.message == "messages is missing"


def test_usage_counts_accepted_and_rejected_drafts() -> None:
    answer = Answers(completion(), "id", 5).whole("text", "stop", STATISTICS)
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "total_tokens": 10,
        "completion_tokens_details": {
            "accepted_prediction_tokens": 3,
            "rejected_prediction_tokens": 2,
        },
        "speculation": {"verify_steps": 3},
    }
    untold = Statistics(input_tokens=1, output_tokens=2)
    assert set(Answers(chat(), "id", 5).usage_event(untold)["usage"]) == {
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
    }


def test_usage_tells_every_count_that_a_client_can_read_back() -> None:
    told = Statistics(
        drafted=5,
        accepted=3,
        verify_steps=2,
        drafted_by_position=(2, 2, 1),
        accepted_by_position=(2, 1, 0),
        steps_by_reason={"pays": 1, "draft failed": 1},
        draft_failure=DRAFT_FAILED,
    )
    usage = json.loads(json.dumps(Answers(chat(), "id", 5).usage_event(told)["usage"]))
    assert Statistics(**usage_counts(usage)) == told


def test_usage_tells_that_the_draft_failed_and_not_where() -> None:
    failed = Statistics(drafted=0, accepted=0, draft_failure="127.0.0.1:9999 is gone")
    usage = Answers(chat(), "id", 5).usage_event(failed)["usage"]
    assert usage["speculation"] == {"draft_failure": DRAFT_FAILED}


SCORED = Statistics(
    log_probs=(-0.1, -2.0), next_best=(7, 8), next_best_log_probs=(-3.0, -0.5), output_tokens=2
)


def test_log_probabilities_of_a_chat() -> None:
    asked = chat(logprobs=True, top_logprobs=1)
    scores = log_probs(asked, (5, 6), SCORED, {5: "é", 6: "\N{REPLACEMENT CHARACTER}", 8: "b"}.get)  # type: ignore[arg-type]
    assert scores["content"] == [
        {
            "token": "é",
            "logprob": -0.1,
            "bytes": [195, 169],
            "top_logprobs": [{"token": "é", "logprob": -0.1, "bytes": [195, 169]}],
        },
        {
            "token": "\N{REPLACEMENT CHARACTER}",
            "logprob": -2.0,
            "bytes": None,
            "top_logprobs": [{"token": "b", "logprob": -0.5, "bytes": [98]}],
        },
    ]


def test_log_probabilities_of_a_completion() -> None:
    scores = log_probs(completion(logprobs=1), (5, 6), SCORED, lambda token: f"t{token}")
    assert scores == {
        "tokens": ["t5", "t6"],
        "token_logprobs": [-0.1, -2.0],
        "top_logprobs": [{"t5": -0.1}, {"t8": -0.5}],
        "text_offset": [0, 2],
    }
    with pytest.raises(ValueError, match="shorter"):
        log_probs(completion(logprobs=0), (5, 6, 7), SCORED, str)
