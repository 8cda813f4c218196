"""Prove that a token id means the same to draft and target.

Speculation passes token ids from one model to the other, so both tokenizers must have the same
content: the same token for every id, the same steps of encoding and decoding, and the same results
on a corpus of awkward texts. Whether the files are equal byte for byte proves nothing.

The vocabularies must have equal sizes. If they differ in padding rows only, this is repaired at
build time (`toolkit.pairing.padding`) and recorded; if they differ in tokens, the pair is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.reader import check_against_shape, read_index
from toolkit.checkpoints.shape import ModelShape, read_shape
from toolkit.checkpoints.tokenizer import SIDE_FILES, load_tokenizer
from toolkit.errors import PairingError
from toolkit.facts.heads import VLLM, HeadReader
from toolkit.pairing.chat import check_ids, compare_templates
from toolkit.pairing.heads import compare_head
from toolkit.pairing.padding import common_vocab_size
from toolkit.pairing.probes import PROBES
from toolkit.pipeline.hashing import DigestMemo, digest_tree
from toolkit.records.build import HeadProof, PairProof
from toolkit.records.measured import Finding
from toolkit.words import Head, Role

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["SOURCE_PATTERNS", "Comparison", "compare_pair", "prove_pair"]

MAX_LISTED_IDS = 5  # of the ids that differ, an error lists the first
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
    """What pairing reads of one checkpoint. tokens: id -> token, including added tokens. parts: the
    tokenizer's steps as JSON.
    """

    path: Path
    shape: ModelShape
    tokenizer: Tokenizer
    tokens: dict[int, str]
    parts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """target_rows, draft_rows: the present rows of the embeddings. vocab_size: the number of rows
    that both are to be built with.
    """

    vocab_size: int
    target_rows: int
    draft_rows: int | None
    findings: tuple[Finding, ...]
    head: HeadProof | None = None


def prove_pair(
    target: Path,
    draft: Path | None,
    memo: DigestMemo | None = None,
    *,
    tp_size: int = 1,
    head: Head | None = None,
    reader: HeadReader = VLLM,
) -> PairProof:
    """Read the headers, configs and tokenizers of both checkpoints, and compare them by content.

    The proof's vocab_size is the number of rows that both are to be built with; if padding was
    repaired, tp_size divides it. memo: digests of big files, remembered from earlier runs. Without
    a draft, only the target is read and digested. head: the draft is a head of this kind, which
    has no tokenizer. reader: the runtime that will read it.

    Raises PairingError with the first ids that differ if the two do not belong together, and
    CheckpointError if one of them is damaged.
    """
    patterns = SOURCE_PATTERNS + TOKENIZER_PATTERNS
    compared = compare_pair(target, draft, tp_size=tp_size, head=head, reader=reader)
    return PairProof(
        target_digest=digest_tree(target, patterns, memo),
        draft_digest=None if draft is None else digest_tree(draft, patterns, memo),
        tokenizer_digest=digest_tree(target, TOKENIZER_PATTERNS, memo),
        vocab_size=compared.vocab_size,
        target_vocab_size=compared.target_rows,
        draft_vocab_size=compared.draft_rows,
        findings=compared.findings,
        head=compared.head,
    )


def compare_pair(
    target: Path,
    draft: Path | None,
    *,
    tp_size: int = 1,
    head: Head | None = None,
    reader: HeadReader = VLLM,
) -> Comparison:
    """Like prove_pair, but without the digest of the weights, which takes long if they are large.
    Raises the same errors.
    """
    target_side = _read(target)
    findings = list(_fits_its_model(target_side, "target"))
    about_chat = check_ids(target, target_side.tokenizer)
    findings += [about_chat] if about_chat is not None else []
    vocab_size, draft_rows = target_side.shape.vocab_size, None
    if draft is not None and head is not None:
        proof, rows, about_head = compare_head(target, target_side.shape, draft, head, reader)
        return Comparison(vocab_size, vocab_size, rows, (*findings, *about_head), proof)
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
    """Check that every token has a row, and every BOS and EOS id has a row and a token. Raises
    PairingError; an id without a token is only a warning.
    """
    rows, largest = side.shape.vocab_size, max(side.tokens, default=-1)
    if not any(side.tokenizer.encode(text, add_special_tokens=False).ids for text in PROBES):
        raise PairingError(
            f"the {role}'s tokenizer turns every text into no tokens at all",
            where=side.path,
            hint="fetch its tokenizer.json again",
        )
    if largest >= rows:
        raise PairingError(
            f"the {role}'s tokenizer makes id {largest} ({side.tokens[largest]!r}), but its model"
            f" has {rows} rows (vocab_size)",
            where=side.path,
            hint="use a tokenizer and weights of the same model",
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
            Finding(f"{role} EOS/BOS", "warning", f"ids {unnamed} have a row but no token")
        )
    if not side.shape.eos_token_ids:
        findings.append(
            Finding(
                f"{role} EOS/BOS",
                "warning",
                "its configs name no EOS id, so only max_tokens and stop words end a text",
            )
        )
    return tuple(findings)


def _special_ids(side: _Side) -> set[int]:
    special_ids = set(side.shape.eos_token_ids)
    if side.shape.bos_token_id is not None:
        special_ids.add(side.shape.bos_token_id)
    return special_ids


def _compare(target: _Side, draft: _Side, tp_size: int) -> tuple[list[Finding], int]:
    """Return findings and the common vocabulary size. Raises PairingError if the pair does not fit.

    Causes are checked before their symptoms, so that the error names the cause.
    """
    _same_tokens(target, draft)
    findings = [Finding("tokens", "ok", f"{len(target.tokens)} ids with the same tokens")]
    vocabulary, vocab_size = _vocabulary(target, draft, tp_size)
    findings.append(vocabulary)
    _same_added_tokens(target, draft)
    findings.append(
        Finding(
            "added tokens", "ok", f"the same {len(target.parts.get('added_tokens') or [])} tokens"
        )
    )
    encoded = _same_encodings(target, draft)
    findings.append(
        Finding(
            "encodings", "ok", f"{len(PROBES)} texts give the same {encoded} ids, and decode alike"
        )
    )
    findings += _same_steps(target, draft)
    findings += _same_ends(target, draft)
    findings.append(compare_templates(target.path, draft.path))
    findings.append(_positions(target, draft))
    return findings, vocab_size


def _refusal(
    difference: str, target: _Side, draft: _Side, lines: list[str], hint: str | None = None
) -> PairingError:
    return PairingError(
        "\n  ".join(
            [
                f"draft and target {difference}",
                f"target: {target.path}",
                f"draft:  {draft.path}",
                *lines,
            ]
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
        for index in differing[:MAX_LISTED_IDS]
    ]
    if len(differing) > MAX_LISTED_IDS:
        lines.append(
            f"... {len(differing)} ids differ in all, of {len(target.tokens)} and"
            f" {len(draft.tokens)}"
        )
    raise _refusal(f"have different tokens at {len(differing)} ids", target, draft, lines)


def _show(token: str | None) -> str:
    return "has no such id" if token is None else repr(token)


def _vocabulary(target: _Side, draft: _Side, tp_size: int) -> tuple[Finding, int]:
    """Rows above the tokens are padding. The two models may have different numbers of them."""
    rows = {"target": target.shape.vocab_size, "draft": draft.shape.vocab_size}
    needed = 1 + max({*target.tokens, *_special_ids(target), *_special_ids(draft)})
    size = common_vocab_size(rows, needed, tp_size)
    trimmed = [f"the {role}'s {count} rows" for role, count in rows.items() if count != size]
    if not trimmed:
        return Finding("vocabulary", "ok", f"{size} rows in both"), size
    detail = (
        f"{' and '.join(trimmed)} are trimmed to {size}; the rows above id {needed - 1} are"
        " padding, and the tokens are the same"
    )
    return Finding("vocabulary", "warning", detail), size


def _same_added_tokens(target: _Side, draft: _Side) -> None:
    """Compare the added tokens, since their flags (special, strip, normalized) decide how text is
    split around them.
    """
    target_entries, draft_entries = (
        {entry["id"]: entry for entry in side.parts.get("added_tokens") or []}
        for side in (target, draft)
    )
    differing = [
        index
        for index in sorted(target_entries.keys() | draft_entries.keys())
        if target_entries.get(index) != draft_entries.get(index)
    ]
    if not differing:
        return
    lines = []
    for index in differing[:MAX_LISTED_IDS]:
        of_target, of_draft = target_entries.get(index), draft_entries.get(index)
        if of_target is None or of_draft is None:
            role = "draft" if of_target is None else "target"
            lines.append(
                f"id {index} ({target.tokens[index]!r}) is an added token of the {role} only"
            )
        else:
            flags = [
                f"{key}: target {of_target[key]}, draft {of_draft.get(key)}"
                for key in of_target
                if of_target[key] != of_draft.get(key)
            ]
            lines.append(f"id {index} ({target.tokens[index]!r}): {'; '.join(flags)}")
    raise _refusal(f"treat {len(differing)} added tokens differently", target, draft, lines)


def _same_encodings(target: _Side, draft: _Side) -> int:
    """Encode and decode the probe texts with both tokenizers. Return how many ids were compared."""
    compared = 0
    for text in PROBES:
        ids, draft_ids = target.tokenizer.encode(text).ids, draft.tokenizer.encode(text).ids
        if ids != draft_ids:
            pairs = enumerate(zip(ids, draft_ids, strict=False))
            first = next(
                (position for position, (ours, theirs) in pairs if ours != theirs),
                min(len(ids), len(draft_ids)),
            )
            lines = [
                f"text {text!r}, from token {first} on:",
                f"target {_tokens_from(first, ids, target)}",
                f"draft  {_tokens_from(first, draft_ids, draft)}",
                *_differing_steps(target, draft),
            ]
            raise _refusal("encode text differently", target, draft, lines)
        target_text, draft_text = target.tokenizer.decode(ids), draft.tokenizer.decode(ids)
        if target_text != draft_text:
            lines = [f"ids {ids[:MAX_LISTED_IDS]}...: {target_text!r} and {draft_text!r}"]
            raise _refusal("decode ids differently", target, draft, lines)
        compared += len(ids)
    return compared


def _tokens_from(first: int, ids: list[int], side: _Side) -> list[str | None]:
    return [side.tokens.get(index) for index in ids[first : first + MAX_LISTED_IDS]]


STEPS = {
    "normalizer": "normalizer",
    "pre_tokenizer": "pre-tokenizer",
    "post_processor": "BOS/EOS rule",
    "decoder": "decoder",
}


def _differing_steps(target: _Side, draft: _Side) -> list[str]:
    return [
        f"their {name} differs"
        for key, name in STEPS.items()
        if target.parts.get(key) != draft.parts.get(key)
    ]


def _same_steps(target: _Side, draft: _Side) -> list[Finding]:
    """Compare the configured steps. No corpus covers every text, so a difference here is refused
    even if all probe texts encode alike.
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
        raise _refusal(
            "have the same tokens but split text by different rules", target, draft, differing
        )
    return [Finding("steps", "ok", f"the same {', '.join(STEPS.values())} and merges")]


def _same_ends(target: _Side, draft: _Side) -> list[Finding]:
    """Warn if BOS or EOS ids differ. Neither is an error: prompts are encoded by the target's
    tokenizer, and the target's EOS ids decide when a text ends.
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
                f"target {list(eos[0])}, draft {list(eos[1])}; the target's ids end a text",
            )
        )
    return findings or [Finding("BOS and EOS ids", "ok", f"BOS {bos[0]}, EOS {list(eos[0])}")]


def _positions(target: _Side, draft: _Side) -> Finding:
    limits = target.shape.max_position_embeddings, draft.shape.max_position_embeddings
    if limits[1] < limits[0]:
        return Finding(
            "positions",
            "warning",
            f"target {limits[0]}, draft {limits[1]}: speculation works only up to the draft's"
            " limit",
        )
    return Finding("positions", "ok", f"target {limits[0]}, draft {limits[1]}")
