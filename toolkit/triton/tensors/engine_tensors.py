"""The embedded engine with the tensors of TensorRT-LLM's Triton backend: request arrays become a
call, and the call's outputs become arrays.

Tensors mean what they mean in TensorRT-LLM, with two exceptions: a KV-cache block is one token
here, and draft_logits make the target judge by speculative sampling. A request for something that
the embedded engine cannot do is refused by name. What TensorRT-LLM's own BLS and ensemble send with
every request is not such a thing, as long as it says nothing (`_is_neutral`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import RequestError
from toolkit.interfaces import MAX_PENALTY, Sampling
from toolkit.triton.tensors.engine_sampling import read_sampling
from toolkit.triton.tensors.size_limits import check_stop_ids, check_words
from toolkit.triton.tensors.word_lists import unpack
from toolkit.words import FinishReason

__all__ = ["EngineRequest", "arrays_of", "parse_engine", "visible_tokens"]

Array = NDArray[Any]
SERVED_TENSORS = {
    "input_ids",
    "input_lengths",
    "request_output_len",
    "draft_input_ids",
    "draft_logits",
    "end_id",
    "pad_id",
    "stop_words_list",
    "temperature",
    "runtime_top_k",
    "runtime_top_p",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "seed",
    "return_log_probs",
    "return_generation_logits",
    "return_perf_metrics",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_end_token",
    "slot_owner",
    "cache_salt",
    "exclude_input_in_output",
    "stop",
    "streaming",
}
# Other tensors may be sent only with a value that changes nothing.
NEUTRAL_VALUES = {
    "beam_width": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1.0,),
    "len_penalty": (0.0, 1.0),
    "early_stopping": (False,),
    "beam_search_diversity_rate": (0.0,),
    "return_context_logits": (False,),
    "runtime_top_p_min": (0.0,),
    "runtime_top_p_decay": (1.0,),
    "embedding_bias": (0.0,),
    "prompt_table_extra_ids": (0,),
    "decoder_input_lengths": (1,),
}


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One parsed request. draft_logits [k, vocab]. with_input: the output begins with the input.
    cancels: the request does not run; it cancels the one with the same id, or releases the slot of
    its owner. owner, cache_salt: as in `Call`.
    """

    ids: tuple[int, ...]
    max_tokens: int
    drafts: tuple[int, ...] = ()
    draft_logits: Array | None = None
    sampling: Sampling = field(default_factory=Sampling)
    end_ids: frozenset[int] = frozenset()
    stop_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    streaming: bool = False
    with_input: bool = True
    returns: frozenset[str] = frozenset()
    cancels: bool = False
    owner: str = ""
    cache_salt: str = ""


def parse_engine(arrays: Mapping[str, Array], *, decoupled: bool) -> EngineRequest:
    """Check one request of batch 1. Raises RequestError."""
    for name in arrays:
        if name not in SERVED_TENSORS and not _is_neutral(name, arrays):
            raise RequestError(f"{name} is not served by the embedded engine", hint="Leave it out.")
    owner, cache_salt = _word(arrays, "slot_owner"), _word(arrays, "cache_salt")
    if _single_value(arrays, "stop", False):
        return EngineRequest((), 0, cancels=True, owner=owner)
    ids = _ids(arrays, "input_ids")
    stated = int(_single_value(arrays, "input_lengths", len(ids)))
    if not 0 < stated <= len(ids):
        raise RequestError(f"input_lengths is {stated}, and input_ids holds {len(ids)} tokens")
    streaming = bool(_single_value(arrays, "streaming", False))
    if streaming and not decoupled:
        raise RequestError(
            "streaming needs a decoupled model, and this one is not", hint="Send streaming=false."
        )
    drafts = _ids(arrays, "draft_input_ids")
    logits = arrays.get("draft_logits")
    if logits is not None:
        logits = logits.reshape(-1, logits.shape[-1])
    end_id = int(_single_value(arrays, "end_id", -1))
    end_ids = () if end_id < 0 else (end_id,)
    if "stop_words_list" in arrays:
        check_stop_ids(arrays["stop_words_list"].size // 2, "stop_words_list")
    try:
        stop_words = unpack(_rows(arrays["stop_words_list"])) if "stop_words_list" in arrays else ()
    except ValueError as error:
        raise RequestError(f"stop_words_list is malformed: {error}") from error
    return EngineRequest(
        ids=ids[:stated],
        max_tokens=int(_single_value(arrays, "request_output_len", 0)),
        drafts=drafts,
        draft_logits=logits if drafts else None,
        sampling=_sampling(arrays),
        end_ids=frozenset(end_ids),
        stop_words=stop_words,
        min_tokens=int(_single_value(arrays, "min_tokens", 0)),
        streaming=streaming,
        owner=owner,
        cache_salt=cache_salt,
        with_input=not _single_value(arrays, "exclude_input_in_output", False),
        returns=frozenset(
            name
            for name in arrays
            if name.startswith("return_") and _single_value(arrays, name, False)
        ),
    )


def _is_neutral(name: str, arrays: Mapping[str, Array]) -> bool:
    """Whether a tensor that is not served changes nothing."""
    values = arrays[name].reshape(-1).tolist()
    if name == "decoder_input_ids":
        # What preprocessing returns without a DECODER_QUERY: one pad_id. A decoder-only engine does
        # not read it (TRT triton_backend/inflight_batcher_llm/src/utils.cc).
        pad_ids = arrays["pad_id"].reshape(-1).tolist() if "pad_id" in arrays else []
        return not values or values == pad_ids
    if name.endswith("_words_list"):
        return not values or not unpack(_rows(arrays[name]))
    return all(value in NEUTRAL_VALUES.get(name, ()) for value in values)


def _sampling(arrays: Mapping[str, Array]) -> Sampling:
    top_k = int(_single_value(arrays, "runtime_top_k", 0))
    top_p = float(_single_value(arrays, "runtime_top_p", 0.0))
    temperature = float(_single_value(arrays, "temperature", 1.0))
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise RequestError(f"temperature is {temperature}; it has to be 0 (greedy) or more")
    if top_k < 0 or not top_p <= 1.0:
        raise RequestError(
            f"runtime_top_k is {top_k} and runtime_top_p {top_p}; runtime_top_k has to be 0 (off)"
            " or more, and runtime_top_p at most 1"
        )
    temperature, top_p = read_sampling(temperature, top_k, top_p)
    seed = int(_single_value(arrays, "seed", 0)) if "seed" in arrays else None
    return Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        frequency_penalty=_penalty(arrays, "frequency_penalty"),
        presence_penalty=_penalty(arrays, "presence_penalty"),
        seed=seed,
    )


def _penalty(arrays: Mapping[str, Array], name: str) -> float:
    value = float(_single_value(arrays, name, 0.0))
    if not abs(value) <= MAX_PENALTY:
        raise RequestError(f"{name} is {value}; it has to be from {-MAX_PENALTY} to {MAX_PENALTY}")
    return value


def visible_tokens(
    request: EngineRequest, ids: Sequence[int], finish_reason: FinishReason | None
) -> int:
    """How many of the tokens that a step added belong in output_ids. The end token does not, in
    TensorRT-LLM: its clients end their loops when a call adds nothing
    (e2e_grpc_speculative_decoding_client.py). Our BLS model asks for it by return_end_token.
    """
    ended = finish_reason == "stop" and bool(ids) and ids[-1] in request.end_ids
    return len(ids) - (ended and "return_end_token" not in request.returns)


def arrays_of(
    request: EngineRequest,
    new: Sequence[int],
    *,
    log_probs: Sequence[float],
    logits: Sequence[Array],
    figures: Mapping[str, int | float | None],
) -> dict[str, Array]:
    """The arrays of one response. A streamed response holds only new tokens. Others begin with the
    input, unless the request excluded it.
    """
    ids = [*request.ids, *new] if request.with_input and not request.streaming else list(new)
    arrays: dict[str, Array] = {
        "output_ids": np.array([[ids]], dtype=np.int32),
        "sequence_length": np.array([[len(ids)]], dtype=np.int32),
        "batch_index": np.array([[0]], dtype=np.int32),
        "sequence_index": np.array([[0]], dtype=np.int32),
    }
    if "return_log_probs" in request.returns:
        arrays["output_log_probs"] = np.array([[list(log_probs)]], dtype=np.float32)
        arrays["cum_log_probs"] = np.array([[sum(log_probs)]], dtype=np.float32)
    if "return_generation_logits" in request.returns and logits:
        arrays["generation_logits"] = np.stack(logits)[None, None].astype(np.float32)
    for name, value in figures.items():
        if value is not None:
            arrays[name] = np.array([[value]], dtype=_figure_type(name, value))
    return arrays


def _figure_type(name: str, value: int | float) -> Any:
    if isinstance(value, float):
        return np.float32
    return np.int64 if name.endswith("_ns") else np.int32


def _single_value(arrays: Mapping[str, Array], name: str, default: Any) -> Any:
    if name not in arrays:
        return default
    if arrays[name].size != 1:
        raise RequestError(
            f"{name} takes one value, and {arrays[name].size} were sent",
            hint="Send one sequence per request.",
        )
    return arrays[name].reshape(-1)[0].item()


def _word(arrays: Mapping[str, Array], name: str) -> str:
    values = arrays[name].reshape(-1).tolist() if name in arrays else [b""]
    if len(values) != 1:
        raise RequestError(f"{name} takes one value, and {len(values)} were sent")
    check_words(values, name)
    try:
        return bytes(values[0]).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not valid UTF-8") from error


def _ids(arrays: Mapping[str, Array], name: str) -> tuple[int, ...]:
    array = arrays.get(name)
    if array is None:
        return ()
    if array.ndim > 1 and array.shape[0] != 1:
        raise RequestError(
            f"{name} holds {array.shape[0]} sequences, and this engine, which is not decoupled,"
            " takes one",
            hint="Send one sequence per request.",
        )
    return tuple(int(token) for token in array.reshape(-1))


def _rows(array: Array) -> list[list[int]]:
    rows: list[list[int]] = array.reshape(2, -1).tolist()
    return rows
