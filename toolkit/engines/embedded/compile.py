"""Compile the decoder with torch.export and AOTInductor into one package. It runs every step, from
a draft token to a chunk of a prompt.

The numbers of sequences, of tokens and of columns with logits are dynamic; a step packs the tokens
of its sequences, and each has its own number of them. The package holds only code. Embeddings and
LM head are buffers, which the loader binds to its own memory (`package.py`); the layers, with
tables and KV caches, are held by the kernel library, and one buffer has their number. So nothing is
copied or passed per call, and the time to compile does not depend on the weights.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.engines.embedded.kernels import (
    KernelOps,
    build_library,
    load_library,
    pack,
)
from toolkit.engines.embedded.model import Step, Weights, build, decode, mapped
from toolkit.engines.embedded.rope import rope_tables
from toolkit.errors import StageError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.checkpoints.shape import ModelShape
    from toolkit.interfaces import EngineSpec, Progress

__all__ = ["Decoder", "compile_package", "private_cache"]

OPTIONS = {
    "aot_inductor.package_constants_in_so": False,
    # Inductor compiles only norms and activations: microseconds, less than a second thread takes to
    # start.
    "cpp.threads": 1,
}


def compile_package(
    shape: ModelShape,
    tensors: dict[str, Tensor],
    spec: EngineSpec,
    max_step_tokens: int,
    *,
    kernels: Path,
    package: Path,
    progress: Progress,
) -> None:
    """Write the kernel library and the .pt2. Raises StageError with the compiler's last lines."""
    assert spec.dtype != "auto"  # the config of this engine kind has no auto
    progress(0, None, f"{spec.role}: compiling kernels, then the decoder")
    ops = load_library(kernels, build_library(kernels))
    progress(0, None, f"{spec.role}: compiling the decoder")
    compute = getattr(torch, spec.dtype)
    ends = replace(build(shape, tensors, rope_tables(shape, 1)), layers=())
    module = Decoder(pack(ends, compute), 0, ops, compute)
    batch = torch.export.Dim("batch", min=1, max=max(2, spec.max_batch_size))
    most = max(2, spec.max_batch_size) * max_step_tokens
    tokens = torch.export.Dim("tokens", min=1, max=most)
    columns = torch.export.Dim("columns", min=1, max=most)
    example = (
        torch.zeros(7, dtype=torch.int64),
        torch.arange(2),
        torch.zeros(2, dtype=torch.int64),
        torch.tensor([0, 3]),
        torch.arange(5),
    )
    try:
        with _quiet(), private_cache(), torch.no_grad():
            exported = torch.export.export(
                module,
                example,
                dynamic_shapes=(
                    {0: tokens},
                    {0: batch},
                    {0: batch},
                    {0: batch},
                    {0: columns},
                ),
                strict=False,
            )
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(package), inductor_configs=OPTIONS
            )
    except Exception as exc:
        # Inductor raises many types of exceptions; the text of each holds the compiler's output.
        tail = "\n".join(str(exc).strip().splitlines()[-12:])
        raise StageError(
            "compile",
            f"AOTInductor failed:\n{tail}",
            hint="set engine.mode: eager to build without it",
        ) from exc


class Decoder(torch.nn.Module):
    """`decode` as a module for torch.export. Every tensor that is not an input is a buffer, named
    after its place in Weights, but for those of the layers: they are held under `number`.
    """

    def __init__(self, weights: Weights, number: int, ops: KernelOps, dtype: torch.dtype) -> None:
        super().__init__()
        self._ops, self._dtype = ops, dtype
        self._weights = replace(weights, layers=())
        self._names: dict[int, str] = {}
        for name, tensor in _tensors(self._weights, "w"):
            self._names[id(tensor)] = name
            self.register_buffer(name, tensor)
        # A row, since inductor writes the values of short vectors into the code.
        self.register_buffer("layers", torch.tensor([[number]]))

    def forward(
        self, tokens: Tensor, slots: Tensor, lengths: Tensor, starts: Tensor, columns: Tensor
    ) -> Tensor:
        """A `Runner`: see engine.py."""
        buffers = dict(self.named_buffers())
        weights: Weights = mapped(self._weights, lambda tensor: buffers[self._names[id(tensor)]])
        step = Step(slots, lengths, starts, weights.cos, weights.sin)
        ops = self._ops.held(buffers["layers"])
        return decode(weights, ops, tokens, step, columns, [], self._dtype)


def _tensors(node: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor in a tree of dataclasses and tuples; `name` is the root's."""
    if isinstance(node, torch.Tensor):
        yield name, node
    elif isinstance(node, tuple):
        for i, child in enumerate(node):
            yield from _tensors(child, f"{name}_{i}")
    elif is_dataclass(node):
        for field in fields(node):
            yield from _tensors(getattr(node, field.name), f"{name}_{field.name}")


@contextlib.contextmanager
def private_cache() -> Iterator[None]:
    """Give inductor a cache that nobody else can write to. By default it loads code from a folder
    of the shared temporary directory whose name everybody knows. What it would save from one build
    to the next is little, since an engine is reused by its content.
    """
    variable = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(variable)
    os.environ[variable] = str(_cache_folder())
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


@functools.cache
def _cache_folder() -> Path:
    """One for the process: inductor remembers files in it from one compilation to the next."""
    folder = Path(tempfile.mkdtemp(prefix="toolkit-inductor-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's warnings about its own internals during export; users cannot act on them."""
    logger = logging.getLogger("torch._inductor")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
