"""A rehearsal's head fits its stand-in target, has the real head's form, and is proved like it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.deployments import HEAD, config_of
from toolkit.checkpoints.heads import LAYER_IDS, parse_head, read_head, read_head_files
from toolkit.facts.heads import VLLM, HeadReader, head_reader
from toolkit.facts.models import HEAD_CONFIGS
from toolkit.pairing.tokenizers import prove_pair
from toolkit.standins.prepare import prepare

NAME = HEAD["draft__checkpoint"]
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "a part of the ids": {"draft_vocab_size": 32000},
    "its own layers": {"eagle_config": {LAYER_IDS: [1, 17, 60]}},
    "two layers with biases": {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True},
}
WITH_NORMS = {"norms": {"norm_before_fc": True, "fc_norm": True}}
TENSORRT_LLM = head_reader("trtllm_pytorch", "1.2.1")


@pytest.mark.parametrize(
    ("changes", "reader"),
    [
        *((changes, TENSORRT_LLM) for changes in CHANGES.values()),
        *((changes, VLLM) for changes in WITH_NORMS.values()),
    ],
    ids=[*CHANGES, *WITH_NORMS],
)
def test_a_stand_in_head_has_the_form_of_the_real_one(
    changes: dict[str, Any], reader: HeadReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = parse_head({**HEAD_CONFIGS[NAME], **changes}, str(NAME))
    monkeypatch.setitem(HEAD_CONFIGS, NAME, {**HEAD_CONFIGS[NAME], **changes})
    prepare(config_of("pytorch", **HEAD), tmp_path)
    target, head = tmp_path / "models/target", tmp_path / "models/draft"
    made, tensors = read_head_files(head)
    proof = prove_pair(target, head, head="eagle3", reader=reader).head
    assert proof is not None and len(proof.captured_layers) == 3
    drafts_all = real.draft_vocab_size == real.layers.vocab_size
    assert (made.draft_vocab_size == made.layers.vocab_size) is drafts_all
    assert ("d2t" in tensors) is not drafts_all
    assert (made.captured_layers is None) is (real.captured_layers is None)
    for field in ("num_captured", "norm_before_fc", "fc_norm"):
        assert getattr(made, field) == getattr(real, field)
    for field in ("num_layers", "qkv_bias", "mlp_bias", "rope_theta", "rope_scaling", "dtype"):
        assert getattr(made.layers, field) == getattr(real.layers, field)
    assert {info.dtype for name, info in tensors.items() if "proj" in name} == {"BF16"}


def test_the_same_yaml_gives_the_same_head(tmp_path: Path) -> None:
    files = []
    for name in ("first", "second"):
        prepare(config_of("pytorch", **HEAD), tmp_path / name)
        files.append((tmp_path / name / "models/draft/model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_a_rehearsal_with_a_head_serves_lookup_and_says_so(tmp_path: Path) -> None:
    rehearsal = prepare(config_of("pytorch", **HEAD), tmp_path)
    assert rehearsal.requested.speculation.kind == "eagle3"
    assert rehearsal.requested.draft is not None
    assert read_head(rehearsal.requested.draft.checkpoint).layers.num_layers == 1
    assert (rehearsal.served.speculation.kind, rehearsal.served.draft) == ("ngram", None)
    (line,) = [line for line in rehearsal.replaced if line.startswith("the head: not run")]
    assert "the acceptance is that of the lookup" in line
    assert any(line.startswith(f"draft {NAME}: a random head") for line in rehearsal.replaced)
