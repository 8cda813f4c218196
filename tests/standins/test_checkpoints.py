"""Stand-ins keep every feature of the real model and lose only its size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.checkpoints.reader import check_against_shape, read_index
from toolkit.checkpoints.shape import ModelShape, parse_shape, read_json, read_shape
from toolkit.facts.models import CONFIGS
from toolkit.plan.subject import can_split
from toolkit.standins.checkpoints import LAYERS, next_tokens, scaled_config, write_stand_in
from toolkit.standins.tokenizer import habits_of, merges, num_tokens, write_tokenizer

LLAMA_1B = "meta-llama/Llama-3.2-1B-Instruct"
KEPT = (
    "architecture",
    "rope_theta",
    "rope_scaling",
    "tie_word_embeddings",
    "qkv_bias",
    "qk_norm",
    "max_position_embeddings",
    "rms_norm_eps",
    "dtype",
)


def scaled(name: str, tp_size: int = 1) -> tuple[ModelShape, ModelShape]:
    """The shapes of the real model and of its stand-in."""
    real = parse_shape(CONFIGS[name], where=name)
    return real, parse_shape(scaled_config(CONFIGS[name], real, 384, tp_size, 1), where=name)


@pytest.mark.parametrize("name", CONFIGS)
def test_everything_but_the_sizes_is_kept(name: str) -> None:
    real, made = scaled(name)
    assert {field: getattr(made, field) for field in KEPT} == {
        field: getattr(real, field) for field in KEPT
    }
    assert made.num_heads * real.num_kv_heads == real.num_heads * made.num_kv_heads
    assert made.num_layers == LAYERS and made.hidden_size <= 512 and made.vocab_size == 384
    # The heads of Qwen3 together are wider than its hidden size; those of the others are not.
    assert (made.hidden_size == made.num_heads * made.head_dim) == (
        real.hidden_size == real.num_heads * real.head_dim
    )


def test_the_heads_divide_the_hidden_size_where_they_divide_the_real_one() -> None:
    """The quickstart's target has six heads. transformers refuses a Llama whose number of heads
    does not divide the hidden size.
    """
    config = read_json(
        Path(__file__).parents[2] / "configs" / "quickstart" / "target" / "config.json"
    )
    real = parse_shape(config, where="x")
    made = parse_shape(scaled_config(config, real, 384, 1, 1), where="x")
    assert real.num_heads == made.num_heads == 6
    assert made.hidden_size % made.num_heads == 0


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_tensor_parallelism_splits_a_stand_in_as_it_splits_the_model(
    name: str, tp_size: int
) -> None:
    real, made = scaled(name, tp_size)
    assert can_split(made, tp_size) == can_split(real, tp_size)
    assert (made.num_kv_heads % tp_size == 0) == (real.num_kv_heads % tp_size == 0)
    assert made.intermediate_size % tp_size == 0


@pytest.mark.parametrize(
    "name",
    [LLAMA_1B, "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-8B", "mistralai/Mistral-7B-Instruct-v0.3"],
)
def test_a_stand_in_is_a_whole_checkpoint_that_transformers_runs(name: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    _, wanted = scaled(name)
    habits = habits_of(wanted.architecture)
    config = scaled_config(CONFIGS[name], parse_shape(CONFIGS[name], where=name), 384, 1, 1)
    made = write_stand_in(tmp_path, config, habits, seed=1)
    assert made == read_shape(tmp_path)
    check_against_shape(read_index(tmp_path), made, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(94).reshape(1, -1)
    with torch.no_grad():
        logits = model(ids).logits[0]
    expected = torch.tensor(next_tokens(num_tokens(habits)))[:94]
    assert (logits.argmax(-1) == expected).float().mean() > 0.25  # by chance it is one in 300
    assert (model.lm_head.weight[num_tokens(habits) :] == 0).all()


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path: Path) -> None:
    config = scaled_config(
        CONFIGS[LLAMA_1B], parse_shape(CONFIGS[LLAMA_1B], where=LLAMA_1B), 384, 1, 1
    )
    habits = habits_of("LlamaForCausalLM")
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_stand_in(tmp_path / folder, config, habits, seed=seed)
    a, b, c = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in "abc")
    assert a == b != c


def test_what_only_fits_the_real_layers_is_left_out(tmp_path: Path) -> None:
    real: dict[str, Any] = {
        **CONFIGS["Qwen/Qwen2.5-7B-Instruct"],
        "layer_types": ["full_attention"] * 28,
        "quantization_config": {"quant_method": "modelopt"},
    }
    config = scaled_config(real, parse_shape(real, where="x"), 384, 1, 1)
    write_stand_in(tmp_path, config, habits_of("Qwen2ForCausalLM"), seed=0)
    assert read_shape(tmp_path).num_layers == LAYERS
    assert "quantization_config" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"],
)
def test_the_tokenizer_takes_any_text_and_has_its_familys_habits(
    architecture: str, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    habits = habits_of(architecture)
    ids = write_tokenizer(tmp_path, habits)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == num_tokens(habits)
    for text in ("def add(a, b):\n\treturn a + b", "Zürich, 東京, 🙂", "  spaces  "):
        encoded = tokenizer.encode(text).ids
        assert tokenizer.decode(encoded) == text
        assert encoded[: habits.bos is not None] == ([ids[habits.bos]] if habits.bos else [])
    assert (
        len(tokenizer.encode("return the import", add_special_tokens=False).ids) < 12
    )  # pieces, not bytes
    assert set(habits.eos) <= set(ids)


def test_every_merge_is_of_pieces_that_are_there() -> None:
    known: set[str] = set()
    for left, right in merges():
        assert all(len(piece) == 1 or piece in known for piece in (left, right))
        known.add(left + right)
