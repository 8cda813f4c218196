"""Which prompts are read in a step, and how much of each.

A step reads a bounded number of prompt tokens, in whole chunks that start at fixed positions, or
behind what the slot already held of the prompt. A long prompt has to leave room for short ones, and
short ones may not keep a long one waiting for ever: in turns the prompt that came first and the one
with the fewest tokens left go first.
"""

from __future__ import annotations

from collections.abc import Sequence as Prompts
from dataclasses import dataclass

from toolkit.speculative.request_state import Sequence

__all__ = ["Chunk", "next_chunks", "next_prompts"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of a prompt. ends_prompt: its first output token comes from these."""

    sequence: Sequence
    tokens: list[int]
    ends_prompt: bool


def next_chunks(
    prompts: Prompts[Sequence], chunk_len: int, max_tokens: int, *, oldest_first: bool
) -> list[Chunk]:
    """At most one chunk of each prompt, until there are max_tokens or more. prompts: in the order
    in which they came.
    """
    left = [len(sequence.ids) - sequence.cached_tokens for sequence in prompts]
    chunks: list[Chunk] = []
    for place in next_prompts(left, chunk_len, max_tokens, oldest_first=oldest_first):
        sequence = prompts[place]
        start = sequence.cached_tokens
        tokens = sequence.ids[start : start + chunk_len]
        chunks.append(Chunk(sequence, tokens, ends_prompt=len(tokens) == left[place]))
    return chunks


def next_prompts(
    left_tokens: Prompts[int], chunk_len: int, max_tokens: int, *, oldest_first: bool
) -> list[int]:
    """The places of the prompts of which a chunk is read, until there are max_tokens or more.
    left_tokens: what is left of each prompt, in the order in which they came.
    """
    order = sorted(range(len(left_tokens)), key=left_tokens.__getitem__)
    if oldest_first:
        order.remove(0)
        order.insert(0, 0)
    chosen: list[int] = []
    for place in order:
        if max_tokens <= 0:
            break
        chosen.append(place)
        max_tokens -= min(chunk_len, left_tokens[place])
    return chosen
