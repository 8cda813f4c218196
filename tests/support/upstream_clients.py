"""What NVIDIA's clients of TensorRT-LLM's Triton templates send, and what they read of the answers.

Written from the published interface of NVIDIA/TensorRT-LLM, triton_backend/. Each function names
the client that it restates, and sends the tensors that this client sends by default, no more: that
is what a user of the templates has in production.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

__all__ = [
    "PERFORMANCE_OUTPUTS",
    "Tensors",
    "core_inputs",
    "end_to_end",
    "engine_inputs_of_bls",
    "infer",
    "int32",
    "llmapi",
    "llmapi_stop",
    "preprocessing_inputs",
    "speculative",
    "stop_inputs",
    "streamed",
    "tensor_inputs",
]

Tensors = Mapping[str, Any]
PERFORMANCE_OUTPUTS = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)


def int32(*rows: Sequence[int]) -> Any:
    return np.array(rows, dtype=np.int32)


def tensor_inputs(tensors: Tensors) -> list[Any]:
    inputs = []
    for name, value in tensors.items():
        array = np.asarray(value)
        inputs.append(triton_grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def infer(
    client: triton_grpc.InferenceServerClient,
    model: str,
    tensors: Tensors,
    request_id: str = "",
    parameters: dict[str, Any] | None = None,
) -> Any:
    """A unary call, as all of these clients make but for streams. Models that are decoupled refuse
    it.
    """
    return client.infer(model, tensor_inputs(tensors), request_id=request_id, parameters=parameters)


# inflight_batcher_llm/client/inflight_batcher_llm_client.py: the engine model alone


def core_inputs(ids: Sequence[int], tokens: int, *, end_id: int, pad_id: int) -> dict[str, Any]:
    return {
        "input_ids": int32(ids),
        "input_lengths": int32([len(ids)]),
        "request_output_len": int32([tokens]),
        "beam_width": int32([1]),
        "temperature": np.array([[1.0]], dtype=np.float32),
        "streaming": np.array([[False]]),
        "end_id": int32([end_id]),
        "pad_id": int32([pad_id]),
        "runtime_top_k": int32([1]),
        "runtime_top_p": np.array([[0.0]], dtype=np.float32),
    }


def stop_inputs() -> dict[str, Any]:
    """prepare_stop_signals: the ids are whatever lies in memory."""
    return {
        "input_ids": np.empty([1, 1], dtype=np.int32),
        "input_lengths": np.zeros([1, 1], dtype=np.int32),
        "request_output_len": int32([0]),
        "stop": np.array([[True]]),
    }


# inflight_batcher_llm/client/end_to_end_grpc_client.py: `ensemble` or `tensorrt_llm_bls`


def end_to_end(
    url: str,
    model: str,
    prompt: str,
    tokens: int,
    *,
    streaming: bool = False,
    drafts: int = 0,
    use_draft_logits: bool | None = None,
    return_perf_metrics: bool = False,
    **more: Any,
) -> tuple[str, list[dict[str, Any]]]:
    """The text, and the figures of every response. drafts: --num-draft-tokens, which is sent if it
    is above 0. more: tensors of options that are off by default. Raises InferenceServerException,
    where the client prints it and goes on with no text.
    """
    tensors: dict[str, Any] = {
        "text_input": np.array([[prompt]]).astype(object),
        "max_tokens": int32([tokens]),
        "stream": np.array([[streaming]]),
        "beam_width": int32([1]),
        "temperature": np.array([[1.0]], dtype=np.float32),
        "exclude_input_in_output": np.array([[False]]),
    }
    if drafts > 0:
        tensors["num_draft_tokens"] = int32([drafts])
    if use_draft_logits is not None:
        tensors["use_draft_logits"] = np.array([[use_draft_logits]])
    names = ["text_output"]
    if return_perf_metrics:
        tensors["return_perf_metrics"] = np.array([[True]])
        names += PERFORMANCE_OUTPUTS
    text, figures = "", []
    for result in streamed(url, model, {**tensors, **more}, names):
        new = result.as_numpy("text_output")[0].decode("utf-8")
        text = text + new if streaming else new
        if return_perf_metrics:
            # The client indexes these in every response.
            figures.append({name: result.as_numpy(name)[0][0] for name in PERFORMANCE_OUTPUTS})
    return text, figures


def streamed(url: str, model: str, tensors: Tensors, outputs: Sequence[str]) -> Iterator[Any]:
    answers: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(url) as client:
        client.start_stream(callback=partial(_put, answers))
        client.async_stream_infer(
            model,
            tensor_inputs(tensors),
            outputs=[triton_grpc.InferRequestedOutput(name) for name in outputs],
            request_id="",
        )
        client.stop_stream()
    while not answers.empty():
        answer = answers.get()
        if isinstance(answer, InferenceServerException):
            raise answer
        if answer.get_response().outputs:  # Triton ends some streams with an empty response
            yield answer


def _put(answers: queue.Queue[Any], result: Any, error: Any) -> None:
    answers.put(error or result)


# inflight_batcher_llm/client/e2e_grpc_speculative_decoding_client.py: a loop over the models


def preprocessing_inputs(prompts: Sequence[str], tokens: int) -> dict[str, Any]:
    return {
        "QUERY": np.array([[prompt] for prompt in prompts]).astype(object),
        "REQUEST_OUTPUT_LEN": int32(*[[tokens]] * len(prompts)),
    }


def speculative(
    client: triton_grpc.InferenceServerClient,
    prompt: str,
    tokens: int,
    *,
    draft_model: str,
    num_draft_tokens: int = 5,
    end_id: int | None = None,
    max_rounds: int = 100,
) -> tuple[str, list[int]]:
    """(text, ids), both with the prompt. It ends when the length is reached, when draft and target
    return the same, or when a round added nothing. It never looks for the end token, because the
    engines do not return it.
    """
    query = preprocessing_inputs([prompt], tokens)
    if end_id is not None:
        query["END_ID"] = int32([end_id])
    prepared = infer(client, "preprocessing", query, "1")
    prompt_ids = prepared.as_numpy("INPUT_ID")[0].tolist()
    shared = {
        "bad_words_list": prepared.as_numpy("BAD_WORDS_IDS"),
        "stop_words_list": prepared.as_numpy("STOP_WORDS_IDS"),
        "beam_width": int32([1]),
        "temperature": np.array([[1.0]], dtype=np.float32),
        "end_id": prepared.as_numpy("OUT_END_ID"),
        "pad_id": prepared.as_numpy("OUT_PAD_ID"),
    }

    def call(model: str, ids: list[int], count: int, **more: Any) -> list[int]:
        tensors = {
            "input_ids": int32(ids),
            "input_lengths": int32([len(ids)]),
            "request_output_len": int32([count]),
            **shared,
            **more,
        }
        result = infer(client, model, tensors, "1")
        output: list[int] = result.as_numpy("output_ids")[0][0].tolist()
        assert result.as_numpy("sequence_length")[0, 0] == len(output)
        return output

    ids, draft_output = prompt_ids, None
    for _ in range(max_rounds):
        room = min(num_draft_tokens, len(prompt_ids) + tokens - len(ids) - 1)
        drafts: dict[str, Any] = {}
        if room > 0:
            draft_output = call(draft_model, ids, room)
            if draft_output[len(ids) :]:
                drafts = {"draft_input_ids": int32(draft_output[len(ids) :])}
        count = drafts["draft_input_ids"].size + 1 if drafts else 1
        before, ids = ids, call("tensorrt_llm", ids, count, **drafts)
        if len(ids) >= len(prompt_ids) + tokens or ids in (draft_output, before):
            break
    else:
        raise AssertionError(f"the loop did not end in {max_rounds} rounds: {len(ids)} ids")
    rows = {"TOKENS_BATCH": np.array([[ids]], dtype=np.int32), "SEQUENCE_LENGTH": int32([len(ids)])}
    text = infer(client, "postprocessing", rows, "1").as_numpy("OUTPUT")[0].decode("utf-8")
    return text, ids


# all_models/inflight_batcher_llm/tensorrt_llm_bls/1/lib/triton_decoder.py, _get_llm_tensors, and
# ensemble/config.pbtxt: what the engine gets of preprocessing


def engine_inputs_of_bls(prepared: Any, tokens: int, *, lengths: bool) -> dict[str, Any]:
    """lengths: also decoder_input_lengths, as the ensemble sends them."""
    names = {
        "input_ids": "INPUT_ID",
        "input_lengths": "REQUEST_INPUT_LEN",
        "decoder_input_ids": "DECODER_INPUT_ID",
        "bad_words_list": "BAD_WORDS_IDS",
        "stop_words_list": "STOP_WORDS_IDS",
        "embedding_bias": "EMBEDDING_BIAS",
        "pad_id": "OUT_PAD_ID",
        "end_id": "OUT_END_ID",
    }
    if lengths:
        names["decoder_input_lengths"] = "REQUEST_DECODER_INPUT_LEN"
    return {
        **{name: prepared.as_numpy(output) for name, output in names.items()},
        "request_output_len": int32([tokens]),
        "return_context_logits": np.array([[False]]),
        "return_generation_logits": np.array([[False]]),
    }


# tools/llmapi_client.py


def llmapi(prompt: str, tokens: int) -> dict[str, Any]:
    return {
        "text_input": np.array([prompt], dtype=object),
        "sampling_param_max_tokens": np.array([tokens], dtype=np.int32),
    }


def llmapi_stop() -> dict[str, Any]:
    return {"text_input": np.empty([1], dtype=np.bytes_), "stop": np.array([True])}
