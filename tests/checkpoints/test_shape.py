"""config.json in its many spellings, and with its many faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import CONFIG_CLASSES
from toolkit.checkpoints.shape import read_shape
from toolkit.errors import CheckpointError

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write(folder: Path, **changes: Any) -> Path:
    config = {key: value for key, value in {**BASE, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_defaults_follow_from_the_rest(tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path))
    assert (shape.num_kv_heads, shape.head_dim, shape.rope_theta, shape.rope_scaling) == (
        4,
        16,
        10000.0,
        None,
    )
    assert (shape.tie_word_embeddings, shape.dtype, shape.bos_token_id, shape.eos_token_ids) == (
        False,
        "float32",
        None,
        (),
    )


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **LLAMA3}},
        {
            "rope_theta": 500000.0,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
            "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **LLAMA3},
        },
    ],
    ids=["4.x", "older", "5.x", "both"],
)
def test_every_rope_spelling_means_the_same(spelling: dict[str, Any], tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path, **spelling))
    assert shape.rope_theta == 500000.0
    assert shape.rope_scaling == {"rope_type": "llama3", **LLAMA3}


@pytest.mark.parametrize("family", list(CONFIG_CLASSES))
def test_what_transformers_writes_is_what_it_meant(family: str, tmp_path: Path) -> None:
    import transformers

    config = getattr(transformers, CONFIG_CLASSES[family])(
        vocab_size=90,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    assert shape.vocab_size == 90
    assert shape.num_kv_heads == 2
    assert shape.head_dim == getattr(config, "head_dim", None) or 12
    assert shape.rope_theta == config.rope_parameters["rope_theta"]
    assert shape.qkv_bias == (family == "qwen2")
    assert shape.qk_norm == (family == "qwen3")


@pytest.mark.parametrize(
    ("key", "value"),
    [("dtype", "bfloat16"), ("torch_dtype", "bfloat16"), ("torch_dtype", "torch.bfloat16")],
)
def test_either_name_of_the_dtype_is_read(key: str, value: str, tmp_path: Path) -> None:
    assert read_shape(write(tmp_path, **{key: value})).dtype == "bfloat16"


def test_the_generation_config_lists_the_eos_ids(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=2)
    assert read_shape(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7, 9]}')
    assert read_shape(tmp_path).eos_token_ids == (2, 7, 9)
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.9}')
    assert read_shape(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    "heads",
    [{"num_attention_heads": 3, "head_dim": 24}, {"head_dim": 32, "num_key_value_heads": 1}],
)
def test_a_head_dim_of_its_own_is_kept(heads: dict[str, int], tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path, **heads))
    assert shape.head_dim == heads["head_dim"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architecture 'MambaForCausalLM' is not supported\n  supported: LlamaForCausalLM",
        ),
        ({"architectures": ..., "model_type": "gpt2"}, "architecture 'gpt2' is not supported"),
        ({"vocab_size": ...}, "vocab_size is None, but must be a positive whole number"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000; at most 10000 can be read",
        ),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776; at most 16777216 can be read"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta has two values"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"architectures": "MambaForCausalLM"}, "architecture 'MambaForCausalLM' is not supported"),
        ({"architectures": [["x"]]}, "architecture ['x'] is not supported"),
        (
            {"num_key_value_heads": "2"},
            "num_key_value_heads is '2', but must be a positive whole number",
        ),
        ({"num_key_value_heads": -2}, "num_key_value_heads is -2"),
        ({"head_dim": "16"}, "head_dim is '16'"),
        ({"rms_norm_eps": "abc"}, "rms_norm_eps is 'abc', but must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', but must be true or false"),
        ({"bos_token_id": "x"}, "bos_token_id is 'x', but must be a token id or a list of"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id is [2, 'x']"),
        ({"rope_parameters": "x"}, "rope_parameters is 'x', but must be an object"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x'"),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "factor is 0, but must be a number above 0",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        ({"rope_scaling": {"rope_type": ["x"]}}, "rope_type ['x'] is not supported"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "x"}, "sliding_window is 'x'"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["x"],
            },
            "layer_types is ['x'], but must have one entry for each of 2 layers",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_file(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_shape(write(tmp_path, **changes))
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))


def test_a_model_type_stands_in_for_the_architecture(tmp_path: Path) -> None:
    assert (
        read_shape(write(tmp_path, architectures=..., model_type="qwen3")).architecture
        == "Qwen3ForCausalLM"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"[]", "is not a JSON object"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (None, "file is missing"),
    ],
)
def test_a_config_that_is_none_is_refused(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_shape(tmp_path)
