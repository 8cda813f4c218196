"""The interfaces between the parts of the toolkit, as Protocols with their request and result
records.

There are two levels. A `StepEngine` is one model with its KV cache: it takes tokens and returns
logits, and can be rewound. An `Engine` is a whole speculative deployment: it takes a request and
yields token events. Our own runtime combines two StepEngines into an Engine. TensorRT-LLM is an
Engine by itself, since it speculates internally.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from toolkit.words import (
    AttnBackend,
    BuilderChoice,
    Device,
    DraftLenReason,
    EngineMode,
    FinishReason,
    KvDtype,
    RequestAcceptance,
    Role,
    SpecDtype,
    SpeculationKind,
    VllmDtype,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from toolkit.records.build import CompiledEngine, QuantizedCheckpoint

__all__ = [
    "MAX_PENALTY",
    "Chain",
    "ChainingEngine",
    "CopyingEngine",
    "Engine",
    "EngineBackend",
    "EngineLoader",
    "EngineSpec",
    "Fingerprint",
    "GenerationRequest",
    "PackingEngine",
    "Progress",
    "RequestStats",
    "Sampling",
    "StepEngine",
    "TensorRtLlmSpec",
    "TokenEvent",
]

Fingerprint = dict[str, str]
"""Name -> value of every property of a backend that changes its output: versions, instruction set,
compiler.
"""


class Progress(Protocol):
    """Long work calls this to report how far it is. The CLI draws it; tests and servers pass one
    that does nothing.
    """

    def __call__(self, done: int, total: int | None, what: str) -> None: ...


MAX_PENALTY = 1000.0
"""In logits. A penalty of this size decides by itself, and the sum over a sequence is still a small
number in float32.
"""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. temperature 0 is greedy; top_k 0 and top_p 1 switch their
    filter off.

    The order is TensorRT-LLM's: penalties on the logits, then temperature, then top-k, then top-p.
    frequency_penalty and presence_penalty count output tokens only, not the tokens of the prompt;
    a penalty beyond MAX_PENALTY is refused.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to complete.

    draft_len: None uses the engine's own length; 0 decodes without a draft.
    acceptance: None means coupled with a seed, and rejection without one.
    deadline_ns: monotonic time.
    cumulative_logprob: sum the log-probabilities of the output tokens, which costs a pass over the
    vocabulary per token.
    running_stats: every event has the statistics so far, not only the last one.
    cache_salt: only requests with the same one begin with what another left in a KV cache.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    draft_len: int | None = None
    acceptance: RequestAcceptance | None = None
    deadline_ns: int | None = None
    cumulative_logprob: bool = False
    running_stats: bool = False
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class RequestStats:
    """The cost of one request, and how many draft tokens were accepted. Times are monotonic
    nanoseconds.

    drafted_by_position[i] counts the verify steps that drafted a token at position i,
    accepted_by_position[i] those that accepted it (joint rates). verify_steps counts target
    forwards after prefill: acceptance_length = 1 + accepted / verify_steps.

    draft_ns is the time of drafting in the verify steps that this request took part in, including
    the choice of draft tokens, but not prefill. verify_ns is the time of their target forwards,
    host_ns the rest of these steps.
    cumulative_logprob is under the target's own logits, before penalties, temperature and filters.
    steps_by_reason: why the steps had the draft length that they had, in the order in which the
    reasons came up; together they are verify_steps. draft_len_changes: how often the length that is
    chosen for the request changed. draft_probes: how often it was asked whether drafts would pay
    again. reused_prompt_tokens: how many tokens of the prompt an earlier request left in the
    target's KV cache; None if that is not known. draft_failure: why the request went on without its
    draft; None if it did not.
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
    draft_ns: int
    verify_ns: int
    host_ns: int
    cumulative_logprob: float | None = None
    steps_by_reason: Mapping[DraftLenReason, int] = field(default_factory=dict)
    draft_len_changes: int = 0
    draft_probes: int = 0
    reused_prompt_tokens: int | None = None
    draft_failure: str | None = None

    @property
    def acceptance_rate(self) -> float | None:
        return None if self.drafted == 0 else self.accepted / self.drafted

    @property
    def acceptance_length(self) -> float | None:
        return None if self.verify_steps == 0 else 1.0 + self.accepted / self.verify_steps


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one step adds to one request: its new tokens, and the text that is now certain.

    text may lag behind token_ids: a partial UTF-8 character, or a possible beginning of a stop
    word, is held back until it is decided. Only the last event of a request has finish_reason:
    "stop" (EOS or stop word), "length", "cancelled", "deadline" or "error". Then stop_reason is the
    stop word that ended the text, if one did, and stats are complete. Before, stats are None, or
    those so far if the request has running_stats.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    error: str | None = None
    stats: RequestStats | None = None


class StepEngine(Protocol):
    """One model and its KV cache, for up to max_batch_size sequences. Each sequence is in a slot,
    which the caller assigns.

    The engine keeps one length per slot. A forward appends its tokens to the caches of the slots;
    rewind shortens them again. Positions beyond a slot's length have arbitrary values, and no
    result depends on them. Not thread-safe.
    """

    vocab_size: int
    max_batch_size: int
    # The longest sequence (prompt + output) of a slot. Internally, the padding of a last step may
    # exceed it.
    max_seq_len: int
    max_step_tokens: int  # the most tokens per sequence in one forward

    def forward(self, slots: Sequence[int], tokens: Tensor, *, last_only: bool = False) -> Tensor:
        """Run `tokens` through the model, after the cached prefix of each slot.

        slots: `batch` distinct slot numbers. tokens: [batch, n] int64 with n <= max_step_tokens;
        the caller pads rows shorter than n, and rewinds afterwards. The length of every slot grows
        by n. Returns logits [batch, n, vocab], or with last_only [batch, 1, vocab] for the last
        column; float32 (float64 for a float64 engine). The next forward may reuse the tensor, so
        copy what must outlive it.
        """
        ...

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Shorten the slots to `lengths` tokens; 0 frees them. Raises ValueError if a length is
        greater than the present one.
        """
        ...

    def length(self, slot: int) -> int: ...


@runtime_checkable
class PackingEngine(Protocol):
    """A StepEngine whose sequences bring each its own number of tokens to a forward."""

    def forward_rows(
        self, slots: Sequence[int], rows: Sequence[Sequence[int]], wanted: Sequence[int]
    ) -> Tensor:
        """As StepEngine.forward, with rows of any lengths from 1 to max_step_tokens. wanted: how
        many tokens at the end of each row need logits.

        Returns logits [sum of wanted, vocab], those of the first row first. The length of every
        slot grows by that of its row.
        """
        ...


@runtime_checkable
class CopyingEngine(Protocol):
    """A StepEngine that copies what it has cached of a sequence to another slot."""

    def copy(self, source: int, slot: int, length: int) -> None:
        """Replace what `slot` holds by the first `length` tokens of `source`, which has as many and
        keeps its own. A forward then gives the same logits, bit for bit, as in `source`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Chain:
    """A sequence of `forward_chain`: after the cached prefix of `slot` come `tokens`, then `count`
    tokens, 1 or more, which the engine chooses.

    temperature 0 chooses the most likely token, of equal ones the first. Else the softmax of logits
    / temperature decides, after the filters top_k and top_p of `Sampling`. With a race [count,
    vocab] float32, the token wins that is largest after its probability is multiplied by its number
    there. Without one it is drawn, with one of the uniforms [count] in [0, 1).
    """

    slot: int
    tokens: Sequence[int]
    count: int
    temperature: float = 0.0
    uniforms: Sequence[float] = ()
    race: NDArray[Any] | None = None
    top_k: int = 0
    top_p: float = 1.0

    @property
    def is_drawn(self) -> bool:
        return self.temperature != 0.0 and self.race is None


@runtime_checkable
class ChainingEngine(Protocol):
    """A StepEngine that runs the tokens that it chooses itself, as a draft does."""

    def forward_chain(self, chains: Sequence[Chain]) -> tuple[list[list[int]], NDArray[Any] | None]:
        """Run the tokens of each chain, choose a token from the last logits, run it, and so on. The
        last token that is chosen is not run. counts fall from chain to chain.

        Returns the tokens that each chain chose, and what they were drawn from [chains, counts[0],
        vocab], which is undefined for chains that are not drawn; None if none is. From where logits
        are not finite on, the tokens of a chain are -1. A slot has grown by its tokens and count -
        1.
        """
        ...


@dataclass(frozen=True, slots=True)
class Burst:
    """Verify steps of one sequence that an engine takes by itself.

    slot: the sequence's, in both engines. unread: its last tokens, from the first that the draft
    has not read; the target has read all but the last one. draft_len: tokens to draft in a step, at
    most; 0: plain steps. room: output tokens that are left. end_ids: tokens that end it. max_ns: no
    step begins later than this after the first.

    steps [most, draft_len + 7] int64 gets a row for each step: tokens to draft, drafted ones,
    accepted ones, ns in the draft, ns in the target, the monotonic time at which its tokens were
    known, the drafts, and the target's own token, -1 if its logits are not finite. Numbers behind
    these are undefined. flags [3] int64: another thread sets the first to stop the burst before its
    next step; the second counts the rows; the third is how many tokens the next step is to draft,
    from 1 to draft_len, which another thread may change. event_fd: an eventfd that is written to
    after each row, but one behind which the burst ends in any case; -1: none.

    sampling: temperature 0 for the most likely tokens; seed and penalties do not count. Above 0,
    speculative sampling with uniforms [n] float64 in [0, 1): for each step one for each token to
    draft, then one for each draft and one more. Or, with races [n, vocab] float32, noise of the
    next n positions that draft and target share. See `Rejection` and `Coupled` in
    toolkit.speculative.acceptance.
    """

    slot: int
    unread: Sequence[int]
    draft_len: int
    room: int
    end_ids: Sequence[int]
    max_ns: int
    steps: Tensor
    flags: Tensor
    event_fd: int = -1
    sampling: Sampling = Sampling()
    uniforms: Tensor | None = None
    races: Tensor | None = None


@runtime_checkable
class BurstingEngine(Protocol):
    """A StepEngine, of the target, that takes verify steps without its caller."""

    def bursts_with(self, draft: StepEngine) -> bool:
        """Whether this draft engine can draft in a burst."""
        ...

    def burst(self, draft: StepEngine | None, burst: Burst) -> tuple[int, bool]:
        """Take steps until something ends them: an end token, no room, the time, the flag, all rows
        filled, no more numbers to draw with, or logits of either engine that are not finite, behind
        which a step has fewer drafts than it was to have, or the token -1. The slot then has all
        tokens but the last one in the target, and in the draft those that it has read.

        Returns the number of steps, and whether it ended before a step whose tokens depend on how
        sums are rounded: the caller has to take that one, with the same numbers.
        """
        ...


class Engine(Protocol):
    """A whole deployment, target and draft together."""

    def generate(self, request: GenerationRequest) -> Iterator[TokenEvent]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TensorRtLlmSpec:
    """The settings of the kinds `trt_engine` and `trtllm_pytorch` beyond an EngineSpec, with
    TensorRT-LLM's own names.
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
    # trtllm_pytorch: least batch size -> draft length
    draft_len_schedule: dict[int, int] | None = None
    max_concurrency: int | None = None  # trtllm_pytorch: beyond this batch size nothing is drafted
    # trtllm_pytorch: drafting stops for good if the last so many requests had fewer tokens per
    # step, the target's own included
    acceptance_window: int | None = None
    min_acceptance_length: float | None = None
    max_matching_ngram_size: int = 4  # trtllm_pytorch
    multiple_profiles: bool = False  # trt_engine
    opt_num_tokens: int | None = None  # trt_engine
    builder: BuilderChoice = "auto"  # trt_engine
    cuda_graph: bool = True  # trtllm_pytorch
    attn_backend: AttnBackend = "TRTLLM"  # trtllm_pytorch
    trust_remote_code: bool = False  # trtllm_pytorch: for both models
    # trtllm_pytorch: the folder of the draft while the target is loaded once; not a part of the
    # engine
    draft_dir: Path | None = None
    # trtllm_pytorch: how many of the target's layers have run where each hidden state is taken that
    # a head reads; the head's own files say it
    captured_layers: tuple[int, ...] | None = None

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size


@dataclass(frozen=True, slots=True)
class VllmSpec:
    """The settings of the kind `vllm` beyond an EngineSpec, with vLLM's own names."""

    version: str  # "0.32.0"
    dtype: VllmDtype = "auto"  # of activations and unquantized weights
    python: Path | None = None  # None: the environment that `make vllm` creates
    tp_size: int = 1
    pp_size: int = 1
    gpus_per_node: int = 8
    max_num_batched_tokens: int | None = None  # None: vLLM's own default
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float = 2.0  # on a CPU
    enable_prefix_caching: bool = True
    speculation: SpeculationKind = "none"
    draft_len_schedule: dict[int, int] | None = None  # least batch size -> draft length
    max_concurrency: int | None = None  # beyond this batch size nothing is drafted
    max_matching_ngram_size: int = 4
    samples_drafts: bool = False  # the rule `rejection`: drafts are drawn at the temperature
    trust_remote_code: bool = False  # for both models
    draft_dir: Path | None = None  # the folder of the draft while both are loaded once
    correct_sampling: bool = True  # on a CPU, where the version needs it (vLLM issue 55005)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The settings of one engine; they are the same for every kind."""

    role: Role
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_draft_len: int  # 0 for the draft
    dtype: SpecDtype = "float32"  # of activations and unquantized weights
    device: Device = "cpu"
    mode: EngineMode = "auto"
    # The kind torch: tokens of a prompt in one forward. None: its default, and for other kinds.
    prefill_chunk_len: int | None = None
    # The kind torch: of keys and values that are not quantized. None: dtype, and for other kinds.
    kv_cache_dtype: KvDtype | None = None
    tensorrt_llm: TensorRtLlmSpec | None = None  # None: for other kinds
    vllm: VllmSpec | None = None  # None: for other kinds


class EngineBackend(Protocol):
    """Build time: compiles a quantized checkpoint into an engine directory."""

    def fingerprint(self, spec: EngineSpec) -> Fingerprint: ...

    def compile(
        self, checkpoint: QuantizedCheckpoint, spec: EngineSpec, out_dir: Path, progress: Progress
    ) -> CompiledEngine: ...


class EngineLoader(Protocol):
    """Run time, for the kinds that have a StepEngine: loads an engine directory."""

    def load(self, engine_dir: Path, *, threads: int | None = None) -> StepEngine: ...
