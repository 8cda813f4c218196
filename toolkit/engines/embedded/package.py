"""Load a compiled engine: the code of its package works on memory that this module allocates.

Weights are packed when the engine is loaded. They and the KV caches are bound to the package, so
there is one copy of every tensor, and a call passes four small tensors.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.engines.embedded.compile import Decoder, prepare
from toolkit.engines.embedded.directory import KERNELS, PACKAGE, WEIGHTS, EngineDirectory
from toolkit.engines.embedded.engine import EmbeddedEngine, Runner
from toolkit.engines.embedded.kernels import caches_by_position, load_library
from toolkit.engines.embedded.weights import load_weights
from toolkit.errors import StageError
from toolkit.facts.embedded import slot_tokens

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["load_package"]


def load_package(directory: EngineDirectory) -> EmbeddedEngine:
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
        fp8_kv=directory.kv_cache_quant_algo == "FP8",
    )
    decoder = Decoder(weights, caches, ops, getattr(torch, directory.dtype))
    file = directory.path / PACKAGE
    return EmbeddedEngine(
        _bind(file, _unpacked(file, namespace), dict(decoder.named_buffers())),
        vocab_size=directory.shape.vocab_size,
        max_batch_size=directory.max_batch_size,
        max_seq_len=directory.max_seq_len,
        max_step_tokens=directory.max_step_tokens,
        capacity=slot_tokens(directory.max_seq_len, directory.max_step_tokens),
        caches=caches_by_position(caches),
    )


def _bind(file: Path, package: Any, buffers: dict[str, Tensor]) -> Runner:
    """A runner of the package (package.cpp) on these buffers. While it runs, other threads of
    Python run too.
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
    run: Runner = package.run
    return run


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
