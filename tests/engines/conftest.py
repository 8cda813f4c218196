"""Checkpoints that ModelOpt quantized, with its own simulation's logits, and engines over the
kernel library.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import write_byte_tokenizer, write_checkpoint
from tests.support.exports import EXPORTS, TOKENS, Export
from tests.support.modelopt_exports import export_hf
from toolkit.checkpoints import quantized
from toolkit.engines.embedded.engine import EmbeddedEngine, eager_runner
from toolkit.engines.embedded.kernels import (
    KernelOps,
    build_library,
    caches_by_position,
    load_library,
)
from toolkit.engines.embedded.package import prepare
from toolkit.engines.embedded.weights import fuse, unit_kv_scales
from toolkit.facts.embedded import PREFILL_TOKENS, slot_tokens
from toolkit.pipeline.toolchain import compiler_path
from toolkit.words import ComputeDtype, KvDtype


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Models this small gain nothing from more, and threads that wait for one another on a busy
    machine cost a great deal.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Export]:
    """One of EXPORTS by name, made when first asked for. float32 sources, so that the simulation
    is as exact as the engine.
    """
    from toolkit.quantize import modelopt
    from toolkit.quantize.algorithms import ALGORITHMS
    from toolkit.quantize.source import open_source

    made: dict[str, Export] = {}

    def make(name: str) -> Export:
        family, algo, kv = EXPORTS[name]
        folder = tmp_path_factory.mktemp(name)
        source = write_checkpoint(folder / "source", family=family, dtype="float32")
        with modelopt.quiet(), torch.no_grad():
            model = modelopt.load_model(open_source(source))
            before = model(TOKENS, use_cache=False).logits
            modelopt.quantize_model(
                model, ALGORITHMS[algo], kv, lambda m: [m(TOKENS), m(TOKENS.flip(0))]
            )
            simulated = model(TOKENS, use_cache=False).logits
            export_hf(model, "float32", folder / "export")
        write_byte_tokenizer(folder / "export")
        return Export(folder / "export", algo, kv, before, simulated)

    def get(name: str) -> Export:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> KernelOps:
    """The kernel library, compiled for this machine; tests of it skip where there is no
    compiler.
    """
    if compiler_path() is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("kernels") / "kernels.so"
    return load_library(library, build_library(library))


@pytest.fixture(scope="session")
def kernel_engine(kernels: KernelOps) -> Callable[..., EmbeddedEngine]:
    """(checkpoint, dtype, dtype of its KV cache) -> the model step by step over the kernels,
    without AOTInductor: 3 slots of 96. ops: kernels for another processor.
    """

    def make(
        path: Path,
        dtype: ComputeDtype = "float32",
        kv_dtype: KvDtype | None = None,
        ops: KernelOps = kernels,
    ) -> EmbeddedEngine:
        source = quantized.open_checkpoint(path)
        tensors = fuse(source)
        if source.quantization.kv_cache_quant_algo == "FP8":
            kv_dtype = "fp8"
        elif kv_dtype == "fp8":
            tensors |= unit_kv_scales(source.shape.num_layers)
        weights, caches = prepare(
            source.shape, tensors, dtype, 3, 96, PREFILL_TOKENS, kv_dtype=kv_dtype or dtype
        )
        return EmbeddedEngine(
            eager_runner(weights, ops, caches, getattr(torch, dtype)),
            vocab_size=source.shape.vocab_size,
            max_batch_size=3,
            max_seq_len=96,
            max_step_tokens=PREFILL_TOKENS,
            capacity=slot_tokens(96),
            caches=caches_by_position(caches),
        )

    return make
