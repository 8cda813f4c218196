"""config.json of a real model -> a two-layer checkpoint that a CPU can hold, with everything that
its kind of model has.

Kept: family, heads to KV heads, head_dim to hidden size, RoPE and its scaling, tied embeddings,
biases, norms, how tensor parallelism splits it, and how many more rows its vocabulary has than its
partner's. Scaled down: every size. The weights are random and seeded, but for one thing that all
stand-ins share: after each token one other token is likely, the same one for target and draft, so
that some drafts are accepted and some are not.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.reader import expected_shapes
from toolkit.checkpoints.shape import FAMILIES, ModelShape, parse_shape
from toolkit.checkpoints.writer import TensorPlan, write_checkpoint_shards
from toolkit.standins.tokenizer import Habits, merges, num_tokens, write_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LAYERS", "scaled_config", "write_stand_in"]

LAYERS = 2
HEAD_DIM_SCALE, MIN_HEAD_DIM = 8, 4
MIN_WIDTH, MAX_WIDTH = 128, 512  # of all heads together, where their number and head_dim allow
ALIGNMENT = 16
MIN_KV_HEADS = 2
# standard deviation of the logits: wide enough to choose a token, too narrow to be certain of it
SPREAD = 0.8
KNOWN = (
    3.0  # how much of the likely next token the first MLP adds: as much as leaves room for others
)
ATTENTION = 0.3  # size of what attention adds, against 1 of an embedding
NEXT_TOKEN = "model.layers.0.mlp.down_proj.weight"
BEFORE_NEXT_TOKEN = ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj")
PRINTABLE = 94  # the first ids: the characters from ! to ~
NOT_KEPT = (
    "layer_types",
    "max_window_layers",
    "quantization_config",
)  # of the layers and weights that are not there
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def scaled_config(
    config: Mapping[str, Any], shape: ModelShape, vocab_size: int, tp_size: int, pp_size: int
) -> dict[str, Any]:
    """The config.json of the stand-in: the real one with other sizes, and a layer at least for
    every rank. `shape` is what the real one says.
    """
    head_dim = max(MIN_HEAD_DIM, shape.head_dim // HEAD_DIM_SCALE)
    kv_heads, heads = _heads(shape, head_dim, tp_size)
    while heads * head_dim > MAX_WIDTH and head_dim > MIN_HEAD_DIM:
        head_dim //= 2
    even = (
        shape.hidden_size % shape.num_heads == 0
    )  # which transformers asks of some families, whatever head_dim says
    step = math.lcm(ALIGNMENT, heads) if even else ALIGNMENT
    hidden = _rounded(
        heads * head_dim * shape.hidden_size / (shape.num_heads * shape.head_dim), step
    )
    sizes = {
        "vocab_size": vocab_size,
        "num_hidden_layers": max(LAYERS, pp_size),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": _rounded(
            hidden * shape.intermediate_size / shape.hidden_size, ALIGNMENT * tp_size
        ),
    }
    kept = {key: value for key, value in config.items() if key not in NOT_KEPT}
    return {**kept, **sizes}


def write_stand_in(
    directory: Path, config: Mapping[str, Any], habits: Habits, *, seed: int
) -> ModelShape:
    """Write the checkpoint of a scaled config with a tokenizer. The same arguments give the same
    bytes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(directory, habits)
    stated = {
        **config,
        "model_type": FAMILIES[config["architectures"][0]].model_type,
        "bos_token_id": None if habits.bos is None else ids[habits.bos],
        "eos_token_id": [ids[name] for name in habits.eos],
    }
    shape = parse_shape(stated, where=directory / "config.json")
    (directory / "config.json").write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
    dtype = DTYPES[shape.dtype]
    made = _Weights(shape, num_tokens(habits), seed)
    plans = [
        TensorPlan(name, dtype, extents, partial(made, name))
        for name, extents in expected_shapes(shape).items()
    ]
    write_checkpoint_shards(directory, plans)
    return shape


def _heads(shape: ModelShape, head_dim: int, tp_size: int) -> tuple[int, int]:
    """(KV heads, heads): the fewest with the real ratio that tensor parallelism splits as it splits
    the real ones, and that are wide enough together.
    """
    ratio = shape.num_heads // shape.num_kv_heads
    divided = shape.num_kv_heads % tp_size == 0  # else each KV head is held by several ranks
    for kv_heads in range(min(MIN_KV_HEADS, shape.num_kv_heads), shape.num_kv_heads):
        heads = ratio * kv_heads
        splits = (
            kv_heads % tp_size == 0 if divided else tp_size % kv_heads == 0
        ) and heads % tp_size == 0
        if splits and heads * head_dim >= MIN_WIDTH:
            return kv_heads, heads
    return shape.num_kv_heads, shape.num_heads


def _rounded(size: float, step: int) -> int:
    return max(1, math.ceil(size / step)) * step


class _Weights:
    """The values of each tensor, the same whatever was asked before.

    The first layer's MLP is solved for, so that the residual stream leaves it with the next token's
    row of the LM head in it; everything else is random.
    """

    def __init__(self, shape: ModelShape, tokens: int, seed: int) -> None:
        self._shape, self._tokens, self._seed = shape, tokens, seed
        self._head = "model.embed_tokens.weight" if shape.tie_word_embeddings else "lm_head.weight"
        self._extents = expected_shapes(shape)

    def __call__(self, name: str) -> Tensor:
        import torch

        dtype = getattr(torch, self._shape.dtype)
        values = self._next_token() if name == NEXT_TOKEN else self._random(name)
        return values.to(dtype)

    def _random(self, name: str) -> Tensor:
        extents = self._extents[name]
        if "norm" in name:
            size = SPREAD / math.sqrt(extents[0]) if name == "model.norm.weight" else 1.0
            return size * (1.0 + self._normal(name, extents, 0.1))
        if name.endswith("bias"):
            return self._normal(name, extents, 0.1)
        if name in (self._head, "model.embed_tokens.weight"):
            values = self._normal(name, extents, 1.0)
            values[self._tokens :] = 0.0  # padding
            return values
        spread = ATTENTION if name.endswith("o_proj.weight") else 1.0
        return self._normal(name, extents, spread / math.sqrt(extents[1]))

    def _normal(self, name: str, extents: tuple[int, ...], spread: float) -> Tensor:
        import torch

        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return torch.randn(extents, generator=generator) * spread

    def _next_token(self) -> Tensor:
        """What the MLP's inner activations of each token have to be multiplied with; attention
        is left out of account.
        """
        import torch

        read = {name: self(f"model.layers.0.{name}.weight").float() for name in BEFORE_NEXT_TOKEN}
        tokens = self("model.embed_tokens.weight").float()[: self._tokens]
        normed = (
            torch.nn.functional.rms_norm(tokens, tokens.shape[1:])
            * read["post_attention_layernorm"]
        )
        inner = torch.nn.functional.silu(normed @ read["mlp.gate_proj"].T) * (
            normed @ read["mlp.up_proj"].T
        )
        wanted = (
            KNOWN / math.sqrt(tokens.shape[1]) * self(self._head).float()[next_tokens(self._tokens)]
            - tokens
        )
        solution: Tensor = torch.linalg.lstsq(inner, wanted, driver="gelsd").solution
        return solution.T.contiguous()


def next_tokens(tokens: int) -> list[int]:
    """Token -> the one that is likely after it: one round through all printable ones; others
    lead into it.
    """
    printable = [*range(PRINTABLE), *range(256, 256 + len(merges()))]
    random.Random(0).shuffle(printable)
    following = dict(zip(printable, [*printable[1:], printable[0]], strict=True))
    return [following.get(token, printable[token % len(printable)]) for token in range(tokens)]
