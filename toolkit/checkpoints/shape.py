"""Read config.json into a ModelShape: the facts about a decoder-only model that the rest of the
toolkit needs, in one spelling.

Checkpoints spell the same fact in different ways: `dtype` or `torch_dtype`, `rope_parameters` or
`rope_theta` with `rope_scaling`, `head_dim` given or implied. Only this module has to know them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError

__all__ = ["FAMILIES", "Family", "ModelShape", "linear_params", "parse_shape", "read_shape"]


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a model family that config.json does not always state. Source: transformers'
    modeling file of that model_type.
    """

    model_type: str
    qkv_bias: bool  # the default if config.json has no attention_bias
    qk_norm: bool  # RMSNorm over head_dim on q and k
    sliding_window: bool  # the family may use one
    rope_theta: float = 10000.0  # the default if config.json has none


FAMILIES = {
    "LlamaForCausalLM": Family("llama", qkv_bias=False, qk_norm=False, sliding_window=False),
    "MistralForCausalLM": Family("mistral", qkv_bias=False, qk_norm=False, sliding_window=True),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, qk_norm=False, sliding_window=True),
    "Qwen3ForCausalLM": Family("qwen3", qkv_bias=False, qk_norm=True, sliding_window=True),
}
UNREADABLE = "it has to be a file that you may read"  # the hint for an error of the system
DTYPES = ("float32", "float16", "bfloat16")
# Far above every published model. A larger number would be found only by running out of memory.
LARGEST = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "vocab_size": 1 << 24,
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about a model's graph that is not a weight.

    rope_scaling: rope_type and the keys of that type (factor, ...); None for the default RoPE.
    qkv_bias, o_bias, mlp_bias: whether these linears have a bias.
    sliding_window: None means full attention in every layer.
    other_params: weights that such a model does not have; a head has some (checkpoints/heads.py).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: tuple[int | None, ...] | None  # per layer
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    other_params: int = 0


def read_shape(directory: Path) -> ModelShape:
    """Read `directory/config.json`, and generation_config.json for its EOS ids.

    Raises CheckpointError if it is missing, is not JSON, names an unsupported architecture, or
    contradicts itself.
    """
    where, generation = directory / "config.json", directory / "generation_config.json"
    generated = _Stated(read_json(generation) if generation.exists() else {}, generation)
    return _shape(_Stated(read_json(where), where), generated)


def parse_shape(config: dict[str, Any], *, where: str | Path) -> ModelShape:
    """Like read_shape, for a config.json that is already in memory. `where` is for messages."""
    return _shape(_Stated(config, where), _Stated({}, where))


def linear_params(shape: ModelShape, tp_size: int = 1) -> int:
    """The number of weights in one layer's linears that one of tp_size ranks holds.

    If there are fewer KV heads than ranks, each rank holds a copy of one KV head.
    """
    kv_heads = max(1, shape.num_kv_heads // tp_size)
    attention = shape.hidden_size * shape.head_dim * (2 * shape.num_heads // tp_size + 2 * kv_heads)
    return attention + 3 * shape.hidden_size * shape.intermediate_size // tp_size


def _shape(stated: _Stated, generated: _Stated) -> ModelShape:
    family = _family(stated)
    heads = stated.count("num_attention_heads")
    hidden = stated.count("hidden_size")
    kv_heads = stated.count("num_key_value_heads", heads)
    head_dim = stated.count("head_dim", hidden // heads)
    if heads % kv_heads:
        raise stated.fault(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 2:
        raise stated.fault(f"head_dim {head_dim} is odd, but RoPE needs an even number")
    activation = stated.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise stated.fault(f"hidden_act {activation!r} is not supported", hint="supported: silu")
    max_positions = stated.count("max_position_embeddings")
    theta, scaling = _rope(stated, family)
    llama_bias = stated.flag("attention_bias") and family.model_type in ("llama", "qwen3")
    layers = stated.count("num_hidden_layers")
    dtype = str(
        stated.values.get("dtype") or stated.values.get("torch_dtype") or "float32"
    ).removeprefix("torch.")
    bos = stated.ids("bos_token_id")
    return ModelShape(
        architecture=next(name for name, known in FAMILIES.items() if known is family),
        vocab_size=stated.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=stated.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=stated.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=stated.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias or llama_bias,
        o_bias=llama_bias,
        mlp_bias=stated.flag("mlp_bias") and family.model_type == "llama",
        qk_norm=family.qk_norm,
        sliding_window=_sliding_window(stated, family, layers),
        dtype=dtype if dtype in DTYPES else "float32",
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_eos_ids(stated, generated),
    )


@dataclass(frozen=True, slots=True)
class _Stated:
    """The values of a JSON file, read by type. A missing key and null both give the default; if
    there is no default, they are a fault.
    """

    values: dict[str, Any]
    where: str | Path

    def fault(self, message: str, hint: str | None = None) -> CheckpointError:
        return CheckpointError(message, where=self.where, hint=hint)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fault(f"{key} is {value!r}, but must be a positive whole number")
        if value > LARGEST.get(key, value):
            raise self.fault(f"{key} is {value}; at most {LARGEST[key]} can be read")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Above zero and finite."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value < math.inf
        ):
            raise self.fault(f"{key} is {value!r}, but must be a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fault(f"{key} is {value!r}, but must be true or false")
        return bool(value)

    def ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them."""
        value = self.values.get(key)
        if value is None:
            return ()
        token_ids = value if isinstance(value, list) else [value]
        if not all(type(token_id) is int for token_id in token_ids):
            raise self.fault(f"{key} is {value!r}, but must be a token id or a list of token ids")
        return tuple(token_ids)

    def section(self, key: str) -> _Stated:
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.fault(f"{key} is {value!r}, but must be an object")
        return _Stated(value or {}, self.where)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError if the file is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            "the file is missing", where=path, hint="name a folder in Hugging Face format"
        ) from None
    except NotADirectoryError:
        raise CheckpointError(
            "is not a folder", where=path.parent, hint="name a folder in Hugging Face format"
        ) from None
    except OSError as exc:
        raise CheckpointError(
            f"cannot be read ({exc.strerror})", where=path, hint=UNREADABLE
        ) from exc
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise CheckpointError(
            f"is not valid JSON ({exc})", where=path, hint="fetch this file again"
        ) from exc
    if not isinstance(data, dict):
        raise CheckpointError("is not a JSON object", where=path, hint="fetch this file again")
    return data


def _family(stated: _Stated) -> Family:
    """The family of the first architecture, or of model_type if no architecture is named."""
    named = stated.values.get("architectures")
    first = named[0] if isinstance(named, list) and named else named
    model_type = stated.values.get("model_type")
    by_type = {family.model_type: family for family in FAMILIES.values()}
    known: Family | None = None
    if isinstance(first, str):
        known = FAMILIES.get(first)
    elif not first:
        known = by_type.get(str(model_type))
    if known is None:
        hint = f"supported: {', '.join(FAMILIES)}"
        if "eagle3" in str(first).lower() or stated.values.get("speculators_model_type"):
            hint = "if this is an EAGLE-3 head, set speculation.kind: eagle3"
        raise stated.fault(f"architecture {first or model_type!r} is not supported", hint=hint)
    return known


ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}


def _rope(stated: _Stated, family: Family) -> tuple[float, dict[str, Any] | None]:
    """Theta and the scaling dict, from the spelling of transformers 5.x (rope_parameters) or 4.x
    (rope_theta, rope_scaling). If both give a theta, the two must agree.
    """
    new, old = stated.section("rope_parameters"), stated.section("rope_scaling")
    thetas = {
        section.number("rope_theta")
        for section in (new, stated)
        if section.values.get("rope_theta") is not None
    }
    if len(thetas) > 1:
        raise stated.fault(f"rope_theta has two values, {sorted(thetas)}; they must agree")
    theta = thetas.pop() if thetas else family.rope_theta
    variant = new if new.values else old
    scaling = {
        key: value
        for key, value in variant.values.items()
        if key not in ("rope_theta", "rope_type", "type")
    }
    kind = variant.values.get("rope_type") or variant.values.get("type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise stated.fault(
            f"rope_type {kind!r} is not supported", hint=f"supported: {', '.join(ROPE_KEYS)}"
        )
    for key in ROPE_KEYS[kind]:
        variant.number(key)
    if stated.number("partial_rotary_factor", variant.number("partial_rotary_factor", 1.0)) != 1.0:
        raise stated.fault("a partial_rotary_factor other than 1 is not supported")
    return theta, None if kind == "default" else {"rope_type": kind, **scaling}


def _sliding_window(stated: _Stated, family: Family, layers: int) -> tuple[int | None, ...] | None:
    """The window of each layer, as transformers decides: Mistral uses it in all layers if it is
    set; Qwen only with use_sliding_window, and only in some layers.
    """
    if not family.sliding_window or stated.values.get("sliding_window") is None:
        return None
    if family.model_type == "mistral":
        return (stated.count("sliding_window"),) * layers
    if not stated.flag("use_sliding_window"):
        return None
    kinds = stated.values.get("layer_types")
    if kinds is None:
        first = stated.values.get("max_window_layers", 28)
        if type(first) is not int:
            raise stated.fault(f"max_window_layers is {first!r}, but must be a whole number")
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise stated.fault(
            f"layer_types is {kinds!r}, but must have one entry for each of {layers} layers"
        )
    window = stated.count("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos_ids(stated: _Stated, generated: _Stated) -> tuple[int, ...]:
    """generation_config.json wins, since several EOS ids are usually listed there."""
    if "eos_token_id" in generated.values:
        return generated.ids("eos_token_id")
    return stated.ids("eos_token_id")
