"""Load a compiled engine: the code of its package works on memory that this module allocates.

Weights are packed when the engine is loaded. The kernel library holds the layers and their KV
caches, and the rest is bound to the package, so there is one copy of every tensor, and a call
passes five small ones.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.engines.embedded.compile import Decoder
from toolkit.engines.embedded.directory import KERNELS, PACKAGE, WEIGHTS, EngineDirectory
from toolkit.engines.embedded.engine import EmbeddedEngine
from toolkit.engines.embedded.kernels import (
    caches_by_position,
    kernel_caches,
    load_library,
    pack,
)
from toolkit.engines.embedded.model import Weights, build
from toolkit.engines.embedded.rope import rope_tables
from toolkit.engines.embedded.weights import load_weights
from toolkit.errors import StageError
from toolkit.facts.embedded import slot_tokens
from toolkit.interfaces import Burst, Chain, Sampling, StepEngine
from toolkit.words import ComputeDtype, KvDtype

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.checkpoints.shape import ModelShape

__all__ = ["PackagedEngine", "load_package", "prepare"]

_NONE = torch.empty(0)  # in place of a race
_NO_UNIFORMS = torch.empty(0, dtype=torch.float64)


class PackagedEngine(EmbeddedEngine):
    """Implements ChainingEngine and BurstingEngine.

    namespace: of the library that the package's class is from. Two engines can share a burst if
    theirs is the same.
    """

    def __init__(self, package: Any, namespace: str, **settings: Any) -> None:
        super().__init__(package.run, **settings)
        self._package = package
        self._chain = package.chain
        self._namespace = namespace

    def forward_chain(self, chains: Sequence[Chain]) -> tuple[list[list[int]], NDArray[Any] | None]:
        """See ChainingEngine.forward_chain. Raises ValueError for tokens or slots that do not fit,
        and for counts that do not fall.
        """
        slots = [chain.slot for chain in chains]
        widths, counts = [len(chain.tokens) for chain in chains], [chain.count for chain in chains]
        if min(counts) < 1 or counts != sorted(counts, reverse=True):
            raise ValueError(f"counts {counts}; they have to be 1 or more and to fall")
        places = self._places(slots, widths, counts[0] - 1)
        ends = list(itertools.accumulate(widths))
        starts = tuple(end - width for end, width in zip(ends, widths, strict=True))
        is_drawn = any(chain.is_drawn for chain in chains)
        uniforms = np.zeros((len(chains), counts[0]) if is_drawn else 0)
        for row, chain in enumerate(chains):
            if chain.is_drawn:
                uniforms[row, : chain.count] = chain.uniforms
        with torch.inference_mode():
            ids, probabilities = self._chain(
                torch.from_numpy(np.array([token for chain in chains for token in chain.tokens])),
                self._index(tuple(slots)),
                places,
                self._index(starts),
                self._index(tuple(end - 1 for end in ends)),
                self._index(tuple(counts)),
                _shapes(chains),
                torch.from_numpy(uniforms),
                [_NONE if chain.race is None else torch.from_numpy(chain.race) for chain in chains],
            )
        for slot, width, count in zip(slots, widths, counts, strict=True):
            self._lengths[slot] += width + count - 1
        return (
            [chosen[:count] for chosen, count in zip(ids.tolist(), counts, strict=True)],
            probabilities.numpy() if is_drawn else None,
        )

    def bursts_with(self, draft: StepEngine) -> bool:
        if not isinstance(draft, PackagedEngine) or draft._namespace != self._namespace:
            return False
        return draft.vocab_size == self.vocab_size  # nothing looks at ids in between

    def burst(self, draft: StepEngine | None, burst: Burst) -> tuple[int, bool]:
        """See BurstingEngine.burst. Raises ValueError for tokens that do not fit."""
        slot, ids = burst.slot, list(burst.unread)
        assert draft is None or isinstance(draft, PackagedEngine)
        self._places([slot], [1], burst.room - 1)
        draft_length = 0
        if draft is not None:
            draft._places([slot], [len(ids)], burst.room - 1)
            draft_length = draft.length(slot)
        with torch.inference_mode():
            count, length, draft_length, is_undecided = self._package.burst(
                None if draft is None else draft._package,
                torch.from_numpy(np.array(ids)),
                slot,
                self._lengths[slot],
                draft_length,
                burst.draft_len,
                burst.room,
                self._index(tuple(burst.end_ids)),
                len(burst.steps),
                burst.max_ns,
                burst.steps,
                burst.flags,
                burst.event_fd,
                _shapes([burst.sampling]),
                _NO_UNIFORMS if burst.uniforms is None else burst.uniforms,
                _NONE if burst.races is None else burst.races,
            )
        self._lengths[slot] = length
        if draft is not None:
            draft._lengths[slot] = draft_length
        return count, is_undecided


def _shapes(requests: Sequence[Chain | Sampling]) -> Tensor:
    """[n, 3] float64."""
    return torch.from_numpy(
        np.array([(each.temperature, each.top_k, each.top_p) for each in requests], np.float64)
    )


def load_package(directory: EngineDirectory) -> PackagedEngine:
    """Load the engine; the caller has checked digests and machine. Raises StageError if the package
    and the weights do not belong together.
    """
    namespace = directory.built_with["namespace"]
    ops = load_library(directory.path / KERNELS, namespace)
    weights, caches = prepare(
        directory.shape,
        load_weights(directory.path / WEIGHTS),
        directory.dtype,
        directory.max_batch_size,
        directory.max_seq_len,
        directory.max_step_tokens,
        kv_dtype=directory.kv_dtype,
    )
    file = directory.path / PACKAGE
    package = _unpacked(file, namespace)
    number = ops.hold(weights, caches)
    weakref.finalize(package, ops.let_go, number)
    decoder = Decoder(weights, number, ops, getattr(torch, directory.dtype))
    _bind(file, package, dict(decoder.named_buffers()))
    return PackagedEngine(
        package,
        namespace,
        vocab_size=directory.shape.vocab_size,
        max_batch_size=directory.max_batch_size,
        max_seq_len=directory.max_seq_len,
        max_step_tokens=directory.max_step_tokens,
        capacity=slot_tokens(directory.max_seq_len, directory.max_step_tokens),
        caches=caches_by_position(caches),
    )


def prepare(
    shape: ModelShape,
    tensors: dict[str, Tensor],
    dtype: ComputeDtype,
    slots: int,
    max_seq_len: int,
    max_step_tokens: int,
    *,
    kv_dtype: KvDtype,
) -> tuple[Weights, list[tuple[Tensor, Tensor]]]:
    """(packed weights, empty caches) of an engine."""
    capacity, compute = slot_tokens(max_seq_len, max_step_tokens), getattr(torch, dtype)
    weights = pack(build(shape, tensors, rope_tables(shape, capacity)), compute)
    kept = torch.uint8 if kv_dtype == "fp8" else getattr(torch, kv_dtype)
    return weights, kernel_caches(weights, slots, capacity, kept)


def _bind(file: Path, package: Any, buffers: dict[str, Tensor]) -> None:
    """Let the package (package.cpp) work on these buffers. While it runs, other threads of Python
    run too.
    """
    names = package.names()
    missing = sorted(set(names) - set(buffers))
    if missing:
        raise StageError(
            "load",
            f"the package needs tensors that the weights do not have ({missing[0]})",
            where=file,
            hint="build again",
        )
    package.bind({name: buffers[name] for name in names})


def _unpacked(file: Path, namespace: str) -> Any:
    """Open the package. The loader unpacks it into the temporary directory and does not remove it,
    so it gets a directory of its own, which is removed here.

    By then the library is mapped into memory and does not need its file.
    """
    private = tempfile.mkdtemp(prefix="toolkit-engine-")
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = private
    try:
        return getattr(torch.classes, namespace).Package(str(file))
    except RuntimeError as exc:
        raise StageError(
            "load",
            f"the package cannot be loaded ({str(exc).splitlines()[0]})",
            where=file,
            hint="build again",
        ) from exc
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        shutil.rmtree(private, ignore_errors=True)
