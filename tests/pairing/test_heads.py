"""An EAGLE-3 head and its target: one that fits, and every way in which one does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.eagle3 import head_config, write_eagle3_target, write_head
from toolkit.errors import CheckpointError, PairingError
from toolkit.facts.heads import head_reader
from toolkit.pairing.tokenizers import prove_pair
from toolkit.records.build import HeadProof
from toolkit.standins.heads import head_tensors

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_eagle3_target(tmp_path_factory.mktemp("pair") / "target")


def capturing(*layers: int) -> dict[str, Any]:
    return {"eagle_config": {"use_aux_hidden_state": True, IDS: list(layers)}}


def changed(directory: Path, **tensors: Any) -> Path:
    """Replace tensors of a head; None removes one."""
    stored = load_file(directory / "model.safetensors")
    kept = {name: value for name, value in {**stored, **tensors}.items() if value is not None}
    save_file(kept, directory / "model.safetensors")
    return directory


def test_a_head_that_fits_is_proved(target: Path, tmp_path: Path) -> None:
    proof = prove_pair(target, write_head(tmp_path), head="eagle3")
    assert proof.head == HeadProof("eagle3", (1, 2, 3), 256, ("embed_tokens.weight",))
    assert (proof.vocab_size, proof.draft_vocab_size) == (258, 258)
    assert proof.draft_digest is not None
    assert {finding.severity for finding in proof.findings} == {"ok"}


def test_the_ids_of_a_head_need_not_be_the_target_s_first(target: Path, tmp_path: Path) -> None:
    config = head_config(draft_vocab_size=100)
    tensors = head_tensors(config, [*range(50), *range(208, 258)])
    proof = prove_pair(target, write_head(tmp_path, config=config, tensors=tensors), head="eagle3")
    assert proof.head is not None and proof.head.draft_vocab_size == 100


def test_a_head_of_the_whole_vocabulary_needs_no_map(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, config=head_config(draft_vocab_size=258))
    changed(head, d2t=None, t2d=None)
    assert prove_pair(target, head, head="eagle3").head is not None


def test_a_head_as_the_speculators_library_writes_it_is_read(target: Path, tmp_path: Path) -> None:
    config = head_config()
    layers = {key: config[key] for key in config if key not in ("architectures", "eagle_config")}
    speculator = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layers,
        "draft_vocab_size": 256,
        IDS: [1, 2, 3],
    }
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in head_tensors(config, range(256)).items()
    }
    head = write_head(tmp_path, config=speculator, tensors=tensors)
    proof = prove_pair(target, head, head="eagle3")
    assert proof.head is not None and proof.head.captured_layers == (1, 2, 3)


# changes of config.json, changes of tensors, words of the refusal
PAIRING_FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "other hidden size": (
        {"target_hidden_size": 96},
        {"fc.weight": torch.zeros(64, 288)},
        "hidden states of size 96, and the target's have 64",
    ),
    "layer outside": (capturing(1, 2, 5), {}, "captures layer 5, and the target has 4"),
    "layers unsorted": (capturing(3, 2, 1), {}, "layers 3, 2, 1, but they must increase"),
    "layer twice": (capturing(1, 2, 2), {}, "each once"),
    "default layers": ({"eagle_config": None}, {}, "default of vLLM captures layers 2, 2, 1"),
    "number of layers": ({"num_aux_hidden_states": 2}, {"fc.weight": torch.zeros(64, 128)},
                         "captures 3 layers, but num_aux_hidden_states is 2"),
    "other vocabulary": (
        {"vocab_size": 300},
        {"t2d": torch.zeros(300, dtype=torch.bool)},
        "takes 300 ids (vocab_size), and the target has 258",
    ),
    "too many ids": (
        {"draft_vocab_size": 300},
        {"lm_head.weight": torch.zeros(300, 64), "d2t": torch.zeros(300, dtype=torch.int64)},
        "drafts 300 ids (draft_vocab_size), and the target has 258",
    ),
    "map of all": (
        {"draft_vocab_size": 258},
        {"lm_head.weight": torch.zeros(258, 64), "d2t": torch.zeros(258, dtype=torch.int64)},
        "for which there is no place",
    ),
    "no map": ({}, {"d2t": None}, "drafts 256 of 258 ids, and has no d2t"),
    "map outside": ({}, {"d2t": torch.full((256,), 3)}, "draft id 255 to id 258"),
    "map not to one": ({}, {"d2t": -torch.arange(256)}, "256 draft ids to the target's id 0"),
    "map of ids": ({}, {"d2t": torch.arange(256)}, "holds differences"),
    "map of floats": ({}, {"d2t": torch.zeros(256)}, "d2t is F32, not whole numbers"),
    "mask of others": (
        {},
        {"t2d": torch.tensor([False, False] + [True] * 256)},
        "first at the target's id 0: t2d lacks it (t2d has 256 ids, d2t 256)",
    ),
    "mask of fewer": ({}, {"t2d": torch.zeros(258, dtype=torch.bool)}, "t2d has 0 ids, d2t 256"),
    "no LM head": ({}, {"lm_head.weight": None}, "would use the target's of 258 rows"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PAIRING_FAULTS)
def test_a_head_that_does_not_fit_is_refused(fault: str, target: Path, tmp_path: Path) -> None:
    changes, tensors, words = PAIRING_FAULTS[fault]
    head = write_head(tmp_path)
    (head / "config.json").write_text(json.dumps(head_config(**changes)))
    changed(head, **tensors)
    with pytest.raises(PairingError) as caught:
        prove_pair(target, head, head="eagle3")
    assert words in str(caught.value)
    assert caught.value.hint is not None or fault == "map of floats"


def test_a_narrower_head_needs_tables_of_its_own(target: Path, tmp_path: Path) -> None:
    config = head_config(hidden_size=32, target_hidden_size=64)
    head = write_head(tmp_path, config=config, tensors=head_tensors(config, range(256)))
    with pytest.raises(PairingError, match=r"no embed_tokens\.weight and would use the target's"):
        prove_pair(target, head, head="eagle3")
    changed(head, **{"embed_tokens.weight": torch.zeros(258, 32)})
    proof = prove_pair(target, head, head="eagle3")
    assert proof.head is not None and proof.head.shares == ()


def for_tensorrt_llm(target: Path, head: Path, version: str = "1.2.1") -> HeadProof | None:
    reader = head_reader("trtllm_pytorch", version)
    return prove_pair(target, head, head="eagle3", reader=reader).head


def test_tensorrt_llm_uses_the_target_s_embedding(target: Path, tmp_path: Path) -> None:
    """It has a place for a head's own only where the head is narrower than the target."""
    head = changed(write_head(tmp_path), **{"embed_tokens.weight": torch.zeros(258, 64)})
    proof = prove_pair(target, head, head="eagle3").head
    assert proof is not None and proof.shares == ()
    for_trtllm = for_tensorrt_llm(target, head)
    assert for_trtllm is not None and for_trtllm.shares == ("embed_tokens.weight",)


def test_tensorrt_llm_takes_the_numbers_of_layers_for_indices(target: Path, tmp_path: Path) -> None:
    """As those who train heads write them; vLLM takes them for how many layers have run."""
    head = write_head(tmp_path)
    theirs, vllm_s = for_tensorrt_llm(target, head), prove_pair(target, head, head="eagle3").head
    assert theirs is not None and theirs.captured_layers == (2, 3, 4)
    assert vllm_s is not None and vllm_s.captured_layers == (1, 2, 3)


def test_tensorrt_llm_reads_safeailab_s_names_before_1_3(target: Path, tmp_path: Path) -> None:
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in head_tensors(head_config(), range(256)).items()
    }
    head = write_head(tmp_path, tensors=tensors)
    with pytest.raises(
        PairingError, match=r"named layers\.0\., and TensorRT-LLM 1\.2\.1 loads mid"
    ):
        for_tensorrt_llm(target, head)
    assert for_tensorrt_llm(target, head, "1.3rc-early") is not None


READER_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "norm before fc": ({"norm_before_fc": True}, "norm_before_fc, and TensorRT-LLM 1.2.1 would"),
    "norm per layer": ({"fc_norm": True}, "trained with fc_norm"),
    "the last": (capturing(1, 2, 4), "layer 5, and the target has 4 that TensorRT-LLM 1.2.1 can"),
    "embedding": (capturing(-1, 2, 3), "layer 0, and the target has 4 that TensorRT-LLM 1.2.1 can"),
}


@pytest.mark.parametrize("fault", READER_FAULTS)
def test_what_tensorrt_llm_would_leave_out_is_refused(
    fault: str, target: Path, tmp_path: Path
) -> None:
    changes, words = READER_FAULTS[fault]
    config = head_config(**changes)
    head = write_head(tmp_path, config=config, tensors=head_tensors(config, range(256)))
    if fault != "embedding":
        assert prove_pair(target, head, head="eagle3").head is not None  # vLLM reads it
    with pytest.raises(PairingError) as caught:
        for_tensorrt_llm(target, head)
    assert words in str(caught.value) and caught.value.hint is not None


def test_tensorrt_llm_does_not_read_the_speculators_library(target: Path, tmp_path: Path) -> None:
    config = head_config()
    speculator = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {key: config[key] for key in config if key != "architectures"},
        "draft_vocab_size": 256,
        IDS: [1, 2, 3],
    }
    head = write_head(tmp_path, config=speculator, tensors=head_tensors(config, range(256)))
    with pytest.raises(PairingError, match=r"the config\.json of the speculators library"):
        for_tensorrt_llm(target, head)


CHECKPOINT_FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tensor missing": ({}, {"norm.weight": None}, "norm.weight [64] is missing"),
    "first norm missing": (
        {},
        {"midlayer.hidden_norm.weight": None},
        "layers.0.hidden_norm.weight",
    ),
    "other shape": ({}, {"fc.weight": torch.zeros(64, 64)}, "config.json implies [64, 192]"),
    "unknown tensor": ({}, {"verifier_norm.weight": torch.zeros(64)}, "no tensor of an EAGLE-3"),
    "quantized": (
        {},
        {"norm.weight": torch.zeros(64, dtype=torch.int8)},
        "a head is not quantized",
    ),
    "a whole model": (
        {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None, "eagle_config": None},
        {},
        "set speculation.kind: draft_target",
    ),
    "another architecture": ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, {}, "supported: Llama"),
    "another kind": ({"speculators_model_type": "peagle"}, {}, "'peagle' is not supported"),
    "last state only": ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "last hidden state"),
    "layers of words": ({"eagle_config": {IDS: ["1"]}}, {}, "must be a list of layer numbers"),
    "quantization": ({"quantization_config": {"quant_algo": "FP8"}}, {}, "a quantized head"),
}


@pytest.mark.parametrize("fault", CHECKPOINT_FAULTS)
def test_a_damaged_head_is_refused(fault: str, target: Path, tmp_path: Path) -> None:
    changes, tensors, words = CHECKPOINT_FAULTS[fault]
    head = write_head(tmp_path)
    (head / "config.json").write_text(json.dumps(head_config(**changes)))
    changed(head, **tensors)
    with pytest.raises(CheckpointError) as caught:
        prove_pair(target, head, head="eagle3")
    assert words in str(caught.value)


def test_pickles_are_refused_with_the_way_out(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path)
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickles(.|\n)*save_file\(torch.load"):
        prove_pair(target, head, head="eagle3")


def test_a_head_that_is_named_as_a_draft_model_is_told_apart(target: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"set speculation\.kind: eagle3"):
        prove_pair(target, write_head(tmp_path))


def test_fewer_positions_than_the_target_s_are_a_warning(target: Path, tmp_path: Path) -> None:
    config = head_config(max_position_embeddings=64)
    proof = prove_pair(target, write_head(tmp_path, config=config), head="eagle3")
    (warning,) = [finding for finding in proof.findings if finding.severity == "warning"]
    assert "target 1024, head 64" in warning.detail
