"""How one Triton request is read, and what its responses hold. No server is needed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from toolkit.errors import RequestError
from toolkit.interfaces import RequestStats, Sampling, TokenEvent
from toolkit.triton.tensors.requests import (
    Answer,
    Limits,
    Request,
    check_is_only,
    joined,
    parse,
)

LIMITS = Limits(decoupled=True, max_draft_len=4)
STATS = RequestStats(
    prompt_tokens=3,
    output_tokens=4,
    verify_steps=2,
    drafted=8,
    accepted=2,
    drafted_by_position=(2, 2, 2, 2),
    accepted_by_position=(1, 1, 0, 0),
    arrival_ns=10,
    first_scheduled_ns=20,
    first_token_ns=30,
    last_token_ns=40,
    draft_ns=5,
    verify_ns=6,
    host_ns=7,
)


def parsed(limits: Limits = LIMITS, /, **tensors: Any) -> Request:
    values = {
        "text_input": [b"hello"],
        **{name: value if isinstance(value, list) else [value] for name, value in tensors.items()},
    }
    return parse(values, {}, limits)


def test_a_bare_prompt_is_greedy_with_every_default_left_open() -> None:
    assert parsed() == Request(prompt="hello")


def test_every_option_is_read() -> None:
    request = parsed(
        streaming=True,
        sampling_param_best_of=1,
        sampling_param_temperature=0.5,
        sampling_param_top_k=7,
        sampling_param_top_p=0.9,
        sampling_param_frequency_penalty=-0.1,
        sampling_param_presence_penalty=0.2,
        sampling_param_max_tokens=9,
        sampling_param_stop=[b"a", "é".encode()],
        sampling_param_seed=2**64 - 1,
        num_draft_tokens=0,
        acceptance=b"coupled",
        timeout_ms=5,
        return_finish_reason=True,
        return_token_ids=False,
    )
    assert request == Request(
        prompt="hello",
        streaming=True,
        sampling=Sampling(0.5, 7, 0.9, -0.1, 0.2, 2**64 - 1),
        max_tokens=9,
        stop=("a", "é"),
        draft_len=0,
        acceptance="coupled",
        timeout_ms=5,
        include_prompt=False,
        returns=frozenset({"return_finish_reason"}),
    )


@pytest.mark.parametrize(
    ("tensors", "temperature"),
    [
        ({}, 0.0),
        ({"sampling_param_top_k": 5}, 1.0),
        ({"sampling_param_top_p": 0.5}, 1.0),
        ({"sampling_param_temperature": 0}, 0.0),
        ({"sampling_param_temperature": 1.0, "sampling_param_top_k": 0}, 1.0),
        ({"sampling_param_temperature": 1.0, "sampling_param_top_p": 0.0}, 0.0),
        ({"sampling_param_top_k": 5, "sampling_param_top_p": 0.0}, 0.0),
    ],
)
def test_absent_temperature_means_greedy_unless_a_filter_is_given(
    tensors: dict[str, Any], temperature: float
) -> None:
    """And top_p 0 means greedy at any temperature: `SamplingParams.params_imply_greedy_decoding` in
    TensorRT-LLM's tensorrt_llm/sampling_params.py.
    """
    assert parsed(**tensors).sampling.temperature == temperature


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"text_input": [b""]}, "text_input is empty"),
        ({"text_input": [b"a", b"b"]}, "text_input takes one prompt, and 2 were sent"),
        ({"text_input": []}, "text_input takes one prompt, and 0 were sent"),
        (
            {"text_input": [b"ab\xff"]},
            "text_input is not valid UTF-8: invalid start byte at byte 2",
        ),
        ({"sampling_param_stop": [b"ok", b"\xc3"]}, "sampling_param_stop is not valid UTF-8"),
        ({"sampling_param_stop": [b""]}, "empty stop word"),
        ({"sampling_param_stop": [b"a"] * 65}, "holds 65 words; 64 are served at most"),
        ({"sampling_param_stop": [b"a" * 257]}, "a word of 257 bytes; a word has 256 at most"),
        (
            {"sampling_param_max_tokens": 0},
            "sampling_param_max_tokens is 0; it has to be at least 1",
        ),
        ({"sampling_param_best_of": 2}, "sampling_param_best_of 2 is not supported"),
        (
            {"sampling_param_temperature": float("nan")},
            "temperature is nan; it has to be a finite number of at least 0.0",
        ),
        ({"sampling_param_temperature": -1.0}, "sampling_param_temperature is -1.0"),
        ({"sampling_param_top_p": -0.1}, "sampling_param_top_p is -0.1"),
        ({"sampling_param_top_p": 1.5}, "sampling_param_top_p is 1.5"),
        ({"sampling_param_top_k": -1}, "sampling_param_top_k is -1"),
        (
            {"sampling_param_presence_penalty": float("inf")},
            "presence_penalty is inf; it has to be a finite number",
        ),
        ({"sampling_param_frequency_penalty": 3e38}, "at least -1000.0 and at most 1000.0"),
        ({"num_draft_tokens": 5}, "num_draft_tokens is 5; this deployment drafts 0 to 4 tokens"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1"),
        ({"acceptance": b"x" * 100_000}, f"acceptance is '{'x' * 60}'; known: auto, rejection"),
        ({"acceptance": b"hope"}, "acceptance is 'hope'; known: auto, rejection"),
        ({"timeout_ms": 0}, "timeout_ms is 0"),
        ({"streaming": [True, False]}, "streaming takes one value, and 2 were sent"),
        ({"sampling_param_beam_width": 2}, "unknown input 'sampling_param_beam_width'"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        parsed(**tensors)
    assert message in str(refused.value)


def test_a_salt_is_read_and_may_not_be_long() -> None:
    assert parsed(cache_salt=b"tenant 1").cache_salt == "tenant 1"
    assert parsed(cache_salt=b"x" * 256).cache_salt == "x" * 256
    with pytest.raises(RequestError, match="cache_salt holds a word of 257 bytes"):
        parsed(cache_salt=b"x" * 257)
    with pytest.raises(RequestError, match="cache_salt is not valid UTF-8"):
        parsed(cache_salt=b"\xff")


def test_missing_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="text_input is missing"):
        parse({}, {}, LIMITS)


def test_a_long_name_is_not_compared_with_those_that_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That took 5 seconds for 30 MB, on the thread that accepts everybody's requests."""
    monkeypatch.setattr("toolkit.triton.tensors.requests.difflib", None)
    with pytest.raises(RequestError, match=rf"unknown input '{'k' * 64}'\n"):
        parse({"text_input": [b"x"]}, {"k" * 65: 1}, LIMITS)


def test_a_name_that_http_made_a_parameter_is_refused_with_the_likely_tensor() -> None:
    with pytest.raises(
        RequestError, match=r"unknown input 'max_tokens'\n.*'sampling_param_max_tokens'"
    ):
        parse({"text_input": [b"x"]}, {"max_tokens": 3}, LIMITS)
    with pytest.raises(RequestError, match="Did you mean 'num_draft_tokens'"):
        parse({"text_input": [b"x"]}, {"num_draft_token": 3}, LIMITS)
    with pytest.raises(RequestError, match="Did you mean 'sampling_param_temperature'"):
        parse({"text_input": [b"x"]}, {"temperture": 0.5}, LIMITS)
    with pytest.raises(RequestError, match="Did you mean 'sampling_param_stop'"):
        parse({"text_input": [b"x"]}, {"stop_words": 3}, LIMITS)
    with pytest.raises(RequestError, match=r"Known: text_input, .*sampling_param_stop"):
        parse({"text_input": [b"x"]}, {"sampling_param_bogus": 3}, LIMITS)


def test_parameters_of_triton_itself_are_accepted() -> None:
    assert (
        parse(
            {"text_input": [b"x"]},
            {"triton_enable_empty_final_response": True, "priority": 1},
            LIMITS,
        ).prompt
        == "x"
    )


def test_a_prompt_is_refused_by_its_bytes_before_it_is_read() -> None:
    """The bytes are not even valid UTF-8, which would be found by reading them."""
    limits = dataclasses.replace(LIMITS, max_input_len=4)
    assert parsed(limits, text_input=b"x" * 64).prompt == "x" * 64
    with pytest.raises(RequestError, match=r"text_input has 65 bytes.* up to 64: 16 for each"):
        parsed(limits, text_input=b"\xff" * 65)


def test_a_request_may_not_outlast_the_deployment() -> None:
    limits = dataclasses.replace(LIMITS, max_timeout_ms=1000)
    assert parsed(limits, timeout_ms=1000).timeout_ms == 1000
    with pytest.raises(RequestError, match=r"timeout_ms is 1001; .* after 1000 ms"):
        parsed(limits, timeout_ms=1001)


def test_a_stop_cancels_no_request_of_several_with_its_id() -> None:
    check_is_only(0, "1")
    check_is_only(1, "1")
    with pytest.raises(RequestError, match="2 running requests have the id '1', so none"):
        check_is_only(2, "1")


def test_a_stop_is_read_before_its_empty_prompt() -> None:
    """prepare_stop_signals and the parameter `Streaming` of TensorRT-LLM's
    triton_backend/tools/llmapi_client.py.
    """
    tensors = {"text_input": [b""], "stop": [True]}
    assert parse(tensors, {"Streaming": False}, LIMITS).cancels
    assert not parsed(stop=False).cancels


def test_drafting_without_a_draft_model_is_refused_and_plain_decoding_is_not() -> None:
    plain = Limits(decoupled=True, max_draft_len=0)
    with pytest.raises(RequestError, match="no draft model"):
        parsed(plain, num_draft_tokens=1)
    assert parsed(plain, num_draft_tokens=0).draft_len == 0


def test_streaming_is_refused_where_the_repository_cannot() -> None:
    with pytest.raises(RequestError, match="streaming needs a decoupled repository"):
        parsed(Limits(decoupled=False, max_draft_len=4), streaming=True)


def events() -> list[TokenEvent]:
    return [
        TokenEvent("1", (5,), "a"),
        TokenEvent("1", (6, 7), ""),
        TokenEvent("1", (8,), "bc", finish_reason="stop", stop_reason="d", stats=STATS),
    ]


def test_streaming_gives_what_is_new_and_never_the_prompt() -> None:
    answer = Answer(parsed(streaming=True, return_token_ids=True, return_num_output_tokens=True))
    assert [answer.add(event, 0) for event in events()] == [
        {"text_output": ["a"], "output_ids": [5], "num_output_tokens": [1]},
        {"text_output": [""], "output_ids": [6, 7], "num_output_tokens": [3]},
        {"text_output": ["bc"], "output_ids": [8], "num_output_tokens": [4]},
    ]


def test_chunks_of_a_stream_keep_the_interval_and_lose_nothing() -> None:
    answer = Answer(
        parsed(streaming=True, return_token_ids=True, return_num_output_tokens=True), interval_ns=10
    )
    times = (100, 105, 109, 110, 112, 113)
    steps = [TokenEvent("1", (number,), str(number)) for number in range(5)]
    last = TokenEvent("1", (9,), "9", finish_reason="length", stats=STATS)
    assert [answer.add(event, now) for event, now in zip([*steps, last], times, strict=True)] == [
        {"text_output": ["0"], "output_ids": [0], "num_output_tokens": [1]},
        None,
        None,
        {"text_output": ["123"], "output_ids": [1, 2, 3], "num_output_tokens": [4]},
        None,
        {"text_output": ["49"], "output_ids": [4, 9], "num_output_tokens": [6]},
    ]


def test_a_response_is_due_when_it_would_be_sent() -> None:
    answer = Answer(parsed(streaming=True), interval_ns=10)
    assert answer.is_due(0)
    answer.add(TokenEvent("1", (5,), "a"), 100)
    assert [answer.is_due(now) for now in (100, 109, 110)] == [False, False, True]
    whole = Answer(parsed(streaming=False))
    assert not whole.is_due(0)


def test_events_that_waited_for_the_sender_become_one() -> None:
    together = Answer(parsed(streaming=True, return_token_ids=True, return_finish_reason=True))
    (event,) = joined(events())
    assert together.add(event, 0) == {
        "text_output": ["abc"],
        "output_ids": [5, 6, 7, 8],
        "finish_reason": ["stop"],
    }
    assert event.stats == STATS
    assert joined(events()[:1]) == events()[:1]


def test_an_error_is_not_joined_with_the_text_before_it() -> None:
    failed = TokenEvent("1", (), "", finish_reason="deadline", stats=STATS)
    before, last = joined([*events()[:2], failed])
    assert (before.token_ids, before.text, before.finish_reason) == ((5, 6, 7), "a", None)
    assert last == failed


def test_one_response_holds_everything_and_the_prompt_unless_it_is_excluded() -> None:
    with_prompt, without = (
        Answer(parsed(return_token_ids=True)),
        Answer(parsed(sampling_param_exclude_input_from_output=True)),
    )
    assert [with_prompt.add(event, 0) for event in events()] == [
        None,
        None,
        {"text_output": ["helloabc"], "output_ids": [5, 6, 7, 8]},
    ]
    assert [without.add(event, 0) for event in events()][-1] == {"text_output": ["abc"]}


def test_statistics_come_with_the_last_response_when_asked_for() -> None:
    answer = Answer(
        parsed(
            return_finish_reason=True,
            return_stop_reason=True,
            return_num_input_tokens=True,
            sampling_param_return_perf_metrics=True,
            return_speculation_stats=True,
        )
    )
    last = [answer.add(event, 0) for event in events()][-1]
    assert last is not None
    assert last["finish_reason"] == ["stop"]
    assert last["stop_reason"] == ["d"]
    assert last["num_input_tokens"] == [3]
    assert last["acceptance_rate"] == [0.25]
    assert (last["total_draft_tokens"], last["total_accepted_draft_tokens"]) == ([8], [2])
    assert last["verify_steps"] == [2]
    assert last["drafted_by_position"] == [2, 2, 2, 2]
    assert last["accepted_by_position"] == [1, 1, 0, 0]
    assert last["last_token_time_ns"] == [40]
    assert (last["draft_time_ns"], last["verify_time_ns"], last["host_time_ns"]) == ([5], [6], [7])


@pytest.mark.parametrize("returns", [{}, {"sampling_param_return_perf_metrics": True}])
def test_a_draft_that_failed_is_told_with_the_last_response_unasked(
    returns: dict[str, bool],
) -> None:
    answer, failed = Answer(parsed(streaming=True, **returns)), "OutOfMemoryError: none is left"
    stats = dataclasses.replace(STATS, draft_failure=failed)
    first, *_, last = [answer.add(dataclasses.replace(event, stats=stats), 0) for event in events()]
    assert first is not None and "draft_failure" not in first
    assert last is not None and last["draft_failure"] == [failed]


@pytest.mark.parametrize(("known", "reused"), [(None, 0), (0, 0), (2, 2)])
def test_a_block_is_a_token_of_the_prompt(known: int | None, reused: int) -> None:
    answer = Answer(parsed(sampling_param_return_perf_metrics=True))
    stats = dataclasses.replace(STATS, reused_prompt_tokens=known)
    last = answer.add(TokenEvent("r", (1,), "a", "length", stats=stats), 0)
    assert last is not None
    names = ("reused_block", "missed_block", "alloc_new_blocks", "alloc_total_blocks", "hit_rate")
    figures = [last[f"kv_cache_{name}"][0] for name in names]
    assert figures == [reused, 3 - reused, 3 - reused, 3, reused / 3]


def test_every_chunk_has_reasons_and_figures_as_of_that_chunk() -> None:
    """`_create_response` of TensorRT-LLM's triton_backend/all_models/llmapi/tensorrt_llm/1/model.py
    makes all responses alike, and its end_to_end_test.py asserts that each has a finish_reason.
    """
    request = parsed(
        streaming=True,
        return_finish_reason=True,
        return_stop_reason=True,
        sampling_param_return_perf_metrics=True,
    )
    assert request.repeats_figures
    first_stats = dataclasses.replace(STATS, verify_steps=0, drafted=0, accepted=0)
    answer = Answer(request)
    first = answer.add(TokenEvent("1", (5,), "a", stats=first_stats), 0)
    last = answer.add(events()[-1], 0)
    assert first is not None
    assert last is not None
    assert (first["finish_reason"], first["stop_reason"]) == (["None"], ["None"])
    assert (first["acceptance_rate"], first["total_draft_tokens"]) == ([0.0], [0])
    assert (last["finish_reason"], last["stop_reason"]) == (["stop"], ["d"])
    assert (last["acceptance_rate"], last["total_draft_tokens"]) == ([0.25], [8])
    assert set(first) == set(last)


def test_our_clients_get_them_with_the_last_chunk_alone() -> None:
    request = parsed(
        streaming=True,
        return_finish_reason=True,
        sampling_param_return_perf_metrics=True,
        return_speculation_stats=True,
    )
    assert not request.repeats_figures
    answer = Answer(request)
    assert answer.add(TokenEvent("1", (5,), "a"), 0) == {"text_output": ["a"]}
    last = answer.add(events()[-1], 0)
    assert last is not None
    assert last["finish_reason"] == ["stop"]
    assert last["verify_steps"] == [2]


def test_the_acceptance_rate_is_zero_if_nothing_was_drafted() -> None:

    stats = dataclasses.replace(STATS, drafted=0, accepted=0)
    last = Answer(parsed(sampling_param_return_perf_metrics=True)).add(
        TokenEvent("1", (1,), "a", finish_reason="stop", stats=stats), 0
    )
    assert last is not None
    assert last["acceptance_rate"] == [0.0]
    assert last["total_draft_tokens"] == [0]
