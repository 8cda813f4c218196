"""What the BLS model understands: a client's tensors -> a request, and that request -> the tensors
of its calls and responses.

The tensors are TensorRT-LLM's own (`toolkit.facts.triton_tensors.BLS`) and a few of ours. What is
said here is said for every engine: the models behind may be TensorRT-LLM's backend or the embedded
engine. Pure: arrays in, arrays out.

How tokens are chosen at temperature > 0
- coupled: draft and target get the same seed, and the embedded engine keys its noise by (seed,
  position)
- rejection: the draft's logits go to the target, which judges the drafts by them; the draft draws
  with a seed of its own
- sample_match: seeds of their own, and no logits: a draft is kept while it equals what the target
  samples Log-probabilities come from the target's logits (log_probs = "logits") or from its own
  tensor ("engine"). A backend that starts its random numbers anew with every call (seeds = "call")
  gets another seed with every call: with one and the same, all rounds of a request would draw the
  same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import RequestError
from toolkit.interfaces import TokenEvent
from toolkit.triton.tensors.requests import Answer, Form, Limits, Request, parse
from toolkit.triton.tensors.word_lists import pack
from toolkit.words import AcceptanceChoice, LogProbSource, Role, RuntimeRule, SeedScope

__all__ = [
    "BlsAnswer",
    "BlsRequest",
    "Prepared",
    "engine_inputs",
    "parse_bls",
    "preprocessing_inputs",
    "token_log_probs",
]

Array = NDArray[Any]
WORDS = {
    "streaming": "stream",
    "exclude_input": "exclude_input_in_output",
    "best_of": "num_return_sequences",
}
# Inputs that go to the engines as they are: BLS's name -> the engine's.
TO_BOTH = {"repetition_penalty": "repetition_penalty"}
TO_TARGET = {
    "length_penalty": "len_penalty",
    "lora_task_id": "lora_task_id",
    "lora_weights": "lora_weights",
    "lora_config": "lora_config",
    "guided_decoding_guide_type": "guided_decoding_guide_type",
    "guided_decoding_guide": "guided_decoding_guide",
    "prompt_embedding_table": "prompt_embedding_table",
    "prompt_vocab_size": "prompt_vocab_size",
    "prompt_table_extra_id": "prompt_table_extra_ids",
}
NOT_SERVED = {
    "decoder_text_input": "encoder-decoder models are not served",
    "image_input": "images are not served",
    "image_bytes_input": "images are not served",
    "image_url_input": "images are not served",
    "video_bytes_input": "videos are not served",
}
LOGITS = ("return_context_logits", "return_generation_logits")
PERFORMANCE = "sampling_param_return_perf_metrics"  # what Answer calls it


@dataclass(frozen=True, slots=True)
class BlsRequest:
    """A parsed request. seed: of the sampling, drawn where the client stated none; None at
    temperature 0. rule: greedy or one of the above. passed: the arrays that go to the engines as
    they came.
    """

    request: Request
    max_tokens: int
    draft_len: int
    rule: RuntimeRule
    seed: int | None
    min_tokens: int = 0
    end_id: int | None = None
    passed: Mapping[str, Array] = field(default_factory=dict)

    @property
    def log_probs(self) -> bool:
        return "return_cumulative_logprob" in self.request.returns


@dataclass(frozen=True, slots=True)
class Prepared:
    """What preprocessing made of a request. bias: empty where there is none."""

    ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    pad_id: int
    stop_words: tuple[tuple[int, ...], ...] = ()
    bad_words: Array | None = None
    bias: Array | None = None


def parse_bls(
    arrays: Mapping[str, Array],
    parameters: Mapping[str, object],
    limits: Limits,
    inputs: Mapping[str, bool],
    *,
    acceptance: AcceptanceChoice,
    fresh_seed: int,
) -> BlsRequest:
    """Check one request. inputs: the model's tensors, and whether each is single. acceptance: the
    deployment's rule at temperature > 0. fresh_seed: used where the request has none. Raises
    RequestError.
    """
    form = Form(inputs, "", WORDS)
    for name, why in NOT_SERVED.items():
        if name in arrays:
            raise RequestError(f"{name}: {why}")
    tensors = {name: array.reshape(-1).tolist() for name, array in arrays.items()}
    # TensorRT-LLM's examples send an empty word where they mean none.
    tensors.update(
        {
            name: [word for word in tensors[name] if word]
            for name in ("stop_words", "bad_words")
            if name in tensors
        }
    )
    if len(tensors.get("beam_width", [1])) != 1 or tensors.get("beam_width", [1]) != [1]:
        raise RequestError(
            f"beam_width {tensors['beam_width']} is not supported: one sequence per request"
        )
    for name in LOGITS:
        if any(tensors.get(name, [])):
            raise RequestError(
                f"{name} is not served here", hint="Ask the model tensorrt_llm itself."
            )
    single = {name: values for name, values in tensors.items() if name not in TO_TARGET}
    request = parse(single, parameters, limits, form)
    if request.max_tokens is None:
        raise RequestError("max_tokens is missing")
    sampling = request.sampling
    rule: RuntimeRule = "verify_only" if request.acceptance == "verify_only" else "greedy"
    seed = None
    if sampling.temperature > 0.0:
        seed = fresh_seed if sampling.seed is None else sampling.seed
        rule = _rule(request, tensors.get("use_draft_logits"), acceptance)
    min_tokens = int(tensors.get("min_tokens", [0])[0])
    if min_tokens < 0:
        raise RequestError(f"min_tokens is {min_tokens}; it has to be at least 0")
    return BlsRequest(
        request=_with_answers_words(request),
        max_tokens=request.max_tokens,
        draft_len=limits.max_draft_len if request.draft_len is None else request.draft_len,
        rule=rule,
        seed=seed,
        min_tokens=min_tokens,
        end_id=int(tensors["end_id"][0]) if "end_id" in tensors else None,
        passed={name: arrays[name] for name in (*TO_BOTH, *TO_TARGET) if name in arrays},
    )


def _rule(
    request: Request, use_draft_logits: list[Any] | None, acceptance: AcceptanceChoice
) -> RuntimeRule:
    """use_draft_logits is TensorRT-LLM's way to ask; `acceptance` of the request is ours and
    says more.
    """
    if request.acceptance is not None and request.acceptance != "auto":
        return request.acceptance
    if use_draft_logits is not None:
        return "rejection" if use_draft_logits[0] else "sample_match"
    if acceptance != "auto":
        return acceptance
    return "rejection" if request.sampling.seed is None else "coupled"


def _with_answers_words(request: Request) -> Request:
    import dataclasses

    words = {"return_perf_metrics": PERFORMANCE, "return_log_probs": "return_cumulative_logprob"}
    return dataclasses.replace(
        request, returns=frozenset(words.get(name, name) for name in request.returns)
    )


def preprocessing_inputs(request: BlsRequest, arrays: Mapping[str, Array]) -> dict[str, Array]:
    names = {
        "max_tokens": "REQUEST_OUTPUT_LEN",
        "bad_words": "BAD_WORDS_DICT",
        "stop_words": "STOP_WORDS_DICT",
        "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
        "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
        "end_id": "END_ID",
        "pad_id": "PAD_ID",
    }
    found = {
        theirs: _row(arrays[ours])
        for ours, theirs in names.items()
        if ours in arrays and any(arrays[ours].reshape(-1))
    }
    return {
        "QUERY": np.array([[request.request.prompt.encode("utf-8")]], dtype=np.object_),
        **found,
    }


def engine_inputs(
    request: BlsRequest,
    prepared: Prepared,
    ids: Sequence[int],
    count: int,
    *,
    role: Role,
    seeds: SeedScope = "request",
    drafts: Sequence[int] = (),
    draft_logits: Any = None,
    whole: bool = False,
    log_probs: LogProbSource = "engine",
) -> dict[str, Array]:
    """The tensors of one call: `count` tokens behind `ids`, with a batch dimension of 1.

    role: draft | target. seeds: request (the engine keys its noise by seed and position) | call.
    whole: the call may run to the end of the request, so the engine has to know what ends it.
    log_probs: what they come from where they are asked for.
    """
    made = len(ids) - len(prepared.ids)
    tensors: dict[str, Array] = {
        "input_ids": np.array([ids], dtype=np.int32),
        "input_lengths": np.array([[len(ids)]], dtype=np.int32),
        "request_output_len": np.array([[count]], dtype=np.int32),
        "pad_id": np.array([[prepared.pad_id]], dtype=np.int32),
        "exclude_input_in_output": np.array([[True]]),
    }
    if prepared.end_ids:
        tensors["end_id"] = np.array([[prepared.end_ids[0]]], dtype=np.int32)
    stops: list[tuple[int, ...]] = [(token,) for token in prepared.end_ids[1:]]
    stops += list(prepared.stop_words) if whole else []
    if stops:
        tensors["stop_words_list"] = np.array([pack(stops)], dtype=np.int32)
    if prepared.bad_words is not None and prepared.bad_words.size:
        tensors["bad_words_list"] = prepared.bad_words
    if prepared.bias is not None and prepared.bias.size:
        tensors["embedding_bias"] = prepared.bias
    tensors.update(_sampling_tensors(request, len(ids), role, seeds))
    if request.min_tokens > made:
        tensors["min_tokens"] = np.array([[min(count, request.min_tokens - made)]], dtype=np.int32)
    passed = TO_BOTH if role == "draft" else {**TO_BOTH, **TO_TARGET}
    tensors.update(
        {passed[name]: array for name, array in request.passed.items() if name in passed}
    )
    if role == "draft":
        if request.rule == "rejection":
            tensors["return_generation_logits"] = np.array([[True]])
        return tensors
    if drafts:
        tensors["draft_input_ids"] = np.array([drafts], dtype=np.int32)
        if draft_logits is not None:
            tensors["draft_logits"] = np.asarray(draft_logits, dtype=np.float32)[None]
    if request.log_probs:
        tensors["return_generation_logits" if log_probs == "logits" else "return_log_probs"] = (
            np.array([[True]])
        )
    if PERFORMANCE in request.request.returns:
        tensors["return_perf_metrics"] = np.array([[True]])
    return tensors


def token_log_probs(
    logits: Array, ids: Sequence[int], vocab_size: int | None
) -> tuple[tuple[float, ...], tuple[tuple[int, float], ...]]:
    """logits [n, vocab or more] that ids [n] were chosen from -> the log-probability of each, and
    the likeliest other token with its own.
    """
    rows = np.asarray(logits, dtype=np.float64)[:, :vocab_size]
    best = rows.max(axis=1, keepdims=True)
    scores = rows - best - np.log(np.exp(rows - best).sum(axis=1, keepdims=True))
    places = np.arange(len(ids))
    own = scores[places, list(ids)]
    scores[places, list(ids)] = -np.inf
    others = scores.argmax(axis=1)
    told = zip(others.tolist(), scores[places, others].tolist(), strict=True)
    return tuple(own.tolist()), tuple(told)


def _sampling_tensors(
    request: BlsRequest, position: int, role: Role, seeds: SeedScope
) -> dict[str, Array]:
    sampling = request.request.sampling
    tensors: dict[str, Array] = {}
    for name in ("frequency_penalty", "presence_penalty"):
        if getattr(sampling, name):
            tensors[name] = np.array([[getattr(sampling, name)]], dtype=np.float32)
    if request.seed is None:
        tensors["runtime_top_k"] = np.array([[1]], dtype=np.int32)
        return tensors
    tensors["temperature"] = np.array([[sampling.temperature]], dtype=np.float32)
    if sampling.top_k:
        tensors["runtime_top_k"] = np.array([[sampling.top_k]], dtype=np.int32)
    if sampling.top_p < 1.0 or not sampling.top_k:  # with neither, TensorRT-LLM decodes greedily
        tensors["runtime_top_p"] = np.array([[sampling.top_p]], dtype=np.float32)
    own = role if request.rule in ("rejection", "sample_match") and role == "draft" else ""
    where = str(position) if seeds == "call" else ""
    seed = _mixed(request.seed, own, where) if own or where else request.seed
    tensors["seed"] = np.array([[seed]], dtype=np.uint64)
    return tensors


def _mixed(seed: int, *words: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(f"{seed} {' '.join(words)}".encode(), digest_size=8).digest(), "little"
    )


def _row(array: Array) -> Array:
    return array if array.ndim > 1 else array[None]


class BlsAnswer(Answer):
    """The responses of one request, in BLS's words. accumulate: every chunk repeats the text
    before it.
    """

    def __init__(self, request: BlsRequest, interval_ns: int, *, accumulate: bool) -> None:
        super().__init__(request.request, interval_ns)
        self._log_probs = request.log_probs
        self._accumulate = accumulate
        self._whole = ""

    def respond(
        self,
        event: TokenEvent,
        now_ns: int,
        log_probs: Sequence[float],
        next_best: Sequence[tuple[int, float]],
        target_figures: Mapping[str, int],
        failure: str | None,
    ) -> dict[str, list[Any]] | None:
        """Name -> values of the response that is due; None if none is. target_figures: summed
        over the target's calls.
        """
        response = self.add(event, now_ns)
        if response is None:
            return None
        if self._accumulate and self._request.streaming:
            self._whole += response["text_output"][0]
            response["text_output"] = [self._whole]
        if event.finish_reason is None:
            return response
        kept = {
            name: values for name, values in response.items() if not name.startswith("kv_cache_")
        }
        if "cumulative_logprob" in kept:
            kept["cum_log_probs"] = kept.pop("cumulative_logprob")
            kept["output_log_probs"] = list(log_probs)
            if len(next_best) == len(log_probs):
                kept["next_best_ids"] = [token for token, _ in next_best]
                kept["next_best_log_probs"] = [value for _, value in next_best]
        if PERFORMANCE in self._request.returns:
            kept.update({name: [value] for name, value in target_figures.items()})
        if failure is not None:
            kept["draft_failure"] = [failure]
        kept["batch_index"] = kept["sequence_index"] = [0]
        return kept


def shaped(name: str, values: Iterable[Any], dtype: Any) -> Array:
    """An output as TensorRT-LLM's BLS shapes it: text [1], log-probabilities [1, 1, n],
    everything else [1, n].
    """
    array = np.array(
        [each.encode("utf-8") if isinstance(each, str) else each for each in values], dtype=dtype
    )
    if name in ("text_output", "finish_reason", "stop_reason", "draft_failure"):
        return array
    return array[None, None] if name == "output_log_probs" else array[None]
