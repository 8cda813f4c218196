"""The embedded engine behind the tensors of TensorRT-LLM's Triton backend: a request's arrays -> a
call, its outputs -> arrays.

The meaning of a tensor is TensorRT-LLM's own. Two of its words are read in our way: a KV-cache
block is one token here, and draft_logits are judged by speculative sampling. What the embedded
engine cannot do is refused by name.
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
from toolkit.triton.tensors.word_lists import unpack

__all__ = ["EngineRequest", "arrays_of", "parse_engine"]

Array = NDArray[Any]
UNDERSTOOD = {
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
    "exclude_input_in_output",
    "stop",
    "streaming",
}
# Tensors that may be sent with the value that changes nothing.
NEUTRAL = {
    "beam_width": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1.0,),
    "len_penalty": (0.0, 1.0),
    "early_stopping": (False,),
    "beam_search_diversity_rate": (0.0,),
    "return_context_logits": (False,),
    "runtime_top_p_min": (0.0,),
    "runtime_top_p_decay": (1.0,),
}


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """cancels: the request is not to be run, it cancels the one with the same id. draft_logits
    [k, vocab].
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


def parse_engine(arrays: Mapping[str, Array], *, decoupled: bool) -> EngineRequest:
    """Check one request of batch 1. Raises RequestError with what is wrong."""
    for name, array in arrays.items():
        neutral = name in NEUTRAL and all(
            value in NEUTRAL[name] for value in array.reshape(-1).tolist()
        )
        empty = array.size == 0 or (name.endswith("_words_list") and not unpack(_rows(array)))
        if name not in UNDERSTOOD and not neutral and not empty:
            raise RequestError(f"{name} is not served by the embedded engine", hint="Leave it out.")
    if _one(arrays, "stop", False):
        return EngineRequest((), 0, cancels=True)
    ids = _ids(arrays, "input_ids")
    stated = int(_one(arrays, "input_lengths", len(ids)))
    if not 0 < stated <= len(ids):
        raise RequestError(f"input_lengths is {stated}, and input_ids holds {len(ids)} tokens")
    streaming = bool(_one(arrays, "streaming", False))
    if streaming and not decoupled:
        raise RequestError(
            "streaming needs a decoupled model, and this one is not", hint="Send streaming=false."
        )
    drafts = _ids(arrays, "draft_input_ids")
    logits = arrays.get("draft_logits")
    if logits is not None:
        logits = logits.reshape(-1, logits.shape[-1])
    end_id = int(_one(arrays, "end_id", -1))
    try:
        stop_words = unpack(_rows(arrays["stop_words_list"])) if "stop_words_list" in arrays else ()
    except ValueError as error:
        raise RequestError(f"stop_words_list is malformed: {error}") from error
    return EngineRequest(
        ids=ids[:stated],
        max_tokens=int(_one(arrays, "request_output_len", 0)),
        drafts=drafts,
        draft_logits=logits if drafts else None,
        sampling=_sampling(arrays),
        end_ids=frozenset(() if end_id < 0 else (end_id,)),
        stop_words=stop_words,
        min_tokens=int(_one(arrays, "min_tokens", 0)),
        streaming=streaming,
        with_input=not _one(arrays, "exclude_input_in_output", False),
        returns=frozenset(
            name for name in arrays if name.startswith("return_") and _one(arrays, name, False)
        ),
    )


def _sampling(arrays: Mapping[str, Array]) -> Sampling:
    """Greedy with top_k 1, temperature 0, or nothing said; a top_p of 0 or less is off: all as
    in TensorRT-LLM.
    """
    top_k, top_p = int(_one(arrays, "runtime_top_k", 0)), float(_one(arrays, "runtime_top_p", 0.0))
    stated = any(name in arrays for name in ("runtime_top_k", "runtime_top_p", "temperature"))
    temperature = float(_one(arrays, "temperature", 1.0)) if stated and top_k != 1 else 0.0
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise RequestError(f"temperature is {temperature}; it has to be 0 (greedy) or more")
    if top_k < 0 or not top_p <= 1.0:
        raise RequestError(
            f"runtime_top_k is {top_k} and runtime_top_p {top_p}; at least 0 (off), and at most 1"
        )
    return Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p if top_p > 0.0 else 1.0,
        frequency_penalty=_penalty(arrays, "frequency_penalty"),
        presence_penalty=_penalty(arrays, "presence_penalty"),
        seed=int(_one(arrays, "seed", 0)) if "seed" in arrays else None,
    )


def _penalty(arrays: Mapping[str, Array], name: str) -> float:
    value = float(_one(arrays, name, 0.0))
    if not abs(value) <= MAX_PENALTY:
        raise RequestError(f"{name} is {value}; it has to be from {-MAX_PENALTY} to {MAX_PENALTY}")
    return value


def arrays_of(
    request: EngineRequest,
    new: Sequence[int],
    *,
    log_probs: Sequence[float],
    logits: Sequence[Array],
    figures: Mapping[str, int | float | None],
) -> dict[str, Array]:
    """One response. Streamed ones hold what is new; others begin with the input unless it was to
    be left out.
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
    if "return_generation_logits" in request.returns:
        arrays["generation_logits"] = np.stack(logits)[None, None].astype(np.float32)
    for name, value in figures.items():
        if value is not None:
            dtype = (
                np.float32
                if isinstance(value, float)
                else np.int64
                if name.endswith("_ns")
                else np.int32
            )
            arrays[name] = np.array([[value]], dtype=dtype)
    return arrays


def _one(arrays: Mapping[str, Array], name: str, default: Any) -> Any:
    if name not in arrays:
        return default
    if arrays[name].size != 1:
        raise RequestError(
            f"{name} holds one value, {arrays[name].size} were sent",
            hint="Send one sequence per request.",
        )
    return arrays[name].reshape(-1)[0].item()


def _ids(arrays: Mapping[str, Array], name: str) -> tuple[int, ...]:
    array = arrays.get(name)
    if array is None:
        return ()
    if array.ndim > 1 and array.shape[0] != 1:
        raise RequestError(
            f"{name} holds {array.shape[0]} sequences", hint="Send one sequence per request."
        )
    return tuple(int(each) for each in array.reshape(-1))


def _rows(array: Array) -> list[list[int]]:
    rows: list[list[int]] = array.reshape(2, -1).tolist()
    return rows
