"""What every StepEngine must do, whatever runs inside: a backend's test class inherits this and
provides `engine`.

An engine that promises the same bits for any number of tokens per forward sets `tolerance` to 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from toolkit.interfaces import CopyingEngine, PackingEngine, StepEngine

PROMPT = tuple(b"def forward(self, tokens):\n")


class StepEngineContract:
    """`engine` holds at least 3 slots, sequences of 96 and steps of 8 tokens, over a vocabulary
    of at least 256.
    """

    tolerance: float = 0.0

    @pytest.fixture(autouse=True)
    def clean_slots(self, engine: StepEngine) -> Iterator[None]:
        yield
        for slot in range(engine.max_batch_size):
            engine.rewind([slot], [0])

    def close(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.shape == b.shape and float((a - b).abs().max()) <= self.tolerance

    def test_logits_have_the_shape_and_dtype_promised(self, engine: StepEngine) -> None:
        tokens = torch.tensor([PROMPT[:5], PROMPT[5:10]])
        whole = engine.forward([0, 2], tokens).clone()
        assert whole.shape == (2, 5, engine.vocab_size)
        assert whole.dtype in (torch.float32, torch.float64)
        assert engine.length(0) == engine.length(2) == 5
        assert engine.length(1) == 0
        engine.rewind([0, 2], [0, 0])
        last = engine.forward([0, 2], tokens, last_only=True)
        assert self.close(last, whole[:, -1:])

    def test_many_tokens_at_once_equal_one_by_one(self, engine: StepEngine) -> None:
        at_once = torch.cat(
            [
                engine.forward([0], torch.tensor([PROMPT[i : i + 8]])).clone()
                for i in range(0, 24, 8)
            ],
            dim=1,
        )
        engine.rewind([0], [0])
        singly = torch.cat(
            [engine.forward([0], torch.tensor([[token]])).clone() for token in PROMPT[:24]], dim=1
        )
        assert self.close(at_once, singly)

    def test_greedy_text_does_not_depend_on_tokens_per_step(self, engine: StepEngine) -> None:
        plain = self.greedy(engine, 25)
        engine.rewind([0], [len(PROMPT)])
        # four at a time, as a speculative runtime does when every draft token is right
        verified = []
        for i in range(0, 24, 4):
            verified += engine.forward([0], torch.tensor([plain[i : i + 4]]))[0].argmax(-1).tolist()
        assert verified == plain[1:]

    def greedy(self, engine: StepEngine, count: int) -> list[int]:
        for i in range(0, len(PROMPT), 8):
            logits = engine.forward([0], torch.tensor([PROMPT[i : i + 8]]), last_only=True)
        tokens = []
        for _ in range(count):
            tokens.append(int(logits[0, -1].argmax()))
            logits = engine.forward([0], torch.tensor([[tokens[-1]]]), last_only=True)
        return tokens

    def test_rewound_slot_continues_like_a_fresh_one(self, engine: StepEngine) -> None:
        engine.forward([1], torch.tensor([PROMPT[:6]]))
        engine.forward([1], torch.tensor([PROMPT[20:26]]))  # a wrong branch
        engine.rewind([1], [6])
        branch = engine.forward([1], torch.tensor([PROMPT[6:12]])).clone()
        engine.rewind([1], [0])
        engine.forward([1], torch.tensor([PROMPT[:6]]))
        assert self.close(branch, engine.forward([1], torch.tensor([PROMPT[6:12]])))

    def test_slots_of_different_lengths_do_not_see_one_another(self, engine: StepEngine) -> None:
        alone = []
        for slot, length in ((2, 3), (0, 7), (1, 5)):
            engine.forward([slot], torch.tensor([PROMPT[slot : slot + length]]))
            alone.append(engine.forward([slot], torch.tensor([PROMPT[10:13]])).clone())
            engine.rewind([slot], [length])
        together = engine.forward([2, 0, 1], torch.tensor([PROMPT[10:13]] * 3))
        assert self.close(together, torch.cat(alone))

    def test_padding_of_a_shorter_row_leaves_no_trace(self, engine: StepEngine) -> None:
        engine.forward([0], torch.tensor([PROMPT[:5]]))
        expected = engine.forward([0], torch.tensor([PROMPT[5:8]])).clone()
        engine.rewind([0], [0])
        engine.forward([0, 1], torch.tensor([[*PROMPT[:5], 0, 0, 0], PROMPT[:8]]))
        engine.rewind([0, 1], [5, 8])
        assert self.close(engine.forward([0], torch.tensor([PROMPT[5:8]])), expected)

    def test_rows_of_their_own_lengths_equal_each_alone(self, engine: StepEngine) -> None:
        if not isinstance(engine, PackingEngine):
            pytest.skip("pads its rows")
        rows, wanted = (PROMPT[:3], PROMPT[3:4], PROMPT[4:12], PROMPT[:5]), (2, 1, 0, 5)
        slots = (2, 0, 1)
        for first in (0, 1):  # three of them each, the second time behind those of the first
            before = [engine.length(slot) for slot in slots]
            expected = []
            for i, slot in enumerate(slots, first):
                alone = engine.forward([slot], torch.tensor([rows[i]]))[0]
                expected.append(alone[len(rows[i]) - wanted[i] :].clone())
            engine.rewind(slots, before)
            together = engine.forward_rows(slots, rows[first:][:3], wanted[first:][:3])
            assert self.close(together, torch.cat(expected))
            grown = [
                engine.length(slot) - length for slot, length in zip(slots, before, strict=True)
            ]
            assert grown == [len(row) for row in rows[first:][:3]]
        none = engine.forward_rows([0], [PROMPT[:2]], [0])
        assert none.shape == (0, engine.vocab_size)
        with pytest.raises(ValueError, match="tokens"):
            engine.forward_rows([0, 1], [(1,), ()], [1, 0])
        with pytest.raises(ValueError, match="slot"):
            engine.forward_rows([0, 0], [(1,), (2, 3)], [1, 0])

    def test_a_copied_beginning_goes_on_like_its_source(self, engine: StepEngine) -> None:
        if not isinstance(engine, CopyingEngine):
            pytest.skip("copies nothing")
        engine.forward([0], torch.tensor([PROMPT[:8]]))
        engine.forward([2], torch.tensor([PROMPT[20:26]]))  # what the copy replaces
        engine.copy(0, 2, 5)
        assert [engine.length(slot) for slot in (0, 1, 2)] == [8, 0, 5]
        copied = engine.forward([2], torch.tensor([PROMPT[10:14]])).clone()
        source = engine.forward([0], torch.tensor([PROMPT[8:12]])).clone()
        engine.rewind([0], [5])
        assert torch.equal(copied, engine.forward([0], torch.tensor([PROMPT[10:14]])))
        engine.rewind([0], [5])
        engine.forward([0], torch.tensor([PROMPT[5:8]]))
        assert self.close(source, engine.forward([0], torch.tensor([PROMPT[8:12]])))
        with pytest.raises(ValueError, match="cannot be copied"):
            engine.copy(2, 1, 10)
        with pytest.raises(ValueError, match="itself"):
            engine.copy(2, 2, 1)

    def test_what_does_not_fit_is_refused_and_changes_nothing(self, engine: StepEngine) -> None:
        engine.forward([0], torch.tensor([PROMPT[:4]]))
        too_many = torch.zeros((1, engine.max_step_tokens + 1), dtype=torch.int64)
        with pytest.raises(ValueError, match="tokens"):
            engine.forward([0], too_many)
        with pytest.raises(ValueError, match="slot"):
            engine.forward([0, 0], torch.zeros((2, 1), dtype=torch.int64))
        with pytest.raises(ValueError, match="slot"):
            engine.forward([engine.max_batch_size], torch.zeros((1, 1), dtype=torch.int64))
        with pytest.raises(ValueError, match="rewound"):
            engine.rewind([0], [5])
        assert engine.length(0) == 4

    def test_a_full_slot_takes_max_seq_len_and_then_says_so(self, engine: StepEngine) -> None:
        step = engine.max_step_tokens
        while engine.length(0) < engine.max_seq_len:
            count = min(step, engine.max_seq_len - engine.length(0))
            engine.forward([0], torch.full((1, count), 65))
        assert engine.length(0) == engine.max_seq_len
        with pytest.raises(ValueError, match="fit"):
            for _ in range(step + 64):
                engine.forward([0], torch.full((1, step), 65))
