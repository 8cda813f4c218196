"""transformers' own models as the reference, in true float64."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn


class Float64Norm(nn.Module):
    """transformers' RMSNorm computes in float32 whatever its input; a comparison at 1e-9 needs
    it in the input's own dtype.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight.double(), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def reference_model(directory: Path) -> nn.Module:
    """The checkpoint as transformers' model in float64, norms included; SDPA's softmax is
    float64 too.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="sdpa"
    )
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            parent, _, child = name.rpartition(".")
            setattr(
                model.get_submodule(parent),
                child,
                Float64Norm(module.weight, module.variance_epsilon),
            )
    return model.eval()


@torch.no_grad()
def reference_logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    """tokens [batch, n] -> [batch, n, vocab] float64, without a cache."""
    return reference_model(directory)(tokens, use_cache=False).logits
