"""The tensors of the BLS model: it turns a client's tensors into a request, and that request into
the tensors of its calls and responses.

The tensors are TensorRT-LLM's own (`toolkit.facts.triton_tensors.BLS`) and a few of ours. This
module is the same for every engine: the engine models may run on TensorRT-LLM's backend or be
embedded engines. Pure: arrays in, arrays out.

How tokens are chosen at temperature > 0:
- coupled: draft and target get the same seed, and the embedded engine keys its noise by (seed,
  position).
- rejection: the target receives the draft's logits and judges the drafts by them. The draft draws
  with a seed of its own.
- sample_match: draft and target have seeds of their own, and no logits are sent. A draft is
  accepted while it equals the target's sample.

Log-probabilities come from the target's logits (log_probs = "logits") or from the engine's own
tensor ("engine").

A request is greedy as TensorRT-LLM's engines read it (`engine_sampling`), and then the engines get
top_k 1, which is greedy for all of them.

Some backends restart their random numbers with every call (seeds = "call"). They get another seed
with every call, since with the same seed all rounds of a request would draw the same numbers.
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
from toolkit.triton.tensors.requests import Answer, Limits, Request, RequestFormat, parse
from toolkit.triton.tensors.word_lists import pack
from toolkit.words import (
    AcceptanceChoice,
    DraftLenReason,
    LogProbSource,
    Role,
    RuntimeRule,
    SeedScope,
)

__all__ = [
    "BlsAnswer",
    "BlsRequest",
    "Prepared",
    "choose_draft_len",
    "engine_inputs",
    "parse_bls",
    "preprocessing_inputs",
    "split_prompts",
    "text_value",
    "token_log_probs",
]

Array = NDArray[Any]
TENSOR_NAMES = {
    "streaming": "stream",
    "exclude_input": "exclude_input_in_output",
    "best_of": "num_return_sequences",
}
# Inputs that go to the engines unchanged: name in BLS -> name in the engine.
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
LOGITS_REQUESTS = ("return_context_logits", "return_generation_logits")
PERFORMANCE_REQUEST = "sampling_param_return_perf_metrics"  # the name that Answer uses


@dataclass(frozen=True, slots=True)
class BlsRequest:
    """A parsed request. rule: greedy, verify_only, or one of the rules above. seed: the seed of the
    sampling, a fresh one if the client stated none; None at temperature 0. passed: the arrays that
    go to the engines unchanged.
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
    """What preprocessing returned for a request. bias: None if there is none."""

    ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    pad_id: int
    stop_words: tuple[tuple[int, ...], ...] = ()
    bad_words: Array | None = None
    bias: Array | None = None


def split_prompts(arrays: Mapping[str, Array], *, decoupled: bool) -> list[dict[str, Array]]:
    """The arrays of each prompt of a request, with a batch dimension of 1. Raises RequestError.

    TensorRT-LLM takes several prompts where the model is decoupled and nothing is drafted
    (TRT triton_backend/all_models/inflight_batcher_llm/tensorrt_llm_bls/1/lib/decode.py, decode;
    model.py fails where it has more responses than requests).
    """
    batch = len(arrays["text_input"])
    if batch > 1 and not decoupled:
        raise RequestError(
            f"text_input holds {batch} prompts, and this repository, which is not decoupled, takes"
            " one",
            hint="Send one request per prompt, or package again with triton.decoupled: true.",
        )
    if batch > 1 and any(arrays.get("num_draft_tokens", np.zeros(1)).reshape(-1) > 0):
        raise RequestError(
            f"num_draft_tokens was sent with {batch} prompts; speculation takes one per request",
            hint="Send one request per prompt, or leave num_draft_tokens out to decode plainly.",
        )
    return [
        {name: array[index : index + 1] for name, array in arrays.items()} for index in range(batch)
    ]


def parse_bls(
    arrays: Mapping[str, Array],
    parameters: Mapping[str, object],
    limits: Limits,
    inputs: Mapping[str, bool],
    *,
    acceptance: AcceptanceChoice,
    fresh_seed: int,
) -> BlsRequest:
    """Check one request. inputs: tensor name -> whether it holds a single value. acceptance: the
    deployment's rule at temperature > 0. fresh_seed: the seed if the request states none. Raises
    RequestError.
    """
    request_format = RequestFormat(inputs, "", TENSOR_NAMES, engine_sampling=True)
    for name, reason in NOT_SERVED.items():
        if name in arrays:
            raise RequestError(f"{name}: {reason}")
    tensors = {name: array.reshape(-1).tolist() for name, array in arrays.items()}
    # TensorRT-LLM's examples send an empty word to mean no word.
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
    for name in LOGITS_REQUESTS:
        if any(tensors.get(name, [])):
            raise RequestError(
                f"{name} is not served here", hint="Call the model tensorrt_llm itself."
            )
    single = {name: values for name, values in tensors.items() if name not in TO_TARGET}
    request = parse(single, parameters, limits, request_format)
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
    draft_len = limits.max_draft_len if request.draft_len is None else request.draft_len
    return BlsRequest(
        request=_with_answer_names(request),
        max_tokens=request.max_tokens,
        draft_len=draft_len,
        rule=rule,
        seed=seed,
        min_tokens=min_tokens,
        end_id=int(tensors["end_id"][0]) if "end_id" in tensors else None,
        passed={name: arrays[name] for name in (*TO_BOTH, *TO_TARGET) if name in arrays},
    )


def _rule(
    request: Request, use_draft_logits: list[Any] | None, acceptance: AcceptanceChoice
) -> RuntimeRule:
    """The accept rule of a request. Our tensor `acceptance` comes first, since it names a rule;
    then TensorRT-LLM's tensor use_draft_logits; then the deployment's default.
    """
    if request.acceptance is not None and request.acceptance != "auto":
        return request.acceptance
    if use_draft_logits is not None:
        return "rejection" if use_draft_logits[0] else "sample_match"
    if acceptance != "auto":
        return acceptance
    return "rejection" if request.sampling.seed is None else "coupled"


def choose_draft_len(
    request: BlsRequest,
    prompt_tokens: int,
    *,
    max_prompt_tokens: int | None,
    adapts: bool,
    seeds: SeedScope,
) -> tuple[int, DraftLenReason]:
    """The longest draft of a request, and why; "pays" if the length is chosen while it runs.

    max_prompt_tokens: longer prompts are decoded plainly, unless the request states its own length.
    seeds: as in `engine_inputs`.
    """
    if request.request.draft_len is not None:
        return request.draft_len, "request"
    if max_prompt_tokens is not None and prompt_tokens > max_prompt_tokens:
        return 0, "prompt length"
    if not adapts or request.rule == "verify_only" or request.draft_len == 0:
        return request.draft_len, "fixed"
    # A seed promises the same text again. These texts depend on where rounds begin and end.
    depends = request.rule == "rejection" or seeds == "call"
    if depends and request.request.sampling.seed is not None and request.rule != "greedy":
        return request.draft_len, "seed"
    return request.draft_len, "pays"


def _with_answer_names(request: Request) -> Request:
    import dataclasses

    names = {
        "return_perf_metrics": PERFORMANCE_REQUEST,
        "return_log_probs": "return_cumulative_logprob",
    }
    return dataclasses.replace(
        request, returns=frozenset(names.get(name, name) for name in request.returns)
    )


def preprocessing_inputs(request: BlsRequest, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors of the preprocessing model's call. arrays: the client's tensors."""
    names = {
        "max_tokens": "REQUEST_OUTPUT_LEN",
        "bad_words": "BAD_WORDS_DICT",
        "stop_words": "STOP_WORDS_DICT",
        "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
        "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
        "end_id": "END_ID",
        "pad_id": "PAD_ID",
    }
    stated = {
        preprocessing_name: _row(arrays[name])
        for name, preprocessing_name in names.items()
        if name in arrays and any(arrays[name].reshape(-1))
    }
    return {
        "QUERY": np.array([[request.request.prompt.encode("utf-8")]], dtype=np.object_),
        **stated,
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
    has_end_token: bool = False,
    owner: str = "",
) -> dict[str, Array]:
    """The tensors of one engine call for `count` tokens that follow `ids`, with a batch dimension
    of 1.

    role: draft | target. seeds: request (the engine keys its noise by seed and position) | call.
    whole: the call may run to the end of the request, so the engine gets its stop words. log_probs:
    logits | engine, where log-probabilities come from if they are requested. has_end_token: the
    engines can return the token that ended the text. owner: of the slot that the engine keeps for
    this request; empty: it keeps none.
    """
    made = len(ids) - len(prepared.ids)
    tensors: dict[str, Array] = {
        "input_ids": np.array([ids], dtype=np.int32),
        "input_lengths": np.array([[len(ids)]], dtype=np.int32),
        "request_output_len": np.array([[count]], dtype=np.int32),
        "pad_id": np.array([[prepared.pad_id]], dtype=np.int32),
        "exclude_input_in_output": np.array([[True]]),
    }
    words = {"slot_owner": owner, "cache_salt": request.request.cache_salt}
    tensors.update({name: text_value(word) for name, word in words.items() if word})
    if prepared.end_ids:
        tensors["end_id"] = np.array([[prepared.end_ids[0]]], dtype=np.int32)
    if has_end_token:
        tensors["return_end_token"] = np.array([[True]])
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
            # The backend takes them only in the type of the draft's own logits.
            tensors["draft_logits"] = np.asarray(draft_logits)[None]
    if request.log_probs:
        name = "return_generation_logits" if log_probs == "logits" else "return_log_probs"
        tensors[name] = np.array([[True]])
    if PERFORMANCE_REQUEST in request.request.returns:
        tensors["return_perf_metrics"] = np.array([[True]])
    return tensors


def text_value(text: str) -> Array:
    """A tensor [1, 1] with a text."""
    return np.array([[text.encode("utf-8")]], dtype=np.object_)


def read_drafts(
    answer: Mapping[str, Array], count: int, *, vocab_size: int | None, wants_logits: bool
) -> tuple[tuple[int, ...], Array | None]:
    """The draft model's answer to a call for `count` tokens: (ids, their logits [n, vocab]).

    vocab_size None: it is not known. Raises ValueError for what cannot be drafts. A logit may be
    -inf, since engines write that for words that are forbidden.
    """
    needed = ["output_ids", "sequence_length", *(["generation_logits"] if wants_logits else [])]
    missing = [name for name in needed if name not in answer or not answer[name].size]
    # An engine that met an end token at once has no ids, and no logits.
    if "sequence_length" in answer and answer["sequence_length"].size:
        length = int(answer["sequence_length"].reshape(-1)[0])
        if length == 0 and "output_ids" in answer:
            return (), None
    if missing:
        raise ValueError(f"its answer has no {' and no '.join(missing)}")
    ids = tuple(map(int, answer["output_ids"].reshape(-1)[: max(0, min(length, count))].tolist()))
    if length < 0 or len(ids) < min(length, count):
        raise ValueError(f"it says that it drafted {length} tokens, and sent {len(ids)}")
    if min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
        raise ValueError(f"it drafted ids outside the vocabulary: {min(ids)} to {max(ids)}")
    if not wants_logits:
        return ids, None
    logits = answer["generation_logits"]
    width = logits.shape[-1]
    rows = logits.reshape(-1, width)[: len(ids)]
    if len(rows) < len(ids) or width <= max(ids) or width < (vocab_size or 0):
        raise ValueError(
            f"generation_logits has the shape {logits.shape} for {len(ids)} tokens of a vocabulary"
            f" of {vocab_size}"
        )
    if not np.isfinite(rows.max(axis=1)).all():
        raise ValueError("its logits are not finite")
    return ids, rows


def token_log_probs(
    logits: Array, ids: Sequence[int], vocab_size: int | None
) -> tuple[tuple[float, ...], tuple[tuple[int, float], ...]]:
    """Returns the log-probability of each of the ids, and for each the likeliest other token with
    its log-probability.

    logits [n, vocab or more]: what ids [n] were chosen from. Columns from vocab_size on are
    padding.
    """
    rows = np.asarray(logits, dtype=np.float64)[:, :vocab_size]
    best = rows.max(axis=1, keepdims=True)
    log_probs = rows - best - np.log(np.exp(rows - best).sum(axis=1, keepdims=True))
    indices = np.arange(len(ids))
    chosen = log_probs[indices, list(ids)]
    log_probs[indices, list(ids)] = -np.inf
    others = log_probs.argmax(axis=1)
    next_best = zip(others.tolist(), log_probs[indices, others].tolist(), strict=True)
    return tuple(chosen.tolist()), tuple(next_best)


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
    if sampling.top_p < 1.0 or not sampling.top_k:
        tensors["runtime_top_p"] = np.array([[sampling.top_p]], dtype=np.float32)
    has_own_seed = role == "draft" and request.rule in ("rejection", "sample_match")
    role_word = role if has_own_seed else ""
    position_word = str(position) if seeds == "call" else ""
    seed = request.seed
    if role_word or position_word:
        seed = _derived_seed(request.seed, role_word, position_word)
    tensors["seed"] = np.array([[seed]], dtype=np.uint64)
    return tensors


def _derived_seed(seed: int, *words: str) -> int:
    text = f"{seed} {' '.join(words)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _row(array: Array) -> Array:
    return array if array.ndim > 1 else array[None]


class BlsAnswer(Answer):
    """Makes the responses of one prompt, with the names of BLS. accumulate: every chunk repeats
    the text before it. batch_index: the prompt's place in its request; None if it is the only one,
    and then only the last response says so.
    """

    def __init__(
        self,
        request: BlsRequest,
        interval_ns: int,
        *,
        accumulate: bool,
        batch_index: int | None = None,
    ) -> None:
        super().__init__(request.request, interval_ns)
        self._log_probs = request.log_probs
        self._accumulate = accumulate
        self._batch_index = batch_index
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
        """Name -> values of the response that is due; None if none is due.

        target_figures: the target's figures, summed over its calls. failure: the draft's error, if
        the rest of the request was decoded without drafts.
        """
        response = self.add(event, now_ns)
        if response is None:
            return None
        if self._accumulate and self._request.streaming:
            self._whole += response["text_output"][0]
            response["text_output"] = [self._whole]
        response = {
            name: values for name, values in response.items() if not name.startswith("kv_cache_")
        }
        is_last = event.finish_reason is not None
        if PERFORMANCE_REQUEST in self._request.returns and (
            is_last or self._request.repeats_figures
        ):
            response.update({name: [value] for name, value in target_figures.items()})
        cumulative_log_prob = response.pop("cumulative_logprob", None)
        if is_last or self._batch_index is not None:
            response["batch_index"] = [self._batch_index or 0]
            response["sequence_index"] = [0]
        if not is_last:
            return response
        if cumulative_log_prob is not None:
            response["cum_log_probs"] = cumulative_log_prob
            response["output_log_probs"] = list(log_probs)
            if len(next_best) == len(log_probs):
                response["next_best_ids"] = [token for token, _ in next_best]
                response["next_best_log_probs"] = [value for _, value in next_best]
        if failure is not None:
            response["draft_failure"] = [failure]
        return response


def shaped(name: str, values: Iterable[Any], dtype: Any) -> Array:
    """An output in the shape that TensorRT-LLM's BLS gives it: text [1], log-probabilities
    [1, 1, n], everything else [1, n].
    """
    array = np.array(
        [value.encode("utf-8") if isinstance(value, str) else value for value in values],
        dtype=dtype,
    )
    if name in ("text_output", "finish_reason", "stop_reason", "draft_failure"):
        return array
    return array[None, None] if name == "output_log_probs" else array[None]
