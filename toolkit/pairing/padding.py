"""Padding rows: how many rows of embedding and LM head draft and target keep, so that their
distributions are equally wide.

Models of one family are often padded to different sizes over the same tokens (Qwen2.5: 151936 and
152064 rows). The rows above the tokens mean nothing, so the larger vocabulary is trimmed; the
smaller is never widened, since a row of zeros gives a logit of 0, and that can win. Nothing is cut
that a token, a BOS id or an EOS id stands in.
"""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.errors import PairingError

__all__ = ["common_vocab_size"]


def common_vocab_size(rows: Mapping[str, int], needed: int, tp_size: int) -> int:
    """The largest size that every role has rows for and that tp_size divides.

    rows: role -> rows of its embedding; equal ones are kept as they are, divisible or not, since
    nothing differs. needed: rows below this are in use. Raises PairingError when no size that
    tp_size divides lies between.
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
            hint=f"choose a tp_size that divides {smallest}, or models padded alike",
        )
    return size
