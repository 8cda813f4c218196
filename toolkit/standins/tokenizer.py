"""Write a small byte-level tokenizer with the special tokens of a model family.

It is a real tokenizer: any text encodes, and decodes to itself. Target and draft get the same file,
as in real pairs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Habits", "habits_of", "merges", "num_tokens", "write_tokenizer"]

# Frequent neighbours in English and Python; "Ġ" is how byte-level alphabets write a space.
MERGED_PIECES = """
th er in on re an en at es or st ar se al le de te it ro ri nt ed me ou is co li ra ne ti lo ur
Ġa Ġt Ġi Ġs Ġf Ġr Ġd Ġp Ġn Ġm Ġc Ġw Ġb Ġo Ġ= Ġ( ĠĠ
Ġth Ġthe Ġin ing ion ent sel self def tur turn retu return imp import Ġre Ġco Ġan Ġand Ġof Ġto
"""


@dataclass(frozen=True, slots=True)
class Habits:
    """How a family uses special tokens. special: the tokens after the ordinary ones. bos: the token
    that encoding puts first, if any. eos: the tokens that end a text.
    """

    special: tuple[str, ...]
    bos: str | None
    eos: tuple[str, ...]


# Source: each family's tokenizer_config.json and generation_config.json.
FAMILIES = {
    "LlamaForCausalLM": Habits(
        ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "MistralForCausalLM": Habits(("<s>", "</s>", "[INST]", "[/INST]"), "<s>", ("</s>",)),
    "Qwen2ForCausalLM": Habits(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), None, ("<|im_end|>", "<|endoftext|>")
    ),
    "Qwen3ForCausalLM": Habits(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), None, ("<|im_end|>", "<|endoftext|>")
    ),
}


def habits_of(architecture: str) -> Habits:
    return FAMILIES[architecture]


def merges() -> list[tuple[str, str]]:
    """The pairs of pieces that are merged, in the order of their rank. Both pieces of a pair are
    single characters or results of earlier merges.
    """
    known, pairs = set[str](), []
    for piece in sorted(MERGED_PIECES.split(), key=len):
        cuts = [
            cut
            for cut in range(1, len(piece))
            if all(len(part) == 1 or part in known for part in (piece[:cut], piece[cut:]))
        ]
        if cuts:
            pairs.append((piece[: cuts[-1]], piece[cuts[-1] :]))
            known.add(piece)
    return pairs


def num_tokens(habits: Habits) -> int:
    return 256 + len(merges()) + len(habits.special)


def write_tokenizer(directory: Path, habits: Habits) -> dict[str, int]:
    """Write tokenizer.json and tokenizer_config.json. Return special token -> id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    pairs = merges()
    pieces = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(left + right for left, right in pairs),
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=pairs)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in habits.special])
    ids = {name: tokenizer.token_to_id(name) for name in habits.special}
    if habits.bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{habits.bos} $A", special_tokens=[(habits.bos, ids[habits.bos])]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": habits.bos,
        "eos_token": habits.eos[0],
        "add_bos_token": habits.bos is not None,
    }
    (directory / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )
    return ids
