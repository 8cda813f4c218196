"""Load a compiled engine: the code of its package works on memory that this module allocates.

Weights are packed when the engine is loaded. They and the KV caches are bound to the package
(`load_constants`, user-managed). So there is one copy of every tensor, and a call passes four small
tensors.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from toolkit.engines.embedded.compile import Decoder, capacity_of, prepare
from toolkit.engines.embedded.directory import KERNELS, PACKAGE, WEIGHTS, EngineDirectory
from toolkit.engines.embedded.engine import EmbeddedEngine, Runner
from toolkit.engines.embedded.kernels import load_library
from toolkit.engines.embedded.weights import load_weights
from toolkit.errors import StageError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["load_package"]


def load_package(directory: EngineDirectory) -> EmbeddedEngine:
    """Load the engine; the caller has checked digests and machine. Raises StageError if the package
    and the weights do not belong together.
    """
    ops = load_library(directory.path / KERNELS, directory.built_with["namespace"])
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
    return EmbeddedEngine(
        _bind(directory.path / PACKAGE, dict(decoder.named_buffers())),
        vocab_size=directory.shape.vocab_size,
        max_batch_size=directory.max_batch_size,
        max_seq_len=directory.max_seq_len,
        max_step_tokens=directory.max_step_tokens,
        capacity=capacity_of(directory.max_seq_len, directory.max_step_tokens),
    )


def _bind(package: Path, buffers: dict[str, Tensor]) -> Runner:
    """A runner of the package on these buffers. The runner keeps them alive."""
    loader = _unpacked(package)
    names = loader.get_constant_fqns()
    missing = sorted(set(names) - set(buffers))
    if missing:
        raise StageError(
            "load",
            f"the package needs tensors that the weights do not have ({missing[0]})",
            where=package,
            hint="build again",
        )
    loader.load_constants({name: buffers[name] for name in names}, False, True, True)

    def run(tokens: Tensor, slots: Tensor, lengths: Tensor, columns: Tensor) -> Tensor:
        logits: Tensor = loader.boxed_run([tokens, slots, lengths, columns])[0]
        return logits

    run.buffers = buffers  # type: ignore[attr-defined]  # the package has raw pointers into them
    return run


def _unpacked(package: Path) -> torch._C._aoti.AOTIModelPackageLoader:
    """Open the package. The loader unpacks it into the temporary directory and does not remove it,
    so it gets a directory of its own, which is removed here.

    By then the library is mapped into memory and does not need its file.
    """
    private = tempfile.mkdtemp(prefix="toolkit-engine-")
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = private
    try:
        return torch._C._aoti.AOTIModelPackageLoader(str(package), "model", False, 1, -1)
    except RuntimeError as exc:
        raise StageError(
            "load",
            f"the package cannot be loaded ({str(exc).splitlines()[0]})",
            where=package,
            hint="build again",
        ) from exc
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        shutil.rmtree(private, ignore_errors=True)
