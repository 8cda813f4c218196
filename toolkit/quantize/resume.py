"""What a run of the quantize stage has finished so far, in a folder that outlives the process.

    journal.json             digests of all that follows, and what they were made with
    layer-000.safetensors    what the quantizers of a finished layer have observed
    hidden-0, hidden-1       hidden states: the output of the last finished layer, and that of the
                             layer at work
    NAME.json                a finished measurement of quality

The pipeline gives each key a folder of its own, so another checkpoint, text or setting never finds
it. Everything is compared with the journal before it is used. What does not agree, because a file
was cut off or the journal comes from another device, is removed as a whole, and the work begins
anew.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.pipeline.files import write_whole
from toolkit.pipeline.hashing import digest_file
from toolkit.quantize.modelopt import reserve
from toolkit.quantize.source import Source
from toolkit.records.build import QuantizationQuality
from toolkit.records.codec import from_json, to_json
from toolkit.words import Device

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "HASHING_THREADS",
    "HiddenStates",
    "ResumeState",
    "digest_of_values",
    "open_resume_state",
]

FORMAT = 1  # of the folder
HASHING_THREADS = 4


class HiddenStates:
    """The hidden states of all batches between two layers, mapped from one file.

    batches: [n, length, width] each. They are in the page cache, so they take memory only as long
    as there is memory to spare.
    """

    def __init__(
        self, file: Path, shapes: Sequence[tuple[int, int]], width: int, dtype: torch.dtype
    ) -> None:
        """shapes: (n, length) of each batch. Raises OSError if the disk has no room for the file.
        It is created if it is missing or has another size.
        """
        import torch

        values = sum(n * length for n, length in shapes) * width
        size = values * dtype.itemsize
        if not file.exists() or file.stat().st_size != size:
            reserve(file, size)
        flat = torch.from_file(str(file), shared=True, size=values, dtype=dtype)
        lengths = [n * length * width for n, length in shapes]
        self.batches = [
            part.view(n, length, width)
            for part, (n, length) in zip(torch.split(flat, lengths), shapes, strict=True)
        ]

    def digests(self) -> list[str]:
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            return list(pool.map(digest_of_values, self.batches))


def digest_of_values(values: Tensor) -> str:
    """sha256 of the bytes of a tensor."""
    import torch

    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().data).hexdigest()


def open_resume_state(
    folder: Path, source: Source, batches: Sequence[Tensor], device: Device
) -> ResumeState:
    """What a run over these batches of calibration text has left in `folder`."""
    import torch

    shapes = [(batch.shape[0], batch.shape[1]) for batch in batches]
    dtype = getattr(torch, source.dtype)
    return ResumeState(folder, shapes, source.shape.hidden_size, dtype, device)


class ResumeState:
    """The finished parts of a run, as its folder holds them.

    shapes: (n, length) of each batch of calibration text. width: of a hidden state. Raises OSError
    if the disk has no room for the hidden states.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Sequence[tuple[int, int]],
        width: int,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        self._folder, self._shapes, self._width, self._dtype = folder, shapes, width, dtype
        self._journal = folder / "journal.json"
        self._made_with = {"format": FORMAT, "device": device}
        self._layers: list[str] = []  # a digest per finished layer
        self._hidden: list[str] = []  # a digest per batch; of the last finished layer's output
        self._is_calibrated = False
        self.is_discarded = False
        """Whether an earlier run had finished something that cannot be used."""
        if folder.is_dir() and not self._take_up():
            self.is_discarded = self._journal.exists()
            shutil.rmtree(folder)
            self._layers, self._hidden, self._is_calibrated = [], [], False
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def finished_layers(self) -> int:
        return len(self._layers)

    def observed(self, layer: int) -> dict[str, Tensor]:
        """What the quantizers of a finished layer have observed."""
        from safetensors.torch import load_file

        return load_file(self._layer_file(layer))

    def hidden_states(self, layer: int) -> HiddenStates:
        """The input of a layer; its output is the input of the layer after it."""
        file = self._folder / f"hidden-{layer % 2}"
        return HiddenStates(file, self._shapes, self._width, self._dtype)

    def finish_layer(
        self, layer: int, observed: Mapping[str, Tensor], hidden: Sequence[Future[str]]
    ) -> None:
        """Keep what a layer has given. hidden: the digest of each batch of its output."""
        from safetensors.torch import save_file

        file = self._layer_file(layer)
        save_file({name: value.contiguous() for name, value in observed.items()}, file)
        self._layers.append(digest_file(file))
        self._hidden = [digest.result() for digest in hidden]
        self._save()

    def finish_calibration(self) -> None:
        """Remove the hidden states, which nothing reads after the last layer."""
        self._is_calibrated, self._hidden = True, []
        self._save()
        for file in self._folder.glob("hidden-*"):
            file.unlink()

    def quality(self, name: str) -> QuantizationQuality | None:
        """A finished measurement, or None."""
        try:
            text = (self._folder / f"{name}.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return from_json(QuantizationQuality, json.loads(text))

    def finish_quality(self, name: str, quality: QuantizationQuality) -> None:
        write_whole(self._folder / f"{name}.json", json.dumps(to_json(quality)))

    def _layer_file(self, layer: int) -> Path:
        return self._folder / f"layer-{layer:03}.safetensors"

    def _save(self) -> None:
        journal = {
            "made_with": self._made_with,
            "layers": self._layers,
            "hidden": self._hidden,
            "is_calibrated": self._is_calibrated,
        }
        write_whole(self._journal, json.dumps(journal))

    def _take_up(self) -> bool:
        """Read the journal, and compare everything with it. Returns False if they do not agree."""
        try:
            journal: dict[str, Any] = json.loads(self._journal.read_text(encoding="utf-8"))
            if journal["made_with"] != self._made_with:
                return False
            self._layers, self._hidden = journal["layers"], journal["hidden"]
            self._is_calibrated = journal["is_calibrated"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        files = [self._layer_file(layer) for layer in range(len(self._layers))]
        if not all(file.is_file() for file in files):
            return False
        if [digest_file(file) for file in files] != self._layers:
            return False
        return (
            self._is_calibrated or self.hidden_states(len(self._layers)).digests() == self._hidden
        )
