"""Make a two-layer checkpoint that a CPU can hold from the config.json of a real model.

The stand-in has every feature of the real model: its family, the ratio of heads to KV heads and of
head_dim to hidden size, RoPE and its scaling, tied embeddings, biases, norms, the way tensor
parallelism splits it, and the number of rows that its vocabulary has beyond its partner's. Every
size is scaled down.

The weights are random and seeded, with one exception: after each token one other token is likely,
and target and draft agree on it. So some draft tokens are accepted and some are not.
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
# width of all heads together, if their number and head_dim allow it
MIN_WIDTH, MAX_WIDTH = 128, 512
WIDTH_MULTIPLE = 16
MIN_KV_HEADS = 2
# standard deviation of the logits: high enough that a token stands out, too low to make it certain
LOGIT_STD = 0.8
# weight of the likely next token in what the first MLP adds: leaves some probability to others
NEXT_TOKEN_WEIGHT = 3.0
ATTENTION_STD = 0.3  # of what attention adds, where an embedding has 1
NEXT_TOKEN = "model.layers.0.mlp.down_proj.weight"
BEFORE_NEXT_TOKEN = ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj")
NUM_PRINTABLE = 94  # the first ids: the characters from ! to ~
# keys about layers and weights that the stand-in does not have
DROPPED_KEYS = ("layer_types", "max_window_layers", "quantization_config")
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def scaled_config(
    config: Mapping[str, Any], shape: ModelShape, vocab_size: int, tp_size: int, pp_size: int
) -> dict[str, Any]:
    """The config.json of the stand-in: the real one with smaller sizes, and at least one layer for
    every pipeline rank. shape: the shape of the real model.
    """
    head_dim = max(MIN_HEAD_DIM, shape.head_dim // HEAD_DIM_SCALE)
    kv_heads, heads = _heads(shape, head_dim, tp_size)
    while heads * head_dim > MAX_WIDTH and head_dim > MIN_HEAD_DIM:
        head_dim //= 2
    # transformers demands this of some families, even if config.json has a head_dim
    is_divisible = shape.hidden_size % shape.num_heads == 0
    step = math.lcm(WIDTH_MULTIPLE, heads) if is_divisible else WIDTH_MULTIPLE
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
            hidden * shape.intermediate_size / shape.hidden_size, WIDTH_MULTIPLE * tp_size
        ),
    }
    kept = {key: value for key, value in config.items() if key not in DROPPED_KEYS}
    return {**kept, **sizes}


def write_stand_in(
    directory: Path, config: Mapping[str, Any], habits: Habits, *, seed: int
) -> ModelShape:
    """Write a checkpoint with this scaled config, and a tokenizer. The same arguments give the
    same bytes.
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
    weights = _Weights(shape, num_tokens(habits), seed)
    plans = [
        TensorPlan(name, dtype, extents, partial(weights, name))
        for name, extents in expected_shapes(shape).items()
    ]
    write_checkpoint_shards(directory, plans)
    return shape


def _heads(shape: ModelShape, head_dim: int, tp_size: int) -> tuple[int, int]:
    """(KV heads, heads): the smallest numbers with the real ratio that are wide enough together and
    that tensor parallelism splits as it splits the real ones.
    """
    ratio = shape.num_heads // shape.num_kv_heads
    # If not, several ranks hold the same KV head.
    is_divided = shape.num_kv_heads % tp_size == 0
    for kv_heads in range(min(MIN_KV_HEADS, shape.num_kv_heads), shape.num_kv_heads):
        heads = ratio * kv_heads
        remainder = kv_heads % tp_size if is_divided else tp_size % kv_heads
        splits_alike = remainder == 0 and heads % tp_size == 0
        if splits_alike and heads * head_dim >= MIN_WIDTH:
            return kv_heads, heads
    return shape.num_kv_heads, shape.num_heads


def _rounded(size: float, step: int) -> int:
    return max(1, math.ceil(size / step)) * step


class _Weights:
    """The values of each tensor. They do not depend on the order in which tensors are made.

    The down projection of the first MLP is solved for, so that the MLP adds the LM head's row of
    the next token to the residual stream. Everything else is random.
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
            size = LOGIT_STD / math.sqrt(extents[0]) if name == "model.norm.weight" else 1.0
            return size * (1.0 + self._normal(name, extents, 0.1))
        if name.endswith("bias"):
            return self._normal(name, extents, 0.1)
        if name in (self._head, "model.embed_tokens.weight"):
            values = self._normal(name, extents, 1.0)
            values[self._tokens :] = 0.0  # padding
            return values
        std = ATTENTION_STD if name.endswith("o_proj.weight") else 1.0
        return self._normal(name, extents, std / math.sqrt(extents[1]))

    def _normal(self, name: str, extents: tuple[int, ...], std: float) -> Tensor:
        import torch

        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return torch.randn(extents, generator=generator) * std

    def _next_token(self) -> Tensor:
        """The down projection of the first MLP: it maps the MLP's inner activations for each token
        to the wanted output. What attention adds is ignored.
        """
        import torch

        weights = {
            name: self(f"model.layers.0.{name}.weight").float() for name in BEFORE_NEXT_TOKEN
        }
        tokens = self("model.embed_tokens.weight").float()[: self._tokens]
        normed = (
            torch.nn.functional.rms_norm(tokens, tokens.shape[1:])
            * weights["post_attention_layernorm"]
        )
        inner = torch.nn.functional.silu(normed @ weights["mlp.gate_proj"].T) * (
            normed @ weights["mlp.up_proj"].T
        )
        next_rows = self(self._head).float()[next_tokens(self._tokens)]
        wanted = NEXT_TOKEN_WEIGHT / math.sqrt(tokens.shape[1]) * next_rows - tokens
        solution: Tensor = torch.linalg.lstsq(inner, wanted, driver="gelsd").solution
        return solution.T.contiguous()


def next_tokens(tokens: int) -> list[int]:
    """Token -> the token that is likely after it. All printable tokens form one cycle; every other
    token leads into it.
    """
    printable = [*range(NUM_PRINTABLE), *range(256, 256 + len(merges()))]
    random.Random(0).shuffle(printable)
    following = dict(zip(printable, [*printable[1:], printable[0]], strict=True))
    return [following.get(token, printable[token % len(printable)]) for token in range(tokens)]
