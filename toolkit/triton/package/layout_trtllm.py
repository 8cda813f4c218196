"""The repositories that TensorRT-LLM's own backends serve: what the `bls` layout is filled with for
two engines.

Engines lie in the repository, beneath the models that serve them, and are named by the path that
the repository has in the container, since the backend resolves no relative one.

Memory: every model takes its fraction of what is free when it loads, in an order that nobody
promises. Fractions that add up to the one that is asked for keep to it in either order.
Orchestrator mode: without it two engines of several ranks do not start (TRT#3797); one node's ranks
are spawned by the backend, ranks of several nodes are given by mpirun and named here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.config.schema import TritonConfig
from toolkit.facts.versions import NEW_NAMES, VERSIONS
from toolkit.triton.package.layout_bls import Bls, EngineModel, settings_of
from toolkit.triton.tensors import contract
from toolkit.words import AcceptanceChoice

__all__ = ["ENGINES", "REPOSITORY", "Engines", "bls_of_engines", "ranks_of"]

REPOSITORY = "/models"  # where the repository is mounted in the container
ENGINES = (
    f"{REPOSITORY}/{contract.MODEL}/1/engines"  # of the PyTorch flow, which has one model for both
)
DRAFT_SHARE = 0.1  # of the memory for KV caches


@dataclass(frozen=True, slots=True)
class Engines:
    """Two engines of the engine flow, and how they are placed. max_draft_len 0: the target
    alone.
    """

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
    vocab_size: int | None = None  # logits may be padded beyond it

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def nodes(self) -> int:
        """Of one engine's ranks; both engines share the GPUs."""
        return -(-self.world_size // self.gpus_per_node)


def ranks_of(engines: Engines) -> dict[str, tuple[int, ...]]:
    """The MPI ranks of each engine model where nothing is spawned: 0 is the orchestrator.

    Launchers number the ranks node by node, so each node has its share of the target, then the same
    of the draft: the GPUs of a node are those of both engines' ranks on it.
    """
    models = (contract.MODEL, contract.DRAFT_MODEL) if engines.max_draft_len else (contract.MODEL,)
    ranks: dict[str, tuple[int, ...]] = dict.fromkeys(models, ())
    for first in range(0, engines.world_size, engines.gpus_per_node):
        here = min(engines.gpus_per_node, engines.world_size - first)
        for position, model in enumerate(models):
            start = 1 + len(models) * first + position * here
            ranks[model] += tuple(range(start, start + here))
    return ranks


def bls_of_engines(engines: Engines, triton: TritonConfig, end_ids: Sequence[int]) -> Bls:
    speculates = engines.max_draft_len > 0
    share = engines.draft_share if speculates else 0.0
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
            # Token equality is how the backend accepts unless it is sent logits.
            acceptance="sample_match" if engines.acceptance == "auto" else engines.acceptance,
            seeds="call",
            # The decoder of an engine for external drafts writes no log-probabilities; its logits
            # are there.
            log_probs="logits" if speculates else "engine",
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
        # else they are taken over the tokens kept by top-k: all 0 in greedy decoding
        "normalize_log_probs": "false",
        # Rounds depend on it, whatever the rest of the deployment wants.
        "enable_kv_cache_reuse": "true"
        if engines.max_draft_len or engines.enable_block_reuse
        else "false",
        "gpu_device_ids": ",".join(map(str, range(min(engines.world_size, engines.gpus_per_node)))),
    }
    if engines.nodes > 1:
        parameters["participant_ids"] = ",".join(map(str, ranks_of(engines)[model]))
        parameters["num_nodes"] = str(engines.nodes)
    return EngineModel("tensorrtllm", parameters)
