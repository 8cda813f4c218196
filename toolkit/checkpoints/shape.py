"""config.json -> ModelShape: the facts about a decoder-only model that the rest of the toolkit needs, spelled one way.

Checkpoints in the wild differ in how they say the same thing (`dtype` or `torch_dtype`, `rope_parameters` or `rope_theta` with
`rope_scaling`, `head_dim` given or implied). All of that ends here: no other module reads a model's config.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError

__all__ = ["FAMILIES", "Family", "ModelShape", "read_shape"]


@dataclass(frozen=True, slots=True)
class Family:
    """What a family does that config.json does not always say. Source: transformers' modeling file of that model_type."""

    model_type: str
    qkv_bias: bool  # default when config.json has no attention_bias
    qk_norm: bool  # RMSNorm over head_dim on q and k
    sliding_window: bool  # the family may use one
    rope_theta: float = 10000.0  # when config.json names none


FAMILIES = {
    "LlamaForCausalLM": Family("llama", qkv_bias=False, qk_norm=False, sliding_window=False),
    "MistralForCausalLM": Family("mistral", qkv_bias=False, qk_norm=False, sliding_window=True),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, qk_norm=False, sliding_window=True),
    "Qwen3ForCausalLM": Family("qwen3", qkv_bias=False, qk_norm=True, sliding_window=True),
}
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about a model's graph that is not a weight.

    rope_scaling holds the variant's own keys (rope_type, factor, ...) or is None for the default; qkv_bias, o_bias and mlp_bias
    say which linears have one; sliding_window None means full attention everywhere.
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


def read_shape(directory: Path) -> ModelShape:
    """Read `directory/config.json` (and generation_config.json for its EOS ids).

    Raises CheckpointError when it is missing, not JSON, of an architecture that is not supported, or contradicts itself.
    """
    raw = read_json(directory / "config.json")
    where = directory / "config.json"
    architecture = (raw.get("architectures") or [None])[0] or _architecture_of(raw.get("model_type"))
    family = FAMILIES.get(str(architecture))
    if family is None:
        raise CheckpointError(
            f"architecture {architecture or raw.get('model_type')!r} is not supported",
            where=where,
            mend=f"supported: {', '.join(FAMILIES)}",
        )

    def need(key: str) -> int:
        value = raw.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{key} is {value!r}, a positive whole number is needed", where=where)
        return value

    heads = need("num_attention_heads")
    hidden = need("hidden_size")
    kv_heads = raw.get("num_key_value_heads") or heads
    head_dim = raw.get("head_dim") or hidden // heads
    if heads % kv_heads:
        raise CheckpointError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}", where=where)
    if head_dim % 2:
        raise CheckpointError(f"head_dim {head_dim} is odd, RoPE needs pairs", where=where)
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act {activation!r} is not supported", where=where, mend="supported: silu")
    theta, scaling = _rope(raw, family, where)
    attention_bias = raw.get("attention_bias")
    llama_bias = bool(attention_bias) and family.model_type in ("llama", "qwen3")
    layers = need("num_hidden_layers")
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return ModelShape(
        architecture=str(architecture),
        vocab_size=need("vocab_size"),
        hidden_size=hidden,
        intermediate_size=need("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(kv_heads),
        head_dim=int(head_dim),
        max_position_embeddings=need("max_position_embeddings"),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias or llama_bias,
        o_bias=llama_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and family.model_type == "llama",
        qk_norm=family.qk_norm,
        sliding_window=_sliding_window(raw, family, layers),
        dtype=dtype if dtype in DTYPES else "float32",
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_eos_ids(raw, directory),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a CheckpointError that says where it breaks off."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError("file is missing", where=path, mend="name a folder in Hugging Face form") from None
    except NotADirectoryError:
        raise CheckpointError("is not a folder", where=path.parent, mend="name a folder in Hugging Face form") from None
    except OSError as exc:
        raise CheckpointError(f"cannot be read ({exc.strerror})", where=path) from exc
    except (json.JSONDecodeError, UnicodeDecodeError) as exc:
        raise CheckpointError(f"is not valid JSON ({exc})", where=path) from exc
    if not isinstance(data, dict):
        raise CheckpointError("is not a JSON object", where=path)
    return data


def _architecture_of(model_type: object) -> str | None:
    return next((name for name, family in FAMILIES.items() if family.model_type == model_type), None)


def _rope(raw: dict[str, Any], family: Family, where: Path) -> tuple[float, dict[str, Any] | None]:
    """Theta and the scaling dict from either spelling; where both are present they must agree."""
    new = raw.get("rope_parameters") or {}
    old = raw.get("rope_scaling") or {}
    thetas = {float(theta) for theta in (new.get("rope_theta"), raw.get("rope_theta")) if theta is not None}
    if len(thetas) > 1:
        raise CheckpointError(f"rope_theta is given as {sorted(thetas)}; they must agree", where=where)
    theta = thetas.pop() if thetas else family.rope_theta
    scaling = {key: value for key, value in (new or old).items() if key != "rope_theta"}
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    supported = ("default", "linear", "dynamic", "llama3", "yarn")
    if kind not in supported:
        raise CheckpointError(f"rope_type {kind!r} is not supported", where=where, mend=f"supported: {', '.join(supported)}")
    if float(raw.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0)) or 1.0) != 1.0:
        raise CheckpointError("partial_rotary_factor other than 1 is not supported", where=where)
    return theta, None if kind == "default" else {"rope_type": kind, **scaling}


def _sliding_window(raw: dict[str, Any], family: Family, layers: int) -> tuple[int | None, ...] | None:
    """Per layer, as transformers decides: Mistral uses it wherever set, Qwen only with use_sliding_window and by layer."""
    window = raw.get("sliding_window")
    if not family.sliding_window or window is None:
        return None
    if family.model_type == "mistral":
        return (int(window),) * layers
    if not raw.get("use_sliding_window", False):
        return None
    kinds = raw.get("layer_types")
    if kinds is None:
        first = int(raw.get("max_window_layers", 28))
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _eos_ids(raw: dict[str, Any], directory: Path) -> tuple[int, ...]:
    """generation_config.json wins, since that is where several EOS ids are usually listed."""
    generation = directory / "generation_config.json"
    source = read_json(generation) if generation.exists() else {}
    eos = source.get("eos_token_id", raw.get("eos_token_id"))
    if eos is None:
        return ()
    return tuple(int(i) for i in eos) if isinstance(eos, list) else (int(eos),)
