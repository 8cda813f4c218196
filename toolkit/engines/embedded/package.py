"""Loading a compiled engine: the package's code on memory of ours.

Weights are packed at load and bound to the package together with the KV caches (`load_constants`,
user-managed), so there is one copy of everything, and a call passes four small tensors.
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
    """The caller has checked digests and machine. Raises StageError when the package and the
    weights do not belong together.
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
    """The package on these buffers, which the closure keeps alive."""
    loader = _unpacked(package)
    names = loader.get_constant_fqns()
    strange = sorted(set(names) - set(buffers))
    if strange:
        raise StageError(
            "load",
            f"asks for tensors the weights do not have ({strange[0]})",
            where=package,
            hint="build again",
        )
    loader.load_constants({name: buffers[name] for name in names}, False, True, True)

    def run(tokens: Tensor, slots: Tensor, lengths: Tensor, columns: Tensor) -> Tensor:
        logits: Tensor = loader.boxed_run([tokens, slots, lengths, columns])[0]
        return logits

    run.buffers = buffers  # type: ignore[attr-defined]  # the package holds bare pointers into them
    return run


def _unpacked(package: Path) -> torch._C._aoti.AOTIModelPackageLoader:
    """Open the package. It unpacks itself into the temporary directory and stays there: give it a
    private one, and remove that.

    The library is mapped by then, so its file may go.
    """
    private = tempfile.mkdtemp(prefix="toolkit-engine-")
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = private
    try:
        return torch._C._aoti.AOTIModelPackageLoader(str(package), "model", False, 1, -1)
    except RuntimeError as exc:
        raise StageError(
            "load",
            f"package cannot be loaded ({str(exc).splitlines()[0]})",
            where=package,
            hint="build again",
        ) from exc
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        shutil.rmtree(private, ignore_errors=True)
