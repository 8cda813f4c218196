"""Take a head's checkpoint into the store: it is read once, checked and copied as it is.

A head is small and trained on the unquantized target's hidden states, so it keeps its precision
beside a quantized target. No tokenizer is written, since a head has none.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from toolkit.checkpoints.heads import read_head_files
from toolkit.checkpoints.reader import read_tensors
from toolkit.errors import StageError
from toolkit.interfaces import Progress
from toolkit.pipeline.hashing import digest_file
from toolkit.quantize.source import check_values
from toolkit.records.build import QuantizedCheckpoint
from toolkit.records.measured import Finding

__all__ = ["VERSION", "copy_head"]

VERSION = 1
INDEX = "model.safetensors.index.json"


def copy_head(source: Path, out_dir: Path, progress: Progress) -> QuantizedCheckpoint:
    """Copy config.json and the weights into `out_dir`. It makes no links: the store's content must
    not change when somebody overwrites the source.

    Raises CheckpointError for a head that is damaged or holds values that no training gives,
    StageError if a copy differs from its source.
    """
    head, tensors = read_head_files(source)
    for done, (name, tensor) in enumerate(read_tensors(source), start=1):
        check_values(tensor, tensors[name])
        progress(done, len(tensors), "checking the head's weights, tensors")
    out_dir.mkdir(parents=True, exist_ok=True)
    names = sorted({info.file.name for info in tensors.values()} | {"config.json"})
    if "model.safetensors" not in names:
        names.append(INDEX)
    for name in names:
        shutil.copyfile(source / name, out_dir / name)
        if digest_file(out_dir / name) != digest_file(source / name):
            raise StageError("quantize", f"the copy of {name} differs from it", where=source / name)
    return QuantizedCheckpoint(
        role="draft",
        path=out_dir,
        quant_algo=None,
        kv_cache_quant_algo=None,
        architecture=head.layers.architecture,
        vocab_size=head.layers.vocab_size,
        weight_bytes=sum(info.num_bytes for info in tensors.values()),
        quality=None,
        checks=(Finding("files", "ok", f"{len(names)} files copied, with the same sha256"),),
    )
