"""Step engines for tests of the runtime: a tiny language model with a cache that can go wrong,
and wrappers that misbehave.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.interfaces import Burst, Chain, Sampling, StepEngine
from toolkit.speculative.acceptance import match, reject
from toolkit.speculative.sampling import draw, normalised, weights

LOOK_BACK = 4  # tokens that the logits depend on


class TableEngine:
    """Logits are a sum of random tables, one per look-back distance, read through a per-slot cache
    of tokens.

    A stand-in for attention where arithmetic has to be exact: the same prefix gives bitwise the
    same logits in any batch, width or dtype-preserving path, and garbage that a missing rewind or
    catch-up leaves in the cache changes them. `closeness` in [0, 1] mixes in the tables of seed 0,
    so engines of different seeds can be made to agree more or less.
    """

    def __init__(
        self,
        seed: int,
        *,
        vocab_size: int = 40,
        max_batch_size: int = 8,
        max_seq_len: int = 96,
        max_step_tokens: int = 9,
        closeness: float = 0.0,
        sharpness: float = 2.0,
        dtype: str = "float64",
    ) -> None:
        self.vocab_size = vocab_size
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.max_step_tokens = max_step_tokens
        shape = (LOOK_BACK, vocab_size, vocab_size)
        own = np.random.default_rng(seed).normal(size=shape)
        common = np.random.default_rng(0).normal(size=shape)
        tables = sharpness * (closeness * common + (1 - closeness) * own)
        # One row more, of zeros, for the places before a sequence begins.
        self._tables = np.concatenate(
            [tables, np.zeros((LOOK_BACK, 1, vocab_size))], axis=1
        ).astype(dtype)
        self._cache = np.full(
            (max_batch_size, LOOK_BACK + max_seq_len + 2 * max_step_tokens), vocab_size
        )
        self._lengths = [0] * max_batch_size
        self.forwards: list[tuple[int, int]] = []  # (batch, n) of every forward

    def forward(
        self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False
    ) -> torch.Tensor:
        rows, n = tokens.shape
        assert rows == len(slots) == len(set(slots))
        assert 0 < n <= self.max_step_tokens
        self.forwards.append((rows, n))
        out = np.empty((rows, n, self.vocab_size), dtype=self._tables.dtype)
        given = tokens.numpy()
        for row, slot in enumerate(slots):
            cache, start = self._cache[slot], LOOK_BACK + self._lengths[slot]
            cache[start : start + n] = given[row]
            out[row] = self._tables[0, cache[start : start + n]]
            for back in range(1, LOOK_BACK):
                out[row] += self._tables[back, cache[start - back : start - back + n]]
            self._lengths[slot] += n
        return torch.from_numpy(out[:, -1:] if last_only else out)

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            if not 0 <= length <= self._lengths[slot]:
                raise ValueError(f"slot {slot} holds {self._lengths[slot]} tokens, not {length}")
            self._lengths[slot] = length

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def copy(self, source: int, slot: int, length: int) -> None:
        assert source != slot and 0 < length <= self._lengths[source]
        self._cache[slot, : LOOK_BACK + length] = self._cache[source, : LOOK_BACK + length]
        self._lengths[slot] = length


class PackingTableEngine(TableEngine):
    """A TableEngine that takes rows of their own lengths. packed: the lengths of each forward."""

    def __init__(self, seed: int, **settings: Any) -> None:
        super().__init__(seed, **settings)
        self.packed: list[tuple[int, ...]] = []

    def forward_rows(
        self, slots: Sequence[int], rows: Sequence[Sequence[int]], wanted: Sequence[int]
    ) -> torch.Tensor:
        self.packed.append(tuple(map(len, rows)))
        parts = [
            super(PackingTableEngine, self).forward([slot], torch.tensor([list(row)]))[
                0, len(row) - count :
            ]
            for slot, row, count in zip(slots, rows, wanted, strict=True)
        ]
        return torch.cat(parts)


class ChainingTableEngine(TableEngine):
    """A TableEngine that runs the tokens that it chooses itself. chains: how many tokens each row
    of each call was to have.
    """

    def __init__(self, seed: int, **settings: Any) -> None:
        super().__init__(seed, **settings)
        self.chains: list[tuple[int, ...]] = []

    def forward_chain(self, chains: Sequence[Chain]) -> tuple[list[list[int]], NDArray[Any] | None]:
        self.chains.append(tuple(chain.count for chain in chains))
        return chained(self, chains)


def chained(
    engine: StepEngine, chains: Sequence[Chain]
) -> tuple[list[list[int]], NDArray[Any] | None]:
    """ChainingEngine.forward_chain, row by row and token by token."""
    counts = [chain.count for chain in chains]
    assert counts == sorted(counts, reverse=True) and min(counts) > 0
    probs = np.full((len(chains), counts[0], engine.vocab_size), np.nan)
    ids: list[list[int]] = []
    for index, chain in enumerate(chains):
        ids.append([])
        fed = list(chain.tokens)
        for depth in range(chain.count):
            logits = engine.forward([chain.slot], torch.tensor([fed]), last_only=True)[0].numpy()
            if -1 in ids[-1] or not np.isfinite(logits.max()):
                token = -1
            elif chain.temperature == 0.0:
                token = int(logits[0].argmax())
            else:
                sampling = Sampling(chain.temperature, chain.top_k, chain.top_p)
                row_weights = weights(logits, sampling)
                if chain.race is not None:
                    token = int((row_weights[0] * chain.race[depth]).argmax())
                else:
                    probs[index, depth] = normalised(row_weights)[0]
                    token = draw(probs[index, depth], chain.uniforms[depth])
            ids[-1].append(token)
            fed = [max(token, 0)]
    return ids, probs if any(chain.is_drawn for chain in chains) else None


class BurstingTableEngine(TableEngine):
    """A TableEngine that takes verify steps by itself. bursts: how many steps each burst had.
    limits_ns: how long each might last.
    before_step: called before each, with its number in the burst. blind_at: the length of a
    sequence from which on its logits are not finite. doubts_every: so many of the sampled steps are
    left to the caller, as if rounding decided them.
    """

    def __init__(
        self, seed: int, *, blind_at: int | None = None, doubts_every: int = 10**9, **settings: Any
    ) -> None:
        super().__init__(seed, **settings)
        self.bursts: list[int] = []
        self.limits_ns: list[int] = []
        self.before_step: Callable[[int], None] = lambda step: None
        self._blind_at = blind_at
        self._until_doubt = itertools.cycle(range(doubts_every - 1, -1, -1))

    def forward(
        self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False
    ) -> torch.Tensor:
        logits = super().forward(slots, tokens, last_only=last_only)
        if self._blind_at is not None and self.length(slots[0]) > self._blind_at:
            logits[:] = float("nan")
        return logits

    def bursts_with(self, draft: StepEngine) -> bool:
        return True

    def burst(self, draft: StepEngine | None, burst: Burst) -> tuple[int, bool]:
        """BurstingEngine.burst, as the sentences there say it."""
        unread, room, count, goes_on = list(burst.unread), burst.room, 0, True
        uniforms = [] if burst.uniforms is None else burst.uniforms.tolist()
        races = None if burst.races is None else burst.races.numpy()
        is_undecided = False
        self.limits_ns.append(burst.max_ns)
        while goes_on and count < len(burst.steps):
            self.before_step(count)
            if burst.flags[0]:
                break
            most = min(burst.draft_len, int(burst.flags[2]))
            wanted = min(most, room - 1) if draft is not None else 0
            if burst.uniforms is not None and len(uniforms) < 2 * wanted + 1:
                break
            if races is not None and len(races) < wanted + 1:
                break
            sampling = burst.sampling
            if sampling.temperature and next(self._until_doubt) == 0:
                is_undecided = True
                break
            drafts: list[int] = []
            probs: Any = None
            if draft is not None and wanted:
                race = None if races is None else races[:wanted]
                own = (sampling.temperature, uniforms[:wanted], race)
                filters = (sampling.top_k, sampling.top_p)
                chain = Chain(burst.slot, unread, wanted, *own, *filters)
                (drafts,), probs = chained(draft, [chain])
                drafts = drafts[: [*drafts, -1].index(-1)]
            block = torch.tensor([[unread[-1], *drafts]])
            logits = self.forward([burst.slot], block)[0].numpy()
            rows = weights(logits, sampling if sampling.temperature else Sampling(1.0))
            if not np.isfinite(logits).all():
                accepted, token = 0, -1
            elif burst.uniforms is not None:
                rest = uniforms[wanted : wanted + len(drafts) + 1]
                accepted, token = reject(
                    drafts, () if probs is None else probs[0], normalised(rows), rest
                )
                del uniforms[: wanted + len(drafts) + 1]
            else:
                noise = 1.0 if races is None else races[: len(rows)]
                accepted, token = match(drafts, (rows * noise).argmax(-1).tolist().__getitem__)
                races = None if races is None else races[accepted + 1 :]
            numbers = [wanted, len(drafts), accepted, 1, 2, time.monotonic_ns(), *drafts, token]
            burst.steps[count, : len(numbers)] = torch.tensor(numbers)
            read = self.length(burst.slot) - len(drafts) + accepted
            self.rewind([burst.slot], [read])
            new = [*drafts[:accepted], token]
            if draft is not None and wanted:
                draft.rewind([burst.slot], [min(draft.length(burst.slot), read)])
                unread = (drafts[-1:] if drafts and accepted == len(drafts) else []) + [token]
            else:
                unread = [token]
            room -= len(new)
            goes_on = room > 0 and len(drafts) == wanted and not {*new} & {-1, *burst.end_ids}
            count += 1
            burst.flags[1] = count
            if burst.event_fd >= 0 and goes_on and count < len(burst.steps):
                os.eventfd_write(burst.event_fd, 1)
        self.bursts.append(count)
        return count, is_undecided


class ForgetfulRewind(TableEngine):
    """Claims to rewind and keeps the rejected tokens: the lengths it reports are right, what it
    computes with is not.
    """

    def __init__(self, seed: int, **settings: object) -> None:
        super().__init__(seed, **settings)  # type: ignore[arg-type]
        self._claimed = [0] * self.max_batch_size

    def forward(
        self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False
    ) -> torch.Tensor:
        for slot in slots:
            self._claimed[slot] += tokens.shape[1]
        self._cache = np.pad(self._cache, ((0, 0), (0, tokens.shape[1])))
        return super().forward(slots, tokens, last_only=last_only)

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            self._claimed[slot] = length
            if length == 0:
                self._lengths[slot] = 0

    def length(self, slot: int) -> int:
        return self._claimed[slot]


class FailingEngine(TableEngine):
    """Raises in the forwards whose number (from 0) is in `failing`."""

    failing: frozenset[int] = frozenset()

    def forward(
        self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False
    ) -> torch.Tensor:
        if len(self.forwards) in self.failing:
            self.forwards.append((0, 0))
            raise RuntimeError("planted fault")
        return super().forward(slots, tokens, last_only=last_only)
