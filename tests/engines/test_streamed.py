"""A model read layer by layer says what the whole model says, holds one layer at a time, and goes
on where a killed pass was.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints import write_checkpoint
from tests.support.exports import EXPORTS, Export
from toolkit.engines.embedded.engine import open_checkpoint
from toolkit.engines.embedded.streamed import CHUNK_TOKENS, LOGIT_TOKENS, stream_texts

LAYERS = 6
TEXTS = [tuple((seed * 31 + 7 * index) % 256 for index in range(20 + seed)) for seed in range(3)]


def silent(done: int, total: int | None, what: str) -> None:
    pass


def whole(path: Path, text: tuple[int, ...], dtype: str) -> np.ndarray:
    """The logits [tokens, vocab] of the whole model, with the steps of the streamed one."""
    engine = open_checkpoint(path, dtype=dtype, max_seq_len=1024, max_step_tokens=CHUNK_TOKENS)
    parts = [
        engine.forward([0], torch.tensor([text[start : start + CHUNK_TOKENS]]))[0].clone()
        for start in range(0, len(text), CHUNK_TOKENS)
    ]
    return torch.cat(parts).numpy()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_are_those_of_the_whole_model(family: str, dtype: str, tmp_path: Path) -> None:
    """Bit for bit, since a text of at most LOGIT_TOKENS makes the same calls."""
    assert max(map(len, TEXTS)) <= LOGIT_TOKENS
    path = write_checkpoint(tmp_path / "model", family=family)
    streamed = stream_texts(path, TEXTS, dtype=dtype, progress=silent, what="target")
    for text in TEXTS:
        (rows,) = streamed.logits(text, 0)
        assert np.array_equal(rows, whole(path, text, dtype))
        (later,) = streamed.logits(text, 5)
        assert np.allclose(later, rows[5:], atol=1e-5)


@pytest.mark.parametrize("name", EXPORTS)
def test_quantized_logits_are_those_of_the_whole_model(
    name: str, exported: Callable[[str], Export]
) -> None:
    path = exported(name).path
    streamed = stream_texts(path, TEXTS, dtype="bfloat16", progress=silent, what="target")
    for text in TEXTS:
        assert np.array_equal(next(streamed.logits(text, 0)), whole(path, text, "bfloat16"))


def test_a_text_of_several_chunks(tmp_path: Path) -> None:
    """The LM head gets other numbers of rows than in the whole model, so the last bits may
    differ.
    """
    path = write_checkpoint(tmp_path / "model", max_position_embeddings=1024)
    text = tuple(index * 7 % 256 for index in range(2 * CHUNK_TOKENS + 9))
    streamed = stream_texts(path, [text], dtype="float32", progress=silent, what="target")
    rows = np.concatenate(list(streamed.logits(text, 0)))
    assert np.abs(rows - whole(path, text, "float32")).max() < 1e-4


def live_bytes() -> int:
    """Bytes of all tensors that Python code holds, each storage once."""
    real = (torch.Tensor, torch.nn.Parameter)  # what compiling leaves behind has no data
    tensors = [found for found in gc.get_objects() if type(found) in real]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def test_one_layer_is_held_at_a_time(tmp_path: Path) -> None:
    path = write_checkpoint(
        tmp_path / "model", num_hidden_layers=LAYERS, hidden_size=128, intermediate_size=512
    )
    layer = 4 * (128 * 16 * (4 + 2 * 2) + 64 * 128 + 3 * 128 * 512)
    held: list[int] = []

    def progress(done: int, total: int | None, what: str) -> None:
        held.append(live_bytes() - before)

    gc.collect()
    before = live_bytes()
    stream_texts(path, TEXTS[:1], dtype="float32", progress=progress, what="target")
    assert len(held) == LAYERS
    # Beside the layer: the embedding and the LM head, and the hidden states of a short text.
    outside = 2 * 4 * 258 * 128 + 8 * 4 * 128 * len(TEXTS[0])
    assert layer < max(held) < 1.1 * layer + outside < 2 * layer


class Killed(Exception):
    pass


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield write_checkpoint(tmp_path / "model", num_hidden_layers=LAYERS)


def killed_at(layer: int, path: Path, state: Path) -> None:
    """Stop a pass when one text has passed the layer."""

    def progress(done: int, total: int | None, what: str) -> None:
        if done > layer * len(TEXTS):
            raise Killed

    with pytest.raises(Killed):
        stream_texts(path, TEXTS, dtype="bfloat16", state=state, progress=progress, what="target")


def test_a_killed_pass_goes_on_at_its_layer(path: Path, tmp_path: Path) -> None:
    state = tmp_path / "resume" / "target"
    killed_at(4, path, state)
    reports: list[tuple[int, str]] = []
    resumed = stream_texts(
        path,
        TEXTS,
        dtype="bfloat16",
        state=state,
        progress=lambda done, total, what: reports.append((done, what)),
        what="target",
    )
    assert reports[0] == (4, "target: going on after a killed run; layers before")
    assert len(reports) == 1 + (LAYERS - 4) * len(TEXTS)
    for text in TEXTS:
        assert np.array_equal(next(resumed.logits(text, 0)), whole(path, text, "bfloat16"))


@pytest.mark.parametrize("damage", ["other texts", "cut off"])
def test_what_does_not_belong_to_the_texts_is_not_taken_up(
    damage: str, path: Path, tmp_path: Path
) -> None:
    state, texts = tmp_path / "target", TEXTS
    killed_at(4, path, state)
    if damage == "cut off":
        state.write_bytes(state.read_bytes()[:200])
    else:
        texts = [text[1:] for text in TEXTS]
    streamed = stream_texts(
        path, texts, dtype="bfloat16", state=state, progress=silent, what="target"
    )
    for text in texts:
        assert np.array_equal(next(streamed.logits(text, 0)), whole(path, text, "bfloat16"))
