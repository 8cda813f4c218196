"""The stage `compile`: compile a quantized checkpoint into an engine of the YAML's kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.config.schema import DeploymentConfig
from toolkit.engines.spec import engine_spec
from toolkit.facts.heads import head_reader
from toolkit.interfaces import EngineSpec, Progress
from toolkit.pipeline.stage import Finished, Stage
from toolkit.records.build import CompiledEngine, QuantizedCheckpoint
from toolkit.words import Role
from toolkit.workflows.deployment import check_prompt_lengths, with_advice
from toolkit.workflows.folders import Workplace
from toolkit.workflows.stages.keys import engine_fingerprint, spec_parts

__all__ = ["compile_stage"]


def compile_stage(config: DeploymentConfig, role: Role, workplace: Workplace) -> Stage:
    """The stage `compile/ROLE`. workplace: its store remembers the compiler's fingerprint."""
    from toolkit.engines import stage

    kind, capabilities = config.engine.kind, config.capabilities
    loads_draft = (
        capabilities.loads_draft_with_target and role == "target" and config.draft is not None
    )
    checkpoints = (f"quantize/{role}", *(("quantize/draft",) if loads_draft else ()))
    is_advised = capabilities.fixes_draft_len and config.speculation.is_measured
    needs = (*checkpoints, *(("tune",) if is_advised else ()))

    def spec_of(finished: Finished) -> EngineSpec:
        return engine_spec(with_advice(config, finished) if is_advised else config, role)

    def parts(finished: Finished) -> Mapping[str, Any]:
        spec = spec_of(finished)
        inputs = {
            name: finished[need].entry.digest
            for name, need in zip(("checkpoint", "draft"), checkpoints, strict=False)
        }
        return {
            "config": {"kind": kind, **spec_parts(spec)},
            "inputs": inputs,
            "fingerprint": engine_fingerprint(kind, spec, workplace.store / ".fingerprints.json"),
        }

    def run(finished: Finished, out_dir: Path, progress: Progress) -> CompiledEngine:
        check_prompt_lengths(config)
        spec = spec_of(finished)
        if loads_draft:
            draft = finished["quantize/draft"].record
            spec = _with_draft(spec, draft, finished[checkpoints[0]].record)
        return stage.compile_engine(kind, finished[checkpoints[0]].record, spec, out_dir, progress)

    return Stage(f"compile/{role}", stage.VERSION, CompiledEngine, needs, parts, run)


def _with_draft(
    spec: EngineSpec, draft: QuantizedCheckpoint, target: QuantizedCheckpoint
) -> EngineSpec:
    """The spec with the folder of the draft, for the kinds that load it with the target; of a head
    also the target's layers that it reads.
    """
    from toolkit.checkpoints.heads import captured_layers, read_head
    from toolkit.checkpoints.shape import read_shape
    from toolkit.engines.vllm.backend import served_checkpoint

    tensorrt_llm, vllm = spec.tensorrt_llm, spec.vllm
    if tensorrt_llm is not None and tensorrt_llm.speculation != "none":
        placed = replace(tensorrt_llm, draft_dir=draft.path)
        if placed.speculation == "eagle3":
            layers = captured_layers(
                read_head(draft.path),
                read_shape(target.path).num_layers,
                from_zero=head_reader("trtllm_pytorch", placed.version).counts_from_zero,
            )
            placed = replace(placed, captured_layers=layers)
        return replace(spec, tensorrt_llm=placed)
    if vllm is not None and vllm.speculation != "none":
        return replace(spec, vllm=replace(vllm, draft_dir=served_checkpoint(draft)))
    return spec
