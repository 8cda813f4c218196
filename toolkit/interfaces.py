"""What the parts promise one another at run time and build time: Protocols with their request and
result records.

Two levels. A `StepEngine` is one model with its KV cache: tokens in, logits out, and it can be
rewound. An `Engine` is a whole speculative deployment: a request in, token events out. Our own
runtime turns two StepEngines into an Engine; a compiled engine from elsewhere is an Engine at once,
since it speculates inside itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from toolkit.words import (
    AttnBackend,
    BuilderChoice,
    Device,
    EngineMode,
    FinishReason,
    RequestAcceptance,
    Role,
    SpecDtype,
    SpeculationKind,
)

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.records.build import CompiledEngine, QuantizedCheckpoint

__all__ = [
    "MOST_PENALTY",
    "Engine",
    "EngineBackend",
    "EngineLoader",
    "EngineSpec",
    "Fingerprint",
    "GenerationRequest",
    "Progress",
    "RequestStats",
    "Sampling",
    "StepEngine",
    "TensorRtLlmSpec",
    "TokenEvent",
]

Fingerprint = dict[str, str]
"""Name -> value of everything about a backend that changes what it produces: versions,
instruction set, compiler.
"""


class Progress(Protocol):
    """Where long work reports how far it is. The CLI draws it; tests and servers pass a silent
    one.
    """

    def __call__(self, done: int, total: int | None, what: str) -> None: ...


MOST_PENALTY = 1000.0
"""In logits, so that one of it decides alone, and all that a sequence can collect is still a
small number in float32.
"""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. temperature 0 is greedy; top_k 0 and top_p 1 switch their
    filter off.

    The order is TensorRT-LLM's: penalties on the logits, then temperature, then top-k, then top-p.
    frequency_penalty and presence_penalty count the output tokens only, not the prompt's; beyond
    MOST_PENALTY they are refused.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to complete. draft_len None takes the engine's own, 0 decodes plainly;
    deadline_ns is monotonic time.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    draft_len: int | None = None
    acceptance: RequestAcceptance | None = None  # None: the deployment's own
    deadline_ns: int | None = None
    cumulative_logprob: bool = (
        False  # sum up the output tokens' log-probabilities; a pass over the vocabulary per token
    )


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What one request cost and how well speculation did. Times are monotonic nanoseconds.

    drafted_by_position[i] counts the verify steps that drafted a token at position i,
    accepted_by_position[i] those that kept it (joint rates). verify_steps counts target forwards
    after prefill: acceptance_length = 1 + accepted / verify_steps.
    """

    prompt_tokens: int
    output_tokens: int
    verify_steps: int
    drafted: int
    accepted: int
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    arrival_ns: int
    first_scheduled_ns: int | None
    first_token_ns: int | None
    last_token_ns: int | None
    # proposing, choosing draft tokens included, in the verify steps this request took part in;
    # prefill is not
    draft_ns: int
    verify_ns: int  # time in target forwards, likewise
    host_ns: int  # the rest of those steps
    cumulative_logprob: float | None = (
        None  # under the target's own logits: before penalties, temperature and filters
    )

    @property
    def acceptance_rate(self) -> float | None:
        return None if self.drafted == 0 else self.accepted / self.drafted

    @property
    def acceptance_length(self) -> float | None:
        return None if self.verify_steps == 0 else 1.0 + self.accepted / self.verify_steps


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one step added to one request: its new tokens and the text that became certain with
    them.

    text may lag behind token_ids: a partial UTF-8 character or the beginning of a stop word is held
    back until it is decided. The last event of a request has finish_reason set: "stop" (EOS or stop
    word), "length", "cancelled", "deadline" or "error"; stop_reason is the stop word that ended it,
    if one did; stats are complete there and None before.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    error: str | None = None
    stats: RequestStats | None = None


class StepEngine(Protocol):
    """One model and its KV cache, for up to max_batch_size sequences, each in a slot that the
    caller hands out.

    The engine keeps one length per slot. A forward appends its tokens to the slots' caches; rewind
    shortens them again. Positions beyond a slot's length hold garbage that no result depends on.
    Not thread-safe.
    """

    vocab_size: int
    max_batch_size: int
    # longest sequence (prompt + output) a slot can hold; padding of a last step may run past it
    # internally
    max_seq_len: int
    max_step_tokens: int  # most tokens per sequence in one forward

    def forward(self, slots: Sequence[int], tokens: Tensor, *, last_only: bool = False) -> Tensor:
        """Run `tokens` through the model behind each slot's cached prefix.

        slots: batch distinct slot numbers. tokens: [batch, n] int64 with n <= max_step_tokens; rows
        shorter than n are padded by the caller, who rewinds afterwards. Every slot's length grows
        by n. Returns logits [batch, n, vocab], or [batch, 1, vocab] for the last column with
        last_only, float32 (float64 for a float64 engine). The tensor may be reused by the next
        forward: copy what must outlive it.
        """
        ...

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Shorten the slots to `lengths` tokens (0 frees them). Raises ValueError for a length
        above the present one.
        """
        ...

    def length(self, slot: int) -> int: ...


class Engine(Protocol):
    """A whole deployment, target and draft together."""

    def generate(self, request: GenerationRequest) -> Iterator[TokenEvent]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TensorRtLlmSpec:
    """What the kinds `trt_engine` and `trtllm_pytorch` are asked beyond an EngineSpec, in
    TensorRT-LLM's own words.
    """

    version: str  # "1.2.1"
    tp_size: int = 1
    pp_size: int = 1
    gpus_per_node: int = 8
    max_num_tokens: int | None = None  # None: TensorRT-LLM's own default
    tokens_per_block: int = 32
    free_gpu_memory_fraction: float = 0.9
    enable_block_reuse: bool = True
    speculation: SpeculationKind = "none"
    draft_len_schedule: dict[int, int] | None = (
        None  # trtllm_pytorch: least batch size -> draft length
    )
    max_concurrency: int | None = None  # trtllm_pytorch: beyond this batch size nothing is drafted
    max_matching_ngram_size: int = 4  # trtllm_pytorch
    multiple_profiles: bool = False  # trt_engine
    opt_num_tokens: int | None = None  # trt_engine
    builder: BuilderChoice = "auto"  # trt_engine
    cuda_graph: bool = True  # trtllm_pytorch
    attn_backend: AttnBackend = "TRTLLM"  # trtllm_pytorch
    trust_remote_code: bool = False  # trtllm_pytorch: of either model
    draft_dir: Path | None = (
        # trtllm_pytorch: where the draft is while the target is loaded once; no part of the engine
        None
    )

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What is asked of one engine, the same words for every kind."""

    role: Role
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_draft_len: int  # 0 for the draft
    dtype: SpecDtype = "float32"  # of activations and unquantized weights
    device: Device = "cpu"
    mode: EngineMode = "auto"
    tensorrt_llm: TensorRtLlmSpec | None = None  # None: for the kind torch


class EngineBackend(Protocol):
    """Build time: a quantized checkpoint in, an engine directory out."""

    def fingerprint(self, spec: EngineSpec) -> Fingerprint: ...

    def compile(
        self, checkpoint: QuantizedCheckpoint, spec: EngineSpec, out_dir: Path, progress: Progress
    ) -> CompiledEngine: ...


class EngineLoader(Protocol):
    """And back again, for the kinds that step: an engine directory in, something that runs out."""

    def load(self, engine_dir: Path, *, threads: int | None = None) -> StepEngine: ...
