"""Judge a target whose own layers are to draft: multi-token prediction (MTP).

The layers lie in the target's checkpoint behind its last layer; config.json counts them. Models
that have them are mixtures of experts with latent attention (DeepSeek-V3, GLM 4.5) or hybrids
(Qwen3-Next), and the toolkit reads none of these: it could neither check nor quantize them, nor
serve them here. So every such deployment is refused, with what can be done without the toolkit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.checkpoints.shape import FAMILIES, read_json
from toolkit.config.schema import DeploymentConfig
from toolkit.facts.heads import mtp_config
from toolkit.records.plan import Judgement

__all__ = ["RULE", "judge_mtp_target", "mtp_layers"]

RULE = "mtp-layers"
# DeepSeek's and GLM's key, and Qwen3-Next's. Source: TRT tensorrt_llm/_torch/speculative/utils.py,
# update_spec_config_from_model_config.
KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def mtp_layers(config: dict[str, Any]) -> int:
    """How many MTP layers a config.json counts."""
    return next((int(config[key]) for key in KEYS if isinstance(config.get(key), int)), 0)


def judge_mtp_target(config: DeploymentConfig, folder: Path) -> Judgement | None:
    """The refusal of a target that the toolkit does not read; None for one of its own families."""
    stated = read_json(folder / "config.json")
    architecture = str((stated.get("architectures") or ["no architecture"])[0])
    if architecture in FAMILIES:
        return None
    layers = mtp_layers(stated)
    what = f"{architecture} has no MTP layers ({KEYS[0]}), and the toolkit does not read it"
    if layers:
        what = (
            f"{architecture} has {layers} MTP layer{'' if layers == 1 else 's'}, and the toolkit"
            " does not read this architecture: it could neither check, quantize nor rehearse it"
        )
    return Judgement(RULE, "refused", "target.checkpoint", what, _without_toolkit(config, layers))


def _without_toolkit(config: DeploymentConfig, layers: int) -> str:
    engine = config.pytorch_flow
    other = "take a target that the toolkit reads, and a draft model or an EAGLE-3 head"
    if engine is None or not layers:
        return other
    keys = mtp_config(engine.tensorrt_llm, config.speculation.longest_draft)
    return (
        "serve a checkpoint that is published quantized by `trtllm-serve` of TensorRT-LLM"
        f" {engine.tensorrt_llm} itself, with speculative_config: {json.dumps(keys)}; or {other}"
    )
