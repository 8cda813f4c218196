"""NVIDIA's clients of TensorRT-LLM's templates meet the same tensors, defaults and meanings on the
embedded engine. Each test names the source of a meaning, in NVIDIA/TensorRT-LLM's triton_backend/.
"""

from __future__ import annotations

import itertools
import json
import queue
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.support import upstream_clients as upstream
from tests.support.serving import MAX_BATCH_SIZE, MAX_DRAFT_LEN, MAX_SEQ_LEN, package_pair
from tests.support.upstream_clients import infer, int32
from toolkit.bench.counters import read_counters
from toolkit.client import Client
from toolkit.triton.process.server import TritonServer

PROMPTS = tuple(f"def f{number}(x): return {'x' * (number % 7)}" for number in range(8))
TOKENS = 24
MODELS = ("ensemble", "tensorrt_llm_bls")


@pytest.fixture(scope="module")
def raw(tiny_bls_server: TritonServer) -> Iterator[triton_grpc.InferenceServerClient]:
    with triton_grpc.InferenceServerClient(tiny_bls_server.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def client(tiny_bls_server: TritonServer) -> Iterator[Client]:
    with Client(tiny_bls_server.grpc_url, timeout_s=60) as client:
        yield client


@pytest.fixture(scope="module")
def unary_server(
    tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """llmapi with `triton.decoupled: false`, which the template has by default."""
    repository = package_pair(tiny_pair, tmp_path_factory.mktemp("unary"), decoupled=False)
    with TritonServer(repository.path) as server:
        yield server


def greedy(client: Client, prompt: str, tokens: int = TOKENS) -> str:
    return client.generate(prompt, max_tokens=tokens, num_draft_tokens=0).text


def post(server: TritonServer, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://{server.http_url}/v2/models/{path}", data=json.dumps(body).encode()
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(f"{error.code}: {error.read().decode()}") from error


def first_end(client: Client, prompt: str) -> tuple[int, int]:
    """(token, position): a token of the greedy output that does not occur earlier in it, and not at
    its beginning. As end_id it ends the text there.
    """
    ids = client.generate(prompt, max_tokens=TOKENS, num_draft_tokens=0).token_ids
    position = next(index for index in range(3, len(ids)) if ids[index] not in ids[:index])
    return ids[position], position


# Neutral inputs


@pytest.mark.parametrize("lengths", [False, True])
def test_what_bls_and_ensemble_always_send_is_taken(
    raw: triton_grpc.InferenceServerClient, client: Client, lengths: bool
) -> None:
    """triton_decoder.py, _get_tensors_from_preproc; ensemble/config.pbtxt, input_map."""
    prepared = infer(raw, "preprocessing", upstream.preprocessing_inputs([PROMPTS[0]], TOKENS))
    tensors = upstream.engine_inputs_of_bls(prepared, TOKENS, lengths=lengths)
    tensors["embedding_bias"] = np.zeros((1, 258), dtype=np.float32)
    output = infer(raw, "tensorrt_llm", tensors).as_numpy("output_ids")[0][0].tolist()
    expected = client.generate(PROMPTS[0], max_tokens=TOKENS, num_draft_tokens=0)
    assert tuple(output[prepared.as_numpy("INPUT_ID").size :]) == expected.token_ids


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decoder_input_ids", int32([5, 6])),
        ("decoder_input_ids", int32([5])),  # one token, and not the pad_id
        ("decoder_input_lengths", int32([2])),
        ("embedding_bias", np.eye(1, 258, 7, dtype=np.float32)),
        ("prompt_table_extra_ids", np.array([[0, 1]], dtype=np.uint64)),
    ],
)
def test_the_same_inputs_are_refused_where_they_say_something(
    raw: triton_grpc.InferenceServerClient, name: str, value: Any
) -> None:
    tensors = upstream.core_inputs([256, 100], 2, end_id=257, pad_id=257)
    with pytest.raises(InferenceServerException, match=f"{name} is not served"):
        infer(raw, "tensorrt_llm", {**tensors, name: value})


# Greedy by default


@pytest.mark.parametrize("model", MODELS)
def test_temperature_one_alone_is_greedy(
    tiny_bls_server: TritonServer, client: Client, model: str
) -> None:
    """The default of end_to_end_grpc_client.py, whose --check-outputs expects one text: without
    top_k and top_p the engines decode greedily.
    """
    for prompt in PROMPTS[:3]:
        text, _ = upstream.end_to_end(tiny_bls_server.grpc_url, model, prompt, TOKENS)
        assert text == prompt + greedy(client, prompt)


@pytest.mark.parametrize("top_k", [0, 1])
def test_top_k_and_top_p_of_zero_are_greedy(
    raw: triton_grpc.InferenceServerClient,
    tiny_bls_server: TritonServer,
    client: Client,
    top_k: int,
) -> None:
    """inflight_batcher_llm_client.py sends top_k 1 and top_p 0.0 by default: a top_p <= 0 counts as
    absent (src/utils.cc, getSamplingConfigFromTensors).
    """
    expected = client.generate(PROMPTS[1], max_tokens=TOKENS, num_draft_tokens=0)
    prepared = infer(raw, "preprocessing", upstream.preprocessing_inputs([PROMPTS[1]], TOKENS))
    ids = prepared.as_numpy("INPUT_ID")[0].tolist()
    tensors = upstream.core_inputs(ids, TOKENS, end_id=257, pad_id=257)
    tensors["runtime_top_k"] = int32([top_k])
    result = infer(raw, "tensorrt_llm", tensors, parameters={"Streaming": False})
    assert tuple(result.as_numpy("output_ids")[0][0][len(ids) :]) == expected.token_ids
    text, _ = upstream.end_to_end(
        tiny_bls_server.grpc_url,
        "tensorrt_llm_bls",
        PROMPTS[1],
        TOKENS,
        drafts=MAX_DRAFT_LEN,
        top_k=int32([top_k]),
        top_p=np.array([[0.0]], dtype=np.float32),
    )
    assert text == PROMPTS[1] + expected.text


def test_top_p_of_zero_is_greedy_in_llmapi(tiny_server: TritonServer) -> None:
    """tensorrt_llm/sampling_params.py, params_imply_greedy_decoding."""
    body = {"text_input": PROMPTS[1], "sampling_param_max_tokens": TOKENS}
    expected = post(tiny_server, "tensorrt_llm/generate", body)["text_output"]
    sampled = {**body, "sampling_param_temperature": 1.0, "sampling_param_seed": 3}
    filters = {"sampling_param_top_k": 0, "sampling_param_top_p": 0.0}
    answer = post(tiny_server, "tensorrt_llm/generate", {**sampled, **filters})
    assert answer["text_output"] == expected
    # And temperature alone samples there.
    assert post(tiny_server, "tensorrt_llm/generate", sampled)["text_output"] != expected


def test_our_client_samples_in_both_layouts_when_it_states_a_temperature(client: Client) -> None:
    plain = client.generate(PROMPTS[2], max_tokens=TOKENS)
    sampled = client.generate(PROMPTS[2], max_tokens=TOKENS, temperature=1.3, seed=5)
    assert sampled.token_ids != plain.token_ids


# The end token


def test_output_ids_never_hold_the_end_token(
    raw: triton_grpc.InferenceServerClient, client: Client
) -> None:
    """e2e_grpc_speculative_decoding_client.py: "early stopping" is a call that adds nothing."""
    end_id, position = first_end(client, PROMPTS[3])
    prepared = infer(raw, "preprocessing", upstream.preprocessing_inputs([PROMPTS[3]], TOKENS))
    ids = prepared.as_numpy("INPUT_ID")[0].tolist()
    tensors = upstream.core_inputs(ids, TOKENS, end_id=end_id, pad_id=end_id)
    more = {name: np.array([[True]]) for name in ("return_log_probs", "return_generation_logits")}
    count = {"return_num_output_tokens": np.array([[True]])}
    result = infer(raw, "tensorrt_llm", {**tensors, **more, **count})
    output = result.as_numpy("output_ids")[0][0].tolist()
    assert len(output) == result.as_numpy("sequence_length")[0][0] == len(ids) + position
    assert end_id not in output[len(ids) :]
    assert result.as_numpy("output_log_probs").shape == (1, 1, position)
    assert result.as_numpy("generation_logits").shape == (1, 1, position, 258)
    assert result.as_numpy("num_output_tokens")[0][0] == position
    # Called again with its own output, the engine adds nothing.
    again = upstream.core_inputs(output, 1, end_id=end_id, pad_id=end_id)
    assert infer(raw, "tensorrt_llm", again).as_numpy("output_ids")[0][0].tolist() == output


@pytest.mark.parametrize("num_draft_tokens", [1, MAX_DRAFT_LEN])
def test_the_loop_of_the_speculative_client_ends_at_the_end_token(
    raw: triton_grpc.InferenceServerClient, client: Client, num_draft_tokens: int
) -> None:
    for prompt in PROMPTS[:4]:
        end_id, position = first_end(client, prompt)
        # The draft "model" is the target itself, so that drafts are accepted up to the end.
        for draft_model in ("tensorrt_llm_draft", "tensorrt_llm"):
            text, ids = upstream.speculative(
                raw,
                prompt,
                TOKENS,
                draft_model=draft_model,
                num_draft_tokens=num_draft_tokens,
                end_id=end_id,
            )
            assert end_id not in ids[-position:]
            assert len(ids) == 1 + len(prompt) + position
        whole, _ = upstream.speculative(raw, prompt, TOKENS, draft_model="tensorrt_llm_draft")
        assert whole == prompt + greedy(client, prompt)
        assert whole.startswith(text)


@pytest.mark.parametrize("drafts", [0, MAX_DRAFT_LEN])
def test_our_bls_still_counts_the_end_token(
    raw: triton_grpc.InferenceServerClient,
    tiny_bls_server: TritonServer,
    client: Client,
    drafts: int,
) -> None:
    """As `llmapi` does, so that what is judged is the same in both layouts."""
    end_id, position = first_end(client, PROMPTS[3])
    ids = client.generate(PROMPTS[3], max_tokens=TOKENS, num_draft_tokens=0).token_ids
    tensors = {
        "text_input": np.array([[PROMPTS[3]]]).astype(object),
        "max_tokens": int32([TOKENS]),
        "end_id": int32([end_id]),
        "num_draft_tokens": int32([drafts]),
        "return_token_ids": np.array([[True]]),
        "return_finish_reason": np.array([[True]]),
    }
    names = ["text_output", "output_ids", "finish_reason"]
    (answer,) = upstream.streamed(tiny_bls_server.grpc_url, "tensorrt_llm_bls", tensors, names)
    assert tuple(answer.as_numpy("output_ids")[0]) == ids[: position + 1]
    assert answer.as_numpy("finish_reason")[0] == b"stop"


# Figures in every chunk


@pytest.mark.parametrize("drafts", [0, MAX_DRAFT_LEN])
def test_every_chunk_of_bls_has_its_figures(
    tiny_bls_server: TritonServer, client: Client, drafts: int
) -> None:
    """end_to_end_grpc_client.py indexes them in every response."""
    text, figures = upstream.end_to_end(
        tiny_bls_server.grpc_url,
        "tensorrt_llm_bls",
        PROMPTS[4],
        TOKENS,
        streaming=True,
        return_perf_metrics=True,
        num_draft_tokens=int32([drafts]),
    )
    assert text == greedy(client, PROMPTS[4])
    assert len(figures) > 1
    for earlier, later in itertools.pairwise(figures):
        assert earlier["total_draft_tokens"] <= later["total_draft_tokens"]
        assert earlier["last_token_time_ns"] <= later["last_token_time_ns"]
    assert figures[0]["acceptance_rate"] == 0.0  # nothing has been drafted
    assert bool(figures[-1]["total_draft_tokens"]) is bool(drafts)


def test_an_engine_call_without_drafts_has_an_acceptance_rate(
    tiny_bls_server: TritonServer,
) -> None:
    """SpecDecodingMetrics begin at 0 (src/model_instance_state.cc, fillTritonResponse)."""
    _, figures = upstream.end_to_end(
        tiny_bls_server.grpc_url, "ensemble", PROMPTS[4], 3, return_perf_metrics=True
    )
    assert [row["acceptance_rate"] for row in figures] == [0.0]


def test_every_chunk_of_llmapi_has_reasons_and_figures(tiny_server: TritonServer) -> None:
    """llmapi/tensorrt_llm/1/model.py, _create_response; tools/inflight_batcher_llm/
    end_to_end_test.py asserts that every finish_reason is not empty.
    """
    wanted = ("return_finish_reason", "return_stop_reason", "sampling_param_return_perf_metrics")
    tensors = {
        **upstream.llmapi(PROMPTS[5], TOKENS),
        **{name: np.array([True]) for name in ("streaming", *wanted)},
    }
    results = list(
        upstream.streamed(
            tiny_server.grpc_url,
            "tensorrt_llm",
            tensors,
            ["text_output", "finish_reason", "stop_reason", "acceptance_rate"],
        )
    )
    assert len(results) > 1
    reasons = [result.as_numpy("finish_reason")[0].decode() for result in results]
    assert reasons[:-1] == ["None"] * (len(results) - 1)
    assert reasons[-1] in ("stop", "length")
    for result in results:
        assert result.as_numpy("stop_reason")[0] == b"None"
        assert 0.0 <= result.as_numpy("acceptance_rate")[0] <= 1.0


# Cancelling


def test_a_stop_request_of_the_core_client_cancels_its_call(
    raw: triton_grpc.InferenceServerClient, client: Client
) -> None:
    """inflight_batcher_llm_client.py, --stop-after-ms; src/model_instance_state.cc,
    handleStopRequest: an id that is unknown is no error, and none at all is one.
    """
    answers: queue.Queue[Any] = queue.Queue()
    tensors = upstream.core_inputs([256, 100], MAX_SEQ_LEN - 3, end_id=-1, pad_id=257)
    raw.async_infer(
        "tensorrt_llm",
        upstream.tensor_inputs(tensors),
        request_id="core",
        callback=lambda result, error: answers.put(error or result),
        parameters={"Streaming": False},
    )
    infer(raw, "tensorrt_llm", upstream.stop_inputs(), "core", {"Streaming": False})
    answer = answers.get(timeout=60)
    if isinstance(answer, InferenceServerException):
        assert answer.status() == "StatusCode.CANCELLED"
    else:  # it was through before the stop came
        assert answer.as_numpy("output_ids").size == MAX_SEQ_LEN - 1
    infer(raw, "tensorrt_llm", upstream.stop_inputs(), "nobody")
    with pytest.raises(InferenceServerException, match="stop came without a request id"):
        infer(raw, "tensorrt_llm", upstream.stop_inputs())


def test_an_engine_model_ends_calls_that_are_late(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    repository = package_pair(tiny_pair, tmp_path, layout="bls", request_timeout_s=0.1)
    tensors = upstream.core_inputs([256, 100], MAX_SEQ_LEN - 3, end_id=-1, pad_id=257)
    with (
        TritonServer(repository.path) as server,
        triton_grpc.InferenceServerClient(server.grpc_url) as raw,
    ):
        with pytest.raises(InferenceServerException, match=r"deadline of 0\.1 s passed after"):
            infer(raw, "tensorrt_llm", tensors)
        short = upstream.core_inputs([256, 100], 2, end_id=-1, pad_id=257)
        assert infer(raw, "tensorrt_llm", short).as_numpy("output_ids").size == 4


def test_an_engine_model_ends_calls_whose_clients_hang_up(
    raw: triton_grpc.InferenceServerClient,
) -> None:
    """A hundred whole sequences over four slots take 25 times as long as four. A call behind them
    waits less than half of that if nobody waits for them any more: those that run end, and those
    that wait never begin.
    """
    answers: queue.Queue[Any] = queue.Queue()
    whole = upstream.tensor_inputs(
        upstream.core_inputs([256, 100], MAX_SEQ_LEN - 3, end_id=-1, pad_id=257)
    )

    def started(count: int) -> list[Any]:
        return [
            raw.async_infer("tensorrt_llm", whole, lambda result, error: answers.put(error))
            for _ in range(count)
        ]

    start = time.monotonic()
    started(MAX_BATCH_SIZE)
    assert [answers.get(timeout=60) for _ in range(MAX_BATCH_SIZE)] == [None] * MAX_BATCH_SIZE
    batch_s = time.monotonic() - start
    calls = started(100)
    time.sleep(batch_s / 4)  # Triton has handed them to the model
    for call in calls:
        call.cancel()
    start = time.monotonic()
    short = upstream.core_inputs([256, 100], 2, end_id=-1, pad_id=257)
    assert infer(raw, "tensorrt_llm", short).as_numpy("output_ids").size == 4
    waited_s = time.monotonic() - start
    assert waited_s < 12 * batch_s


def test_the_llmapi_client_is_served_and_stops(unary_server: TritonServer) -> None:
    """tools/llmapi_client.py and tools/tests/test_llmapi_cancel.py: a stop is answered with
    CANCELLED before, during and after the request.
    """
    answers: queue.Queue[Any] = queue.Queue()

    def send(client: triton_grpc.InferenceServerClient, tensors: upstream.Tensors) -> Any:
        client.async_infer(
            "tensorrt_llm",
            upstream.tensor_inputs(tensors),
            request_id="1",
            callback=lambda result, error: answers.put(error or result),
            parameters={"Streaming": False},
        )
        return answers.get(timeout=60)

    with triton_grpc.InferenceServerClient(unary_server.grpc_url) as client:
        texts = []
        for _ in range(2):
            stopped = send(client, upstream.llmapi_stop())
            assert isinstance(stopped, InferenceServerException)
            assert stopped.status() == "StatusCode.CANCELLED"
            result = send(client, upstream.llmapi(PROMPTS[6], TOKENS))
            texts.append(result.as_numpy("text_output")[0])
    assert texts[0] == texts[1]
    assert texts[0].startswith(PROMPTS[6].encode())


# Unary calls, documented curls


def test_http_inference_needs_a_model_that_is_not_decoupled(
    unary_server: TritonServer, tiny_server: TritonServer
) -> None:
    """tools/inflight_batcher_llm/end_to_end_test.py --test-llmapi calls `infer` over HTTP, which
    Triton refuses for decoupled models. `generate` serves both.
    """
    inputs = [
        triton_http.InferInput("text_input", [1], "BYTES"),
        triton_http.InferInput("sampling_param_max_tokens", [1], "INT32"),
    ]
    inputs[0].set_data_from_numpy(np.array([PROMPTS[7]], dtype=object))
    inputs[1].set_data_from_numpy(np.array([TOKENS], dtype=np.int32))
    body = {"text_input": PROMPTS[7], "sampling_param_max_tokens": TOKENS}
    with triton_http.InferenceServerClient(unary_server.http_url) as client:
        text = client.infer("tensorrt_llm", inputs).as_numpy("text_output")[0].decode()
    for server in (unary_server, tiny_server):
        assert post(server, "tensorrt_llm/generate", body)["text_output"] == text
    with (
        triton_http.InferenceServerClient(tiny_server.http_url) as client,
        pytest.raises(InferenceServerException, match="decoupled transaction policy"),
    ):
        client.infer("tensorrt_llm", inputs)


def test_the_documented_curls_are_answered(tiny_bls_server: TritonServer, client: Client) -> None:
    """docs of the engine flow (README.md of tensorrtllm_backend, `generate` and draft-target)."""
    body = {"text_input": PROMPTS[0], "max_tokens": 20, "bad_words": "", "stop_words": ""}
    expected = PROMPTS[0] + greedy(client, PROMPTS[0], 20)
    drafts = {"num_draft_tokens": 3, "use_draft_logits": False}
    for model, more in (("ensemble", {}), ("tensorrt_llm_bls", {}), ("tensorrt_llm_bls", drafts)):
        answer = post(tiny_bls_server, f"{model}/generate", {**body, **more})
        assert answer["text_output"] == expected
        assert answer["model_name"] == model


# Batches


def test_preprocessing_takes_several_prompts(raw: triton_grpc.InferenceServerClient) -> None:
    """preprocessing/1/model.py, _create_request and _to_word_list_format: padded on the right."""
    prompts = ["ab", "longer prompt", "c"]
    query = upstream.preprocessing_inputs(prompts, 9)
    query["STOP_WORDS_DICT"] = np.array([["x", "yz"], ["", ""], ["end", ""]]).astype(object)
    query["PAD_ID"] = int32([7], [7], [7])
    together = infer(raw, "preprocessing", query)
    longest = max(map(len, prompts)) + 1  # BOS
    assert together.as_numpy("INPUT_ID").shape == (3, longest)
    assert together.as_numpy("DECODER_INPUT_ID").tolist() == [[7]] * 3
    assert together.as_numpy("OUT_END_ID").tolist() == [[257]] * 3
    assert together.as_numpy("REQUEST_OUTPUT_LEN").tolist() == [[9]] * 3
    assert together.as_numpy("STOP_WORDS_IDS").tolist() == [
        [ids_of(raw, "xyz"), [1, 3, -1]],
        [[0, 0, 0], [-1, -1, -1]],
        [ids_of(raw, "end"), [3, -1, -1]],
    ]
    for row, prompt in enumerate(prompts):
        alone = infer(raw, "preprocessing", upstream.preprocessing_inputs([prompt], 9))
        length = together.as_numpy("REQUEST_INPUT_LEN")[row][0]
        assert length == alone.as_numpy("REQUEST_INPUT_LEN")[0][0] == len(prompt) + 1
        ids = together.as_numpy("INPUT_ID")[row].tolist()
        assert ids[:length] == alone.as_numpy("INPUT_ID")[0].tolist()
        assert ids[length:] == [7] * (longest - length)


def ids_of(client: triton_grpc.InferenceServerClient, word: str) -> list[int]:
    """Without BOS."""
    prepared = infer(client, "preprocessing", upstream.preprocessing_inputs([word], 1))
    ids: list[int] = prepared.as_numpy("INPUT_ID")[0].tolist()
    return ids[1:]


def bls_batch(prompts: Sequence[str], **more: Any) -> dict[str, Any]:
    return {
        "text_input": np.array([[prompt] for prompt in prompts]).astype(object),
        "max_tokens": int32(*[[TOKENS]] * len(prompts)),
        **more,
    }


def each(value: Any, count: int) -> Any:
    """A tensor [count, 1] with one value."""
    return np.array([[value]] * count)


@pytest.mark.parametrize("streaming", [False, True])
def test_bls_answers_several_prompts_under_their_batch_index(
    tiny_bls_server: TritonServer, client: Client, streaming: bool
) -> None:
    """lib/decode.py, decode: without drafts a batch goes to the engine, whose every response has
    the batch_index of its prompt (src/model_instance_state.cc, fillTritonResponse).
    """
    prompts = PROMPTS[:3]
    tokens = [TOKENS, 1, 9]
    tensors = bls_batch(
        prompts,
        max_tokens=int32(*[[count] for count in tokens]),
        stream=each(streaming, 3),
        exclude_input_in_output=each(True, 3),
        return_log_probs=each(True, 3),
        stop_words=np.array([["", ""], ["no such word", ""], ["", ""]]).astype(object),
    )
    names = ["text_output", "batch_index", "sequence_index", "output_log_probs"]
    results = list(upstream.streamed(tiny_bls_server.grpc_url, "tensorrt_llm_bls", tensors, names))
    texts = dict.fromkeys(range(3), "")
    for result in results:
        assert result.as_numpy("sequence_index").tolist() == [[0]]
        texts[int(result.as_numpy("batch_index")[0][0])] += result.as_numpy("text_output")[
            0
        ].decode()
    assert texts == {
        index: greedy(client, prompt, tokens[index]) for index, prompt in enumerate(prompts)
    }
    assert len(results) > 3 if streaming else len(results) == 3
    if not streaming:
        sizes = [result.as_numpy("output_log_probs").shape for result in results]
        assert sizes == [(1, 1, count) for count in tokens]


def test_a_prompt_of_a_batch_ends_at_its_own_stop_word(
    tiny_bls_server: TritonServer, client: Client
) -> None:
    """tensorrt_llm_bls/1/model.py, check_stop_words: the words of a prompt's own row."""
    prompts = PROMPTS[:2]
    texts = [greedy(client, prompt) for prompt in prompts]
    word = texts[1][3:6]
    tensors = bls_batch(
        prompts,
        stop_words=np.array([[""], [word]]).astype(object),
        exclude_input_in_output=each(True, 2),
    )
    first, second = upstream.streamed(
        tiny_bls_server.grpc_url, "tensorrt_llm_bls", tensors, ["text_output"]
    )
    assert first.as_numpy("text_output")[0].decode() == texts[0]
    assert second.as_numpy("text_output")[0].decode() == texts[1][: texts[1].index(word)]


@pytest.mark.parametrize(
    ("prompts", "more", "message"),
    [
        (PROMPTS[:2], {"num_draft_tokens": each(2, 2).astype(np.int32)}, "speculation takes one"),
        (("x", ""), {}, "text_input is empty"),
        (("x",) * 5, {}, "batch-size must be <= 4"),  # Triton's own words
    ],
)
def test_a_batch_that_cannot_be_served_is_refused_as_a_whole(
    tiny_bls_server: TritonServer,
    prompts: Sequence[str],
    more: dict[str, Any],
    message: str,
) -> None:
    """lib/decode.py, decode: "speculative decoding is not supported with batch size > 1"."""
    tensors = bls_batch(prompts, **more)
    with pytest.raises(InferenceServerException, match=message):
        list(
            upstream.streamed(
                tiny_bls_server.grpc_url, "tensorrt_llm_bls", tensors, ["text_output"]
            )
        )


def test_a_batch_without_drafts_may_say_so(tiny_bls_server: TritonServer) -> None:
    tensors = bls_batch(PROMPTS[:2], num_draft_tokens=int32([0], [0]))
    results = upstream.streamed(
        tiny_bls_server.grpc_url, "tensorrt_llm_bls", tensors, ["text_output"]
    )
    assert len(list(results)) == 2


def test_requests_that_wait_are_not_put_into_one_batch(tiny_bls_server: TritonServer) -> None:
    """One BLS instance serves one request at a time; a second one must stay in Triton's queue."""

    def counts() -> tuple[float, float]:
        counters = read_counters(tiny_bls_server.metrics_url, "tensorrt_llm_bls")
        return counters["nv_inference_count"], counters["nv_inference_exec_count"]

    before = counts()
    while (settled := counts()) != before:  # Triton counts a request a little after its answer
        before = settled
        time.sleep(0.2)
    done: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(tiny_bls_server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: done.put(error or result))
        for prompt in PROMPTS * 3:
            client.async_stream_infer(
                "tensorrt_llm_bls", upstream.tensor_inputs(bls_batch([prompt]))
            )
        for _ in PROMPTS * 3:
            assert not isinstance(done.get(timeout=60), Exception)
        client.stop_stream()
    deadline = time.monotonic() + 10
    while counts()[0] - before[0] < len(PROMPTS) * 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    after = counts()
    assert after[0] - before[0] == after[1] - before[1] == len(PROMPTS) * 3


def test_a_batch_for_a_bls_that_is_not_decoupled_is_refused(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """tensorrt_llm_bls/1/model.py, execute: it ends in an assertion, since there are as many
    responses as prompts.
    """
    repository = package_pair(tiny_pair, tmp_path, layout="bls", decoupled=False)
    with (
        TritonServer(repository.path) as server,
        triton_grpc.InferenceServerClient(server.grpc_url) as client,
    ):
        with pytest.raises(InferenceServerException, match=r"2 prompts, .*not decoupled"):
            infer(client, "tensorrt_llm_bls", bls_batch(PROMPTS[:2]))
        assert infer(client, "tensorrt_llm_bls", bls_batch(PROMPTS[:1])).as_numpy("text_output")


@pytest.mark.parametrize("prompts", [["ab", "cd"]])
def test_llmapi_takes_one_prompt(tiny_server: TritonServer, prompts: list[str]) -> None:
    """llmapi/tensorrt_llm/1/model.py, _convert_request: a one-dimensional text_input, of which it
    reads the first prompt. Here the others are not dropped in silence.
    """
    tensors = {**upstream.llmapi("", 3), "text_input": np.array(prompts, dtype=object)}
    with pytest.raises(InferenceServerException, match="one prompt, and 2 were sent"):
        list(upstream.streamed(tiny_server.grpc_url, "tensorrt_llm", tensors, ["text_output"]))


def test_an_ensemble_over_an_engine_that_is_not_decoupled_takes_one_prompt(
    raw: triton_grpc.InferenceServerClient,
) -> None:
    """Its engine refuses, as in the next test."""
    with pytest.raises(InferenceServerException, match=r"2 sequences, .*not decoupled"):
        infer(raw, "ensemble", bls_batch(PROMPTS[:2]))


def test_an_engine_that_is_not_decoupled_takes_one_sequence(
    raw: triton_grpc.InferenceServerClient,
) -> None:
    """src/utils.cc, createRequestsFromInputTensors: "Batch size > 1 requires ... decoupled"."""
    prepared = infer(raw, "preprocessing", upstream.preprocessing_inputs(["ab", "cd"], 4))
    tensors = {
        "input_ids": prepared.as_numpy("INPUT_ID"),
        "input_lengths": prepared.as_numpy("REQUEST_INPUT_LEN"),
        "request_output_len": prepared.as_numpy("REQUEST_OUTPUT_LEN"),
    }
    with pytest.raises(InferenceServerException, match=r"2 sequences, .*not decoupled"):
        infer(raw, "tensorrt_llm", tensors)


# The ensemble


def test_the_ensemble_gives_what_its_models_give_one_after_the_other(
    raw: triton_grpc.InferenceServerClient, tiny_bls_server: TritonServer
) -> None:
    """tools/inflight_batcher_llm/end_to_end_test.py, test_functionality_ifb."""
    no_words = np.array([[""]], dtype=object)
    for prompt in PROMPTS[:3]:
        query = upstream.preprocessing_inputs([prompt], TOKENS)
        words = {"BAD_WORDS_DICT": no_words, "STOP_WORDS_DICT": no_words}
        prepared = infer(raw, "preprocessing", {**query, **words})
        tensors = {
            "input_ids": prepared.as_numpy("INPUT_ID"),
            "decoder_input_ids": prepared.as_numpy("DECODER_INPUT_ID"),
            "input_lengths": prepared.as_numpy("REQUEST_INPUT_LEN"),
            "request_output_len": prepared.as_numpy("REQUEST_OUTPUT_LEN"),
            "end_id": prepared.as_numpy("OUT_END_ID"),
            "pad_id": prepared.as_numpy("OUT_PAD_ID"),
            "return_log_probs": np.array([[True]]),
        }
        result = infer(raw, "tensorrt_llm", tensors)
        rows = {
            "TOKENS_BATCH": result.as_numpy("output_ids"),
            "SEQUENCE_LENGTH": result.as_numpy("sequence_length"),
        }
        text = infer(raw, "postprocessing", rows).as_numpy("OUTPUT")
        inputs = {
            "text_input": np.array([[prompt]]).astype(object),
            "max_tokens": int32([TOKENS]),
            "bad_words": no_words,
            "stop_words": no_words,
            "return_log_probs": np.array([[True]]),
        }
        together = infer(raw, "ensemble", inputs)
        assert together.as_numpy("text_output") == text
        for name in ("cum_log_probs", "output_log_probs"):
            assert (together.as_numpy(name) == result.as_numpy(name)).all()


def test_the_ensemble_and_speculation_give_the_same_texts(
    tiny_bls_server: TritonServer,
) -> None:
    """tools/inflight_batcher_llm/speculative_decoding_test.py compares `ensemble`, its control,
    with `tensorrt_llm_bls`, with and without draft logits.
    """
    for prompt in PROMPTS:
        control, _ = upstream.end_to_end(tiny_bls_server.grpc_url, "ensemble", prompt, TOKENS)
        for use_draft_logits in (False, True):
            text, figures = upstream.end_to_end(
                tiny_bls_server.grpc_url,
                "tensorrt_llm_bls",
                prompt,
                TOKENS,
                drafts=MAX_DRAFT_LEN,
                use_draft_logits=use_draft_logits,
                return_perf_metrics=True,
            )
            assert text == control
            assert figures[-1]["total_draft_tokens"] > 0
