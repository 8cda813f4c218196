"""Proof that a draft's tokens mean what the target's do.

Speculation hands token ids from one model to the other, so both tokenizers must be the same by
content: id for id, step for step of encoding and decoding, and on a corpus of awkward texts.
Whether the files are byte-equal says nothing either way. Vocabulary sizes are made to agree: a
difference of padding rows alone is repaired at build time (`toolkit.pairing.padding`) and recorded,
one of tokens is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.reader import check_against_shape, read_index
from toolkit.checkpoints.shape import ModelShape, read_json, read_shape
from toolkit.checkpoints.tokenizer import SIDE_FILES, load_tokenizer
from toolkit.errors import PairingError
from toolkit.pairing.padding import common_vocab_size
from toolkit.pairing.probes import PROBES
from toolkit.pipeline.hashing import DigestMemo, digest_tree
from toolkit.records.build import PairProof
from toolkit.records.measured import Finding
from toolkit.words import Role

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["SOURCE_PATTERNS", "Comparison", "compare_pair", "prove_pair"]

SHOWN = 5  # ids that differ are listed up to this many
SOURCE_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
)
TOKENIZER_PATTERNS = ("tokenizer.json", *SIDE_FILES)


@dataclass(frozen=True, slots=True)
class _Side:
    """One checkpoint as pairing sees it. tokens: id -> token, added ones included; parts: the
    tokenizer's steps as JSON.
    """

    path: Path
    shape: ModelShape
    tokenizer: Tokenizer
    tokens: dict[int, str]
    parts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """rows: of the embeddings as they are; vocab_size: what both are to be built with."""

    vocab_size: int
    target_rows: int
    draft_rows: int | None
    findings: tuple[Finding, ...]


def prove_pair(
    target: Path, draft: Path | None, memo: DigestMemo | None = None, *, tp_size: int = 1
) -> PairProof:
    """Read both checkpoints' headers, configs and tokenizers, and compare them by content.

    The proof's vocab_size is what both are to be built with; where padding was repaired, tp_size
    divides it. memo: digests of big files remembered from earlier runs. Without a draft the target
    alone is read and digested.

    Raises PairingError with the first ids that differ when they do not belong together,
    CheckpointError for a damaged one.
    """
    patterns = SOURCE_PATTERNS + TOKENIZER_PATTERNS
    compared = compare_pair(target, draft, tp_size=tp_size)
    return PairProof(
        target_digest=digest_tree(target, patterns, memo),
        draft_digest=None if draft is None else digest_tree(draft, patterns, memo),
        tokenizer_digest=digest_tree(target, TOKENIZER_PATTERNS, memo),
        vocab_size=compared.vocab_size,
        target_vocab_size=compared.target_rows,
        draft_vocab_size=compared.draft_rows,
        findings=compared.findings,
    )


def compare_pair(target: Path, draft: Path | None, *, tp_size: int = 1) -> Comparison:
    """The same without a digest of the weights, which takes long where they are large; raises
    the same.
    """
    target_side = _read(target)
    findings = list(_fits_its_model(target_side, "target"))
    vocab_size, draft_rows = target_side.shape.vocab_size, None
    if draft is not None:
        draft_side = _read(draft)
        draft_rows = draft_side.shape.vocab_size
        findings += _fits_its_model(draft_side, "draft")
        compared, vocab_size = _compare(target_side, draft_side, tp_size)
        findings += compared
    return Comparison(vocab_size, target_side.shape.vocab_size, draft_rows, tuple(findings))


def _read(directory: Path) -> _Side:
    tensors = read_index(directory)
    shape = read_shape(directory)
    check_against_shape(tensors, shape, directory)
    tokenizer = load_tokenizer(directory)
    tokens = {index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokenizer.no_padding()
    tokenizer.no_truncation()
    parts = json.loads(tokenizer.to_str())
    return _Side(directory, shape, tokenizer, tokens, parts)


def _fits_its_model(side: _Side, role: Role) -> tuple[Finding, ...]:
    """Every token needs a row; BOS and EOS ids need a token."""
    rows, largest = side.shape.vocab_size, max(side.tokens, default=-1)
    if not any(side.tokenizer.encode(text, add_special_tokens=False).ids for text in PROBES):
        raise PairingError(
            f"the {role}'s tokenizer makes no token of any text",
            where=side.path,
            hint="fetch its tokenizer.json again",
        )
    if largest >= rows:
        raise PairingError(
            f"the {role}'s tokenizer makes id {largest} ({side.tokens[largest]!r}), its model has"
            f" {rows} rows (vocab_size)",
            where=side.path,
            hint="tokenizer and weights must come from the same model",
        )
    special = _special_ids(side)
    outside = sorted(index for index in special if not 0 <= index < rows)
    if outside:
        raise PairingError(
            f"the {role}'s BOS/EOS id {outside[0]} is outside its {rows} rows (vocab_size)",
            where=side.path,
        )
    findings = [Finding(f"{role} tokenizer", "ok", f"{len(side.tokens)} tokens, {rows} rows")]
    unnamed = sorted(special - set(side.tokens))
    if unnamed:
        findings.append(
            Finding(f"{role} EOS/BOS", "warning", f"ids {unnamed} have a row and no token")
        )
    if not side.shape.eos_token_ids:
        findings.append(
            Finding(
                f"{role} EOS/BOS",
                "warning",
                "no EOS id is named: only max_tokens and stop words end a text",
            )
        )
    return tuple(findings)


def _special_ids(side: _Side) -> set[int]:
    return {
        *side.shape.eos_token_ids,
        *(() if side.shape.bos_token_id is None else (side.shape.bos_token_id,)),
    }


def _compare(target: _Side, draft: _Side, tp_size: int) -> tuple[list[Finding], int]:
    """Findings and the common vocabulary size where the pair fits, PairingError where it does not.

    The order is from the cause to its symptoms.
    """
    _same_tokens(target, draft)
    findings = [Finding("tokens", "ok", f"{len(target.tokens)} ids with the same tokens")]
    vocabulary, vocab_size = _vocabulary(target, draft, tp_size)
    findings.append(vocabulary)
    _same_added_tokens(target, draft)
    findings.append(
        Finding("added tokens", "ok", f"{len(target.parts.get('added_tokens') or [])} the same")
    )
    encoded = _same_encodings(target, draft)
    findings.append(
        Finding("encodings", "ok", f"{len(PROBES)} texts, {encoded} ids the same, there and back")
    )
    findings += _same_steps(target, draft)
    findings += _same_ends(target, draft)
    findings.append(_chat_template(target, draft))
    findings.append(_positions(target, draft))
    return findings, vocab_size


def _refuse(
    what: str, target: _Side, draft: _Side, lines: list[str], hint: str | None = None
) -> PairingError:
    return PairingError(
        "\n  ".join(
            [f"draft and target {what}", f"target: {target.path}", f"draft:  {draft.path}", *lines]
        ),
        hint=hint or "choose a draft of the target's own family, with the same tokenizer",
    )


def _same_tokens(target: _Side, draft: _Side) -> None:
    differing = [
        index
        for index in sorted(target.tokens.keys() | draft.tokens.keys())
        if target.tokens.get(index) != draft.tokens.get(index)
    ]
    if not differing:
        return
    lines = [
        f"id {index}: target {_show(target.tokens.get(index))}, draft"
        f" {_show(draft.tokens.get(index))}"
        for index in differing[:SHOWN]
    ]
    if len(differing) > SHOWN:
        lines.append(
            f"... {len(differing)} ids differ in all, of {len(target.tokens)} and"
            f" {len(draft.tokens)}"
        )
    raise _refuse(f"have different tokens at {len(differing)} ids", target, draft, lines)


def _show(token: str | None) -> str:
    return "has no such id" if token is None else repr(token)


def _vocabulary(target: _Side, draft: _Side, tp_size: int) -> tuple[Finding, int]:
    """Rows above the tokens are padding, and the models may have different numbers of them."""
    rows = {"target": target.shape.vocab_size, "draft": draft.shape.vocab_size}
    needed = 1 + max({*target.tokens, *_special_ids(target), *_special_ids(draft)})
    size = common_vocab_size(rows, needed, tp_size)
    trimmed = [f"the {role}'s {count} rows" for role, count in rows.items() if count != size]
    if not trimmed:
        return Finding("vocabulary", "ok", f"{size} rows in both"), size
    detail = (
        f"{' and '.join(trimmed)} are trimmed to {size}; those above id {needed - 1} are padding"
        " over the same tokens"
    )
    return Finding("vocabulary", "warning", detail), size


def _same_added_tokens(target: _Side, draft: _Side) -> None:
    """Flags of added tokens (special, strip, normalized) decide how text is split around them."""
    both = [
        {entry["id"]: entry for entry in side.parts.get("added_tokens") or []}
        for side in (target, draft)
    ]
    differing = [
        index
        for index in sorted(both[0].keys() | both[1].keys())
        if both[0].get(index) != both[1].get(index)
    ]
    if not differing:
        return
    lines = []
    for index in differing[:SHOWN]:
        one, two = both[0].get(index), both[1].get(index)
        if one is None or two is None:
            lines.append(
                f"id {index} ({target.tokens[index]!r}) is an added token of the"
                f" {'draft' if one is None else 'target'} only"
            )
        else:
            flags = [
                f"{key}: target {one[key]}, draft {two.get(key)}"
                for key in one
                if one[key] != two.get(key)
            ]
            lines.append(f"id {index} ({target.tokens[index]!r}): {'; '.join(flags)}")
    raise _refuse(f"treat {len(differing)} added tokens differently", target, draft, lines)


def _same_encodings(target: _Side, draft: _Side) -> int:
    """Encode and decode the probe corpus with both. Returns how many ids were compared."""
    compared = 0
    for text in PROBES:
        one, two = target.tokenizer.encode(text).ids, draft.tokenizer.encode(text).ids
        if one != two:
            first = next(
                (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b),
                min(len(one), len(two)),
            )
            lines = [
                f"text {text!r}, from token {first} on:",
                f"target {[target.tokens.get(index) for index in one[first : first + SHOWN]]}",
                f"draft  {[draft.tokens.get(index) for index in two[first : first + SHOWN]]}",
                *_differing_steps(target, draft),
            ]
            raise _refuse("encode text differently", target, draft, lines)
        if target.tokenizer.decode(one) != draft.tokenizer.decode(one):
            lines = [
                f"ids {one[:SHOWN]}...: {target.tokenizer.decode(one)!r} and"
                f" {draft.tokenizer.decode(one)!r}"
            ]
            raise _refuse("decode ids differently", target, draft, lines)
        compared += len(one)
    return compared


STEPS = {
    "normalizer": "normalizer",
    "pre_tokenizer": "pre-tokenizer",
    "post_processor": "BOS/EOS habit",
    "decoder": "decoder",
}


def _differing_steps(target: _Side, draft: _Side) -> list[str]:
    return [
        f"their {name} differs"
        for key, name in STEPS.items()
        if target.parts.get(key) != draft.parts.get(key)
    ]


def _same_steps(target: _Side, draft: _Side) -> list[Finding]:
    """The steps as configured. A difference here decides encodings that no corpus can cover, so
    it is refused.
    """
    differing = _differing_steps(target, draft)
    models = [dict(side.parts.get("model") or {}) for side in (target, draft)]
    for model in models:
        model.pop("vocab", None)  # compared by id already
        model["merges"] = [
            pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or []
        ]
    if models[0] != models[1]:
        keys = [
            key
            for key in models[0].keys() | models[1].keys()
            if models[0].get(key) != models[1].get(key)
        ]
        differing.append(
            f"their {models[0].get('type', 'model')} settings differ ({', '.join(sorted(keys))})"
        )
    if differing:
        raise _refuse(
            "have the same tokens but split text by different rules", target, draft, differing
        )
    return [Finding("steps", "ok", f"{', '.join(STEPS.values())} and merges the same")]


def _same_ends(target: _Side, draft: _Side) -> list[Finding]:
    """BOS must be the same. EOS may differ: the target's decides when a text ends, the draft
    merely proposes past its own.
    """
    bos = target.shape.bos_token_id, draft.shape.bos_token_id
    eos = target.shape.eos_token_ids, draft.shape.eos_token_ids
    findings = []
    if bos[0] != bos[1]:
        findings.append(
            Finding(
                "BOS id",
                "warning",
                f"target {bos[0]}, draft {bos[1]}; prompts are encoded by the target's tokenizer",
            )
        )
    if set(eos[0]) != set(eos[1]):
        findings.append(
            Finding(
                "EOS ids",
                "warning",
                f"target {list(eos[0])}, draft {list(eos[1])}; the target's end a text",
            )
        )
    return findings or [Finding("BOS and EOS ids", "ok", f"BOS {bos[0]}, EOS {list(eos[0])}")]


def _chat_template(target: _Side, draft: _Side) -> Finding:
    if _template(target.path) != _template(draft.path):
        return Finding(
            "chat template", "warning", "differs; prompts are formatted with the target's"
        )
    return Finding("chat template", "ok", "none" if _template(target.path) is None else "the same")


def _template(directory: Path) -> Any:
    for name in ("chat_template.jinja", "chat_template.json"):
        if (directory / name).exists():
            return (directory / name).read_text(encoding="utf-8")
    file = directory / "tokenizer_config.json"
    return read_json(file).get("chat_template") if file.exists() else None


def _positions(target: _Side, draft: _Side) -> Finding:
    limits = target.shape.max_position_embeddings, draft.shape.max_position_embeddings
    if limits[1] < limits[0]:
        return Finding(
            "positions",
            "warning",
            f"target {limits[0]}, draft {limits[1]}: speculation works up to the draft's limit"
            " only",
        )
    return Finding("positions", "ok", f"target {limits[0]}, draft {limits[1]}")
