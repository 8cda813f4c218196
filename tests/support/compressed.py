"""A plain reference for INT8 checkpoints in compressed-tensors format: transformers' model with our
own linears, in the toolkit's environment, which has no compressed-tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

MAX_CODE = 127.0  # the code of a token's largest value in vLLM and ModelOpt
# In compressed-tensors' own quantizer it is half the range of the codes, and 127.5 is clamped
# (calculate_qparams in compressed_tensors/quantization/utils/helpers.py).
TRANSFORMERS_MAX_CODE = 127.5


class DynamicInt8Linear(torch.nn.Module):
    """codes [out, in] with a scale per row; inputs get a scale per token, from their own values:
    the largest stands at max_code.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        max_code: float,
    ) -> None:
        super().__init__()
        self.max_code = max_code
        self.codes, self.scale, self.bias = codes.double(), scale.double().reshape(-1), bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        token_scale = wide.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / self.max_code
        codes = (wide / token_scale).round().clamp(-128, 127)
        product = (codes.double() @ self.codes.T) * token_scale.double() * self.scale
        return (product if self.bias is None else product + self.bias.double()).to(x.dtype)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint's shards."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def unquantized_model(folder: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """transformers' model of the folder's config.json with these tensors."""
    import transformers

    raw = json.loads((folder / "config.json").read_text())
    raw.pop("quantization_config", None)
    config_class = transformers.AutoConfig.for_model(raw["model_type"])
    config = type(config_class).from_dict(raw)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    missing, unexpected = model.load_state_dict(
        {name: tensor.to(dtype) for name, tensor in tensors.items()}, strict=False
    )
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied
    return model


def reference_model(
    folder: Path, dtype: torch.dtype = torch.float32, max_code: float = MAX_CODE
) -> Any:
    """The model that computes with the folder's codes. The products of codes are exact."""
    tensors = tensors_of(folder)
    scales = {name for name in tensors if name.endswith(".weight_scale")}
    floats = {name: tensor for name, tensor in tensors.items() if name not in scales}
    model = unquantized_model(folder, floats, dtype)
    for scale_name in scales:
        name = scale_name.removesuffix(".weight_scale")
        bias = tensors.get(f"{name}.bias")
        linear = DynamicInt8Linear(tensors[f"{name}.weight"], tensors[scale_name], bias, max_code)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, linear)
    return model


def log_probabilities(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    """[length - 1, vocab] of each prompt: of the tokens after the first."""
    with torch.no_grad():
        return [
            torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), dim=-1)
            for ids in prompts
        ]


def divergence(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    """The mean over tokens of KL(first || second), in nats."""
    terms = [(a.exp() * (a - b)).sum(-1) for a, b in zip(first, second, strict=True)]
    return float(torch.cat(terms).mean())
