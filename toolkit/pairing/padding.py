"""Decide how many rows of embedding and LM head draft and target keep, so that both have
distributions over the same number of ids.

Models of one family often have the same tokens but different numbers of padding rows (Qwen2.5:
151936 and 152064 rows). Padding rows have no meaning, so the larger vocabulary is trimmed. The
smaller one is never widened, since a row of zeros gives a logit of 0, and that can be the largest.
A row that belongs to a token, a BOS id or an EOS id is never cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.errors import PairingError

__all__ = ["common_vocab_size"]


def common_vocab_size(rows: Mapping[str, int], needed: int, tp_size: int) -> int:
    """The largest size that every role has rows for and that tp_size divides.

    rows: role -> rows of its embedding. If all are equal, that number is returned, even if tp_size
    does not divide it.
    needed: the number of rows in use; all rows below it must be kept.
    Raises PairingError if tp_size divides no size from `needed` to the smaller number of rows.
    """
    smallest = min(rows.values())
    if len(set(rows.values())) == 1:
        return smallest
    size = smallest - smallest % tp_size
    if size < needed:
        described = " and ".join(f"the {role} {count}" for role, count in rows.items())
        raise PairingError(
            f"draft and target are padded differently ({described} rows), and no size from the"
            f" {needed} rows in use to {smallest} is divisible by tp_size {tp_size}",
            hint=f"choose a tp_size that divides {smallest}, or models with equally many rows",
        )
    return size
