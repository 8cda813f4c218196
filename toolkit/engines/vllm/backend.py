"""The `vllm` kind. It builds nothing: an engine directory is a checkpoint and the arguments it is
loaded with.

The target's directory holds the checkpoint in the format that vLLM reads, and `vllm_args.json`. The
draft's holds only a checkpoint, which the target's arguments name.
"""

from __future__ import annotations

from pathlib import Path

from toolkit.engines.vllm.arguments import engine_args, write_engine_args
from toolkit.interfaces import EngineSpec, Fingerprint, Progress, VllmSpec
from toolkit.pipeline.files import link_or_copy
from toolkit.records.build import CompiledEngine, QuantizedCheckpoint

__all__ = ["VllmBackend"]


class VllmBackend:
    """Implements EngineBackend."""

    def fingerprint(self, spec: EngineSpec) -> Fingerprint:
        return {"vllm": _settings(spec).version}

    def compile(
        self, checkpoint: QuantizedCheckpoint, spec: EngineSpec, out_dir: Path, progress: Progress
    ) -> CompiledEngine:
        """Place the checkpoint, and write the arguments."""
        settings = _settings(spec)
        progress(0, None, f"{spec.role}: placing the checkpoint")
        for file in sorted(checkpoint.path.iterdir()):
            if file.is_file():
                link_or_copy(file, out_dir / file.name)
        if spec.role == "target":
            write_engine_args(out_dir, engine_args(spec, settings, checkpoint.kv_cache_quant_algo))
        return CompiledEngine(
            role=spec.role,
            path=out_dir,
            kind="vllm",
            mode="runtime",
            dtype=settings.dtype,
            device=spec.device,
            quant_algo=checkpoint.quant_algo,
            kv_cache_quant_algo=checkpoint.kv_cache_quant_algo,
            fp8_compute=None,
            max_batch_size=spec.max_batch_size,
            max_input_len=spec.max_input_len,
            max_seq_len=spec.max_seq_len,
            max_draft_len=spec.max_draft_len,
            vocab_size=checkpoint.vocab_size,
            weight_bytes=checkpoint.weight_bytes,
            notes=(),
        )


def _settings(spec: EngineSpec) -> VllmSpec:
    assert spec.vllm is not None, "the kind vllm needs a VllmSpec"
    return spec.vllm
