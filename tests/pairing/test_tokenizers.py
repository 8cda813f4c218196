"""Pairs that fit, and every way in which a pair does not fit: content decides, not the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from tests.support.checkpoints import write_byte_tokenizer, write_checkpoint, write_pair
from toolkit.errors import CheckpointError, PairingError
from toolkit.pairing.tokenizers import prove_pair


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_pair(tmp_path)


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def refusal(target: Path, draft: Path) -> str:
    with pytest.raises(PairingError) as caught:
        prove_pair(target, draft)
    return str(caught.value)


def warnings_of(target: Path, draft: Path) -> dict[str, str]:
    return {
        finding.check: finding.detail
        for finding in prove_pair(target, draft).findings
        if finding.severity == "warning"
    }


def test_a_pair_that_fits_is_proved(pair: tuple[Path, Path]) -> None:
    proof = prove_pair(*pair)
    assert {finding.severity for finding in proof.findings} == {"ok"}
    assert proof.vocab_size == 258
    assert proof.target_digest != proof.draft_digest
    assert all(
        digest and digest.startswith("sha256:")
        for digest in (proof.target_digest, proof.draft_digest, proof.tokenizer_digest)
    )


def test_a_target_alone_is_proved(pair: tuple[Path, Path]) -> None:
    proof = prove_pair(pair[0], None)
    assert proof.draft_digest is None
    assert proof.target_digest == prove_pair(*pair).target_digest


def test_a_tokenizer_that_makes_no_tokens_is_refused(pair: tuple[Path, Path]) -> None:
    for folder in pair:
        Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    with pytest.raises(
        PairingError, match="the target's tokenizer turns every text into no tokens"
    ):
        prove_pair(*pair)


def test_the_digest_is_of_content_not_of_place(pair: tuple[Path, Path], tmp_path: Path) -> None:
    import shutil

    moved = tmp_path / "moved"
    shutil.copytree(pair[0], moved)
    (moved / "README.md").write_text("not part of the model")
    assert prove_pair(moved, None).target_digest == prove_pair(pair[0], None).target_digest
    edit(
        moved / "config.json", lambda config: config.update(rope_theta=9999.0, rope_parameters=None)
    )
    assert prove_pair(moved, None).target_digest != prove_pair(pair[0], None).target_digest


def test_files_may_differ_where_content_does_not(pair: tuple[Path, Path]) -> None:
    def reorder(data: dict[str, Any]) -> None:
        data["model"]["vocab"] = dict(sorted(data["model"]["vocab"].items(), reverse=True))
        data["padding"] = None

    edit(pair[1] / "tokenizer.json", reorder)
    assert {finding.severity for finding in prove_pair(*pair).findings} == {"ok"}


def test_swapped_tokens_are_named_with_both(pair: tuple[Path, Path]) -> None:
    def swap(data: dict[str, Any]) -> None:
        vocab = data["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    edit(pair[1] / "tokenizer.json", swap)
    first = json.loads((pair[0] / "tokenizer.json").read_text())["model"]["vocab"]["a"]
    message = refusal(*pair)
    assert "have different tokens at 2 ids" in message
    assert f"id {first}: target 'a', draft 'b'" in message
    assert f"id {first + 1}: target 'b', draft 'a'" in message
    assert str(pair[0]) in message
    assert "same tokenizer" in message  # the fix


def test_many_differences_are_counted_and_the_first_listed(pair: tuple[Path, Path]) -> None:
    def rotate(data: dict[str, Any]) -> None:
        vocab = data["model"]["vocab"]
        data["model"]["vocab"] = {token: (index + 1) % 256 for token, index in vocab.items()}

    edit(pair[1] / "tokenizer.json", rotate)
    message = refusal(*pair)
    assert "have different tokens at 256 ids" in message
    assert message.count("\n  id ") == 5
    assert "256 ids differ in all, of 258 and 258" in message


def test_special_tokens_that_one_lacks_are_named(pair: tuple[Path, Path]) -> None:
    edit(pair[1] / "tokenizer.json", lambda data: data["added_tokens"].pop())
    message = refusal(*pair)
    assert "id 257: target '<|eos|>', draft has no such id" in message


def add_token(folder: Path, *names: str) -> None:
    def add(data: dict[str, Any]) -> None:
        last = data["added_tokens"][-1]
        data["added_tokens"] += [
            {**last, "id": last["id"] + i, "content": name} for i, name in enumerate(names, start=1)
        ]

    edit(folder / "tokenizer.json", add)


@pytest.mark.parametrize("wider", ["target", "draft"])
def test_padding_alone_is_repaired_and_recorded(wider: str, tmp_path: Path) -> None:
    """Like Qwen2.5, which has 151936 and 152064 rows for the same tokens, but small."""
    plain, padded = (
        write_checkpoint(tmp_path / "plain", vocab_size=264),
        write_checkpoint(tmp_path / "padded", vocab_size=320),
    )
    target, draft = (padded, plain) if wider == "target" else (plain, padded)
    proof = prove_pair(target, draft, tp_size=8)
    assert proof.vocab_size == 264
    assert (proof.target_vocab_size, proof.draft_vocab_size) == (
        (320, 264) if wider == "target" else (264, 320)
    )
    warnings = {
        finding.check: finding.detail for finding in proof.findings if finding.severity == "warning"
    }
    assert warnings == {
        "vocabulary": (
            f"the {wider}'s 320 rows are trimmed to 264; the rows above id 257 are padding, and the"
            " tokens are the same"
        )
    }


def test_both_are_trimmed_where_tensor_parallelism_asks_for_it(tmp_path: Path) -> None:
    target, draft = (
        write_checkpoint(tmp_path / "target", vocab_size=269),
        write_checkpoint(tmp_path / "draft", vocab_size=320),
    )
    assert prove_pair(target, draft, tp_size=4).vocab_size == 268
    assert "the target's 269 rows and the draft's 320 rows are trimmed to 268" in [
        finding.detail.split(";")[0] for finding in prove_pair(target, draft, tp_size=4).findings
    ]
    with pytest.raises(
        PairingError, match="no size from the 258 rows in use to 269 is divisible by tp_size 16"
    ) as caught:
        prove_pair(target, draft, tp_size=16)
    assert "choose a tp_size that divides 269" in str(caught.value)


def test_rows_of_a_token_that_only_one_has_are_no_padding(tmp_path: Path) -> None:
    """Like Llama, which has 128000 and 128256 tokens, but small. The additional ones are special
    tokens.
    """
    target = write_checkpoint(tmp_path / "target", vocab_size=262)
    draft = write_checkpoint(tmp_path / "draft", vocab_size=258)
    add_token(target, "<|start_header|>", "<|end_header|>", "<|eot|>", "<|reserved|>")
    message = refusal(target, draft)
    assert "have different tokens at 4 ids" in message
    assert "id 258: target '<|start_header|>', draft has no such id" in message
    assert "id 261: target '<|reserved|>', draft has no such id" in message


def test_a_row_that_an_eos_id_stands_in_is_not_cut(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", vocab_size=320, eos_token_id=300)
    draft = write_checkpoint(tmp_path / "draft", vocab_size=264)
    assert "no size from the 301 rows in use to 264" in refusal(target, draft)


def test_another_bos_habit_is_refused_with_the_first_text(pair: tuple[Path, Path]) -> None:
    write_byte_tokenizer(pair[1], bos=False)
    message = refusal(*pair)
    assert "encode text differently" in message
    assert "their BOS/EOS rule differs" in message
    assert "<|bos|>" in message


def test_another_normalizer_is_refused(pair: tuple[Path, Path]) -> None:
    edit(pair[1] / "tokenizer.json", lambda data: data.update(normalizer={"type": "NFC"}))
    message = refusal(*pair)
    assert "encode text differently" in message
    assert "their normalizer differs" in message


def test_another_pre_tokenizer_is_refused(pair: tuple[Path, Path]) -> None:
    edit(
        pair[1] / "tokenizer.json", lambda data: data["pre_tokenizer"].update(add_prefix_space=True)
    )
    message = refusal(*pair)
    assert "encode text differently" in message
    assert "their pre-tokenizer differs" in message


def test_another_decoder_is_refused(pair: tuple[Path, Path]) -> None:
    edit(pair[1] / "tokenizer.json", lambda data: data.update(decoder={"type": "Fuse"}))
    assert "decode ids differently" in refusal(*pair)


def test_special_tokens_in_one_anothers_place_are_named(pair: tuple[Path, Path]) -> None:
    def rename(data: dict[str, Any]) -> None:
        data["added_tokens"][1]["content"] = "<|end|>"

    edit(pair[1] / "tokenizer.json", rename)
    assert "id 257: target '<|eos|>', draft '<|end|>'" in refusal(*pair)


def test_another_bos_id_is_a_warning(pair: tuple[Path, Path]) -> None:
    """The prompt is encoded once, by the target's tokenizer. The BOS id in the draft's config is
    never used.
    """
    edit(pair[1] / "config.json", lambda config: config.update(bos_token_id=3))
    assert warnings_of(*pair) == {
        "BOS id": "target 256, draft 3; prompts are encoded by the target's tokenizer"
    }


def test_a_rule_that_no_probe_shows_is_refused(pair: tuple[Path, Path]) -> None:
    edit(
        pair[1] / "tokenizer.json",
        lambda data: data.update(
            normalizer={"type": "Replace", "pattern": {"String": "zqzqzq"}, "content": "y"}
        ),
    )
    assert "split text by different rules" in refusal(*pair)


def test_other_merges_are_refused(pair: tuple[Path, Path]) -> None:
    for folder, merges in (
        (pair[0], [["a", "b"], ["b", "c"]]),
        (pair[1], [["b", "c"], ["a", "b"]]),
    ):

        def merge(data: dict[str, Any], merges: list[list[str]] = merges) -> None:
            vocab = data["model"]["vocab"]
            # Make room in the vocabulary: drop two byte pieces that no probe has side by side.
            for low in ("\u0100", "\u0101"):
                del vocab[low]
            free = sorted(set(range(256)) - set(vocab.values()))
            vocab.update({"ab": free[0], "bc": free[1]})
            data["model"]["merges"] = merges

        edit(folder / "tokenizer.json", merge)
    message = refusal(*pair)
    assert "their BPE settings differ (merges)" in message


def test_added_tokens_with_other_flags_are_refused(pair: tuple[Path, Path]) -> None:
    edit(pair[1] / "tokenizer.json", lambda data: data["added_tokens"][1].update(lstrip=True))
    message = refusal(*pair)
    assert "treat 1 added tokens differently" in message
    assert "id 257 ('<|eos|>'): lstrip: target False, draft True" in message


def test_what_does_not_matter_to_ids_is_a_warning(pair: tuple[Path, Path]) -> None:
    target, draft = pair
    (draft / "chat_template.jinja").write_text("{{ other }}")
    edit(draft / "config.json", lambda config: config.update(max_position_embeddings=128))
    edit(draft / "generation_config.json", lambda config: config.update(eos_token_id=[257, 3]))
    warnings = warnings_of(target, draft)
    assert set(warnings) == {"chat template", "positions", "EOS ids"}
    assert "128" in warnings["positions"]


def test_a_model_too_small_for_its_tokenizer_is_refused(tmp_path: Path) -> None:
    small = write_checkpoint(tmp_path / "small", vocab_size=200, bos_token_id=0, eos_token_id=1)
    with pytest.raises(
        PairingError,
        match=r"the target's tokenizer makes id 257 \('<\|eos\|>'\), but its model has 200 rows",
    ):
        prove_pair(small, None)


def test_an_eos_id_outside_the_rows_is_refused(pair: tuple[Path, Path]) -> None:
    edit(pair[0] / "generation_config.json", lambda config: config.update(eos_token_id=400))
    with pytest.raises(PairingError, match="BOS/EOS id 400 is outside its 258 rows"):
        prove_pair(pair[0], None)


def test_a_missing_tokenizer_is_refused(pair: tuple[Path, Path]) -> None:
    (pair[1] / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        prove_pair(*pair)


@pytest.mark.parametrize("content", ["{", "{}", '{"model": {"type": "Nothing"}}'])
def test_a_damaged_tokenizer_is_refused(content: str, pair: tuple[Path, Path]) -> None:
    (pair[1] / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        prove_pair(*pair)


def test_a_sentencepiece_model_that_cannot_be_converted_says_how(pair: tuple[Path, Path]) -> None:
    (pair[1] / "tokenizer.json").unlink()
    (pair[1] / "tokenizer.model").write_bytes(b"not a model")
    edit(
        pair[1] / "tokenizer_config.json",
        lambda config: config.update(tokenizer_class="LlamaTokenizer"),
    )
    with pytest.raises(
        CheckpointError, match=r"has only tokenizer\.model, which cannot be converted"
    ) as caught:
        prove_pair(*pair)
    assert "sentencepiece" in str(caught.value)


def test_vocab_and_merges_are_converted(tmp_path: Path) -> None:
    """A GPT-2 style tokenizer without tokenizer.json is converted, and encodes the same."""
    from tokenizers import pre_tokenizers

    from toolkit.checkpoints.tokenizer import load_tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(alphabet)} | {
        "ab": 256,
        "<|endoftext|>": 257,
    }
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer"})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.id_to_token(index) for index in tokenizer.encode("abc").ids] == ["ab", "c"]
    assert tokenizer.decode(tokenizer.encode("ab, 1").ids) == "ab, 1"
