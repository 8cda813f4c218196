"""The values of the `bls` layout for repositories that TensorRT-LLM's own backend serves.

The engines lie in the repository, below the models that serve them. The configuration names them by
their path in the container, since the backend does not resolve relative paths.

Memory: every model takes its fraction of the memory that is free when it loads, and the order of
loading is not fixed. Fractions that add up to the configured one stay within it in either order.

Orchestrator mode: without it, two engines with several ranks do not start (TRT#3797). On one node
the backend spawns the ranks. On several nodes mpirun starts them, and the configuration names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.config.schema import TritonConfig
from toolkit.facts.versions import NEW_NAMES, VERSIONS
from toolkit.triton.package.layout_bls import Bls, EngineModel, settings_of
from toolkit.triton.tensors import contract
from toolkit.words import AcceptanceChoice, LogProbSource

__all__ = [
    "ENGINES",
    "PLAIN_YAML",
    "REPOSITORY",
    "SPECULATION_ARGUMENTS",
    "Engines",
    "bls_of_engines",
    "plain_arguments",
    "ranks_of",
]

REPOSITORY = "/models"  # where the container mounts the repository
# For the PyTorch flow, where one model runs both engines.
ENGINES = f"{REPOSITORY}/{contract.MODEL}/1/engines"
# Its arguments of LLM() that only speculation needs. The plain arm runs without them.
SPECULATION_ARGUMENTS = ("speculative_config", "disable_overlap_scheduler")
PLAIN_YAML = "plain.yaml"  # beside model.yaml, for the plain arm
DRAFT_SHARE = 0.1  # of the memory for KV caches


def plain_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments of LLM(), without speculation."""
    return {name: value for name, value in settings.items() if name not in SPECULATION_ARGUMENTS}


@dataclass(frozen=True, slots=True)
class Engines:
    """Two engines of the engine flow, and their placement. max_draft_len 0: the target alone."""

    version: str  # of TensorRT-LLM
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_draft_len: int
    tp_size: int = 1
    pp_size: int = 1
    gpus_per_node: int = 8
    free_gpu_memory_fraction: float = 0.9
    draft_share: float = DRAFT_SHARE
    enable_block_reuse: bool = True
    acceptance: AcceptanceChoice = "auto"
    max_prompt_tokens: int | None = None  # longer prompts are decoded plainly
    adaptive: Mapping[str, Any] | None = None  # how draft lengths are chosen; None: they are fixed
    vocab_size: int | None = None  # logits may be padded beyond it

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def nodes(self) -> int:
        """How many nodes the ranks of one engine need. Both engines share the GPUs."""
        return -(-self.world_size // self.gpus_per_node)


def ranks_of(engines: Engines) -> dict[str, tuple[int, ...]]:
    """The MPI ranks of each engine model on several nodes. Rank 0 is the orchestrator.

    Launchers number the ranks node by node. So each node first has its ranks of the target, then as
    many ranks of the draft, and both engines' ranks on a node share its GPUs.
    """
    models = (contract.MODEL, contract.DRAFT_MODEL) if engines.max_draft_len else (contract.MODEL,)
    ranks: dict[str, tuple[int, ...]] = dict.fromkeys(models, ())
    for first in range(0, engines.world_size, engines.gpus_per_node):
        on_node = min(engines.gpus_per_node, engines.world_size - first)
        for position, model in enumerate(models):
            start = 1 + len(models) * first + position * on_node
            ranks[model] += tuple(range(start, start + on_node))
    return ranks


def bls_of_engines(engines: Engines, triton: TritonConfig, end_ids: Sequence[int]) -> Bls:
    """The values of the `bls` layout for these engines."""
    speculates = engines.max_draft_len > 0
    share = engines.draft_share if speculates else 0.0
    # The backend accepts by token equality unless it receives logits.
    acceptance = "sample_match" if engines.acceptance == "auto" else engines.acceptance
    # An engine for external drafts returns no log-probabilities, but it returns logits.
    log_probs: LogProbSource = "logits" if speculates else "engine"
    return Bls(
        target=_engine(contract.MODEL, engines, 1.0 - share),
        draft=_engine(contract.DRAFT_MODEL, engines, share) if speculates else None,
        max_batch_size=engines.max_batch_size,
        decoupled=triton.decoupled,
        end_ids=tuple(end_ids),
        request_timeout_s=triton.request_timeout_s,
        bls_queue_size=triton.max_queue_size,
        names=dict(zip(NEW_NAMES, VERSIONS[engines.version].triton_names, strict=True)),
        settings=settings_of(
            triton,
            max_input_len=engines.max_input_len,
            max_seq_len=engines.max_seq_len,
            max_draft_len=engines.max_draft_len,
            max_prompt_tokens=engines.max_prompt_tokens,
            adaptive=engines.adaptive,
            acceptance=acceptance,
            seeds="call",
            log_probs=log_probs,
            end_token="hidden",
            keeps_slots=False,
            vocab_size=engines.vocab_size,
        ),
    )


def _engine(model: str, engines: Engines, share: float) -> EngineModel:
    parameters = {
        "max_beam_width": "1",
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": f"{REPOSITORY}/{model}/1/engine",
        "batch_scheduler_policy": "guaranteed_no_evict",
        "kv_cache_free_gpu_mem_fraction": f"{engines.free_gpu_memory_fraction * share:.4g}",
        "exclude_input_in_output": "false",
        # If true, log-probabilities count only the tokens that top-k keeps: all 0 when greedy.
        "normalize_log_probs": "false",
        # Speculation by rounds depends on reuse, whatever the configuration states.
        "enable_kv_cache_reuse": str(
            engines.max_draft_len > 0 or engines.enable_block_reuse
        ).lower(),
        "gpu_device_ids": ",".join(map(str, range(min(engines.world_size, engines.gpus_per_node)))),
    }
    if engines.nodes > 1:
        parameters["participant_ids"] = ",".join(map(str, ranks_of(engines)[model]))
        parameters["num_nodes"] = str(engines.nodes)
    return EngineModel("tensorrtllm", parameters)
