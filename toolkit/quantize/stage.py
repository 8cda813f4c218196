"""The quantize stage: take a source checkpoint, write a quantized one, measure its quality, and
check the written files.

The unified format is always written. If the engine flow needs the TRT-LLM format, or vLLM needs
compressed-tensors, that is written too, into a folder of its own inside the checkpoint.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.quantized import Quantization, quantization_conflict
from toolkit.checkpoints.reader import read_index
from toolkit.config.schema import CalibrationConfig, QuantizationConfig
from toolkit.errors import CheckpointError, StageError, UsageError
from toolkit.interfaces import Fingerprint, Progress
from toolkit.pipeline.memory import freed_blocks_returned
from toolkit.quantize.algorithms import Algorithm, algorithm_of
from toolkit.quantize.calibrate import batches_of, encode, split_texts
from toolkit.quantize.check import check_format
from toolkit.quantize.checkpoint import copy_code, copy_unchanged, finish, write_configs
from toolkit.quantize.partition import Ranks, partition
from toolkit.quantize.source import Source, check_weights, open_source
from toolkit.records.build import (
    QuantizationQuality,
    QuantizedCheckpoint,
    TrtllmForm,
    VllmFormat,
)
from toolkit.records.measured import Finding
from toolkit.words import Device, KvCacheQuantAlgo, Role

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.quantize.calibrated import Calibrated
    from toolkit.quantize.folding import Folding
    from toolkit.quantize.readback import Captured
    from toolkit.quantize.resume import ResumeState

__all__ = [
    "TRTLLM_FOLDER",
    "VERSION",
    "VLLM_FOLDER",
    "Ranks",
    "fingerprint",
    "needs_vllm_format",
    "quantize",
]

VERSION = 7
TRTLLM_FOLDER = "trtllm"
VLLM_FOLDER = "vllm"


def needs_vllm_format(quantization: QuantizationConfig) -> bool:
    """Whether vLLM cannot read what ModelOpt's unified format makes of this algorithm: it knows no
    smoothing vector.
    """
    algorithm = algorithm_of(quantization.quant_algo)
    return algorithm is not None and algorithm.pre_quant_scale


def fingerprint(quantization: QuantizationConfig) -> Fingerprint:
    """The library versions that, beside config and content, decide the bytes this stage writes."""
    libraries = (
        ("tokenizers",)
        if quantization.quant_algo == "NO_QUANT"
        else ("nvidia-modelopt", "torch", "transformers", "tokenizers")
    )
    return {name: version(name) for name in libraries}


@freed_blocks_returned()
def quantize(
    role: Role,
    source: Path,
    quantization: QuantizationConfig,
    calibration: CalibrationConfig | None,
    out_dir: Path,
    progress: Progress,
    *,
    vocab_size: int | None = None,
    trtllm: Ranks | None = None,
    vllm: bool = False,
    with_code: bool = False,
    chat: Path | None = None,
    resume: Path | None = None,
) -> QuantizedCheckpoint:
    """Quantize the checkpoint `source` and write it into `out_dir`. The same input gives the same
    bytes.

    vocab_size: the number of rows of embedding and LM head to keep, if pairing found that the rest
    is padding; None keeps all.
    trtllm: also write the TRT-LLM format for these ranks, from the same calibration; None writes
    the unified format only.
    vllm: also write the format that vLLM reads, from the same calibration; only for an algorithm
    that `needs_vllm_format`.
    with_code: also copy the source's Python modules, for a runtime that is told to trust them.
    chat: the checkpoint whose template writes conversations of the calibration text: the target.
    resume: a folder of this one input, where a killed run has left what it had finished, and where
    this one keeps what it finishes; None keeps nothing. The caller removes it.

    A source that ModelOpt has already quantized is checked and copied. Raises CheckpointError if
    the source is damaged, contradicts itself or is quantized with another algorithm than
    `quantization` names; UsageError if the calibration text cannot be used or the ranks do not
    divide the model; StageError if the written files fail a check.
    """
    opened = open_source(source, vocab_size)
    algorithm = algorithm_of(quantization.quant_algo)
    _check_algorithm(opened, quantization)
    if trtllm is not None:
        partition(opened.shape, trtllm)  # raises, before time is spent, if it cannot be divided
    if vllm:
        _check_vllm(opened, quantization)
    check_weights(opened, progress)
    out_dir.mkdir(parents=True, exist_ok=True)
    quality: QuantizationQuality | None = None
    vllm_format: VllmFormat | None = None
    if algorithm is None or opened.is_quantized:
        read_back_checks = _copy(opened, trtllm, out_dir, progress)
    else:
        if calibration is None:
            raise UsageError(
                f"quantizing the {role} needs calibration text",
                hint="add a `calibration` section with a `dataset`",
            )
        quality, vllm_format, read_back_checks = _quantize(
            opened,
            algorithm,
            quantization.kv_cache_quant_algo,
            calibration,
            chat,
            trtllm,
            vllm,
            out_dir,
            resume,
            progress,
        )
    if with_code:
        copy_code(source, out_dir)
        if vllm_format is not None:
            copy_code(source, vllm_format.path)
    checks = (
        *check_format(
            out_dir, opened.shape, opened.dtype, algorithm, quantization.kv_cache_quant_algo
        ),
        *read_back_checks,
    )
    try:
        _raise_on_errors(role, opened, checks)
    except StageError:
        if resume is not None:
            shutil.rmtree(resume, ignore_errors=True)  # they led to what failed
        raise
    return QuantizedCheckpoint(
        role=role,
        path=out_dir,
        quant_algo=None if algorithm is None else algorithm.name,
        kv_cache_quant_algo=quantization.kv_cache_quant_algo,
        architecture=opened.shape.architecture,
        vocab_size=opened.shape.vocab_size,
        weight_bytes=sum(info.num_bytes for info in read_index(out_dir).values()),
        quality=quality,
        checks=checks,
        trtllm=None
        if trtllm is None
        else TrtllmForm(out_dir / TRTLLM_FOLDER, trtllm.tp_size, trtllm.pp_size),
        vllm=vllm_format,
    )


def _copy(
    source: Source, trtllm: Ranks | None, out_dir: Path, progress: Progress
) -> tuple[Finding, ...]:
    """Copy a checkpoint that is not to be quantized here, and divide it among ranks if `trtllm` is
    given.
    """
    copy_unchanged(source, out_dir)
    if trtllm is None:
        return ()
    from toolkit.quantize.calibrated import calibrated_from_checkpoint

    return _write_trtllm(
        calibrated_from_checkpoint(source), trtllm, out_dir / TRTLLM_FOLDER, progress
    )


def _write_trtllm(
    calibrated: Calibrated, ranks: Ranks, folder: Path, progress: Progress
) -> tuple[Finding, ...]:
    from toolkit.quantize.trtllm_format import write_trtllm
    from toolkit.quantize.trtllm_format_check import check_trtllm

    write_trtllm(
        calibrated, ranks, folder, lambda done: progress(done, ranks.world_size, "writing ranks")
    )
    progress(0, None, "reading back")
    return check_trtllm(folder, calibrated, ranks)


def _check_algorithm(source: Source, quantization: QuantizationConfig) -> None:
    """Raise CheckpointError if the source is already quantized, but not as the YAML says."""
    stated = Quantization(source.quant_algo, source.kv_cache_quant_algo, ())
    conflict = quantization_conflict(
        stated, quantization.quant_algo, quantization.kv_cache_quant_algo
    )
    if conflict is not None:
        message, hint = conflict
        raise CheckpointError(message, where=source.path, hint=hint)


def _check_vllm(source: Source, quantization: QuantizationConfig) -> None:
    """Raise before time is spent, if the format that vLLM reads cannot be made."""
    assert needs_vllm_format(quantization), "vLLM reads the unified format of this algorithm"
    if source.is_quantized:
        raise CheckpointError(
            f"is already quantized with {source.quant_algo} in ModelOpt's format, which vLLM does"
            " not read; its codes were made for a smoothing that vLLM does not know",
            where=source.path,
            hint="name the unquantized checkpoint; the quantize stage writes what vLLM reads",
        )
    if quantization.kv_cache_quant_algo is not None:
        raise UsageError(
            f"a {quantization.kv_cache_quant_algo} KV cache cannot be combined with"
            f" {quantization.quant_algo} in the format that vLLM reads: folding the smoothing"
            " changes the values that its scales were calibrated for",
            hint="remove kv_cache_quant_algo, or set quant_algo: FP8",
        )


def _quantize(
    source: Source,
    algorithm: Algorithm,
    kv_cache_quant_algo: KvCacheQuantAlgo | None,
    calibration: CalibrationConfig,
    chat: Path | None,
    trtllm: Ranks | None,
    vllm: bool,
    out_dir: Path,
    resume: Path | None,
    progress: Progress,
) -> tuple[QuantizationQuality, VllmFormat | None, tuple[Finding, ...]]:
    """Calibrate, measure quality, write, and read back. All formats come from one calibration."""
    texts, heldout_texts = split_texts(calibration, chat)
    length = min(calibration.calib_max_seq_length, source.shape.max_position_embeddings)
    samples = encode(texts, source.path, length, source.shape.vocab_size)
    heldout_samples = encode(heldout_texts, source.path, length, source.shape.vocab_size)

    # Heavy imports, not needed before the calibration text has been checked.
    from toolkit.quantize.calibrated import calibrated_from_model
    from toolkit.quantize.hf_format import write_hf_weights
    from toolkit.quantize.layerwise import forward_loop
    from toolkit.quantize.modelopt import (
        load_model,
        outside_quiet,
        quantization_configs,
        quantize_model,
        quiet,
        smooth_exactly,
    )
    from toolkit.quantize.quality import take_tokens
    from toolkit.quantize.readback import capture, read_back
    from toolkit.quantize.resume import open_resume_state
    from toolkit.quantize.streaming import moves_to

    report, device = outside_quiet(progress), _device()
    batches = batches_of(samples, calibration.batch_size)
    heldout = batches_of(take_tokens(heldout_samples), 1)
    with quiet(), _folder(resume, out_dir) as folder:
        state = open_resume_state(folder, source, batches, device)
        if state.is_discarded:
            report(0, None, "what a killed run has left cannot be used; beginning anew")
        model = load_model(source)
        loop = forward_loop(batches, state, moves_to(device), report)
        quantize_model(model, algorithm, kv_cache_quant_algo, loop, scratch=out_dir)
        quality = _measured("quality", state, model, source, heldout, device, report)
        calibrated = calibrated_from_model(model, source, algorithm)
        report(0, None, "writing")
        captured = capture(model, calibrated)
        write_hf_weights(calibrated, out_dir)
        write_configs(source, out_dir, *quantization_configs(model))
        finish(source, out_dir, algorithm.name, kv_cache_quant_algo)
        report(0, None, "reading back")
        checks = read_back(out_dir, calibrated, captured)
        if trtllm is not None:
            checks += _write_trtllm(calibrated, trtllm, out_dir / TRTLLM_FOLDER, report)
        vllm_format: VllmFormat | None = None
        if vllm:
            folding = smooth_exactly(model, source)  # the weights change; nothing else reads them
            vllm_quality = _measured("quality-vllm", state, model, source, heldout, device, report)
            calibrated = calibrated_from_model(model, source, algorithm)
            report(0, None, "writing vLLM's format")
            vllm_format, vllm_checks = _write_vllm(
                calibrated, capture(model, calibrated), folding, vllm_quality, out_dir / VLLM_FOLDER
            )
            checks += vllm_checks
    del model, calibrated
    gc.collect()  # ModelOpt's modules refer to one another in circles
    return quality, vllm_format, checks


def _measured(
    name: str,
    state: ResumeState,
    model: Any,
    source: Source,
    heldout: list[Tensor],
    device: Device,
    progress: Progress,
) -> QuantizationQuality:
    """The model's quality, measured now or by the killed run that this one goes on from."""
    from toolkit.quantize.quality import measure
    from toolkit.quantize.streaming import computing_on

    finished = state.quality(name)
    if finished is not None:
        return finished
    with computing_on(model, device):
        quality = measure(model, source, heldout, progress)
    state.finish_quality(name, quality)
    return quality


def _write_vllm(
    calibrated: Calibrated,
    captured: dict[str, Captured],
    folding: Folding,
    quality: QuantizationQuality,
    folder: Path,
) -> tuple[VllmFormat, tuple[Finding, ...]]:
    from toolkit.quantize.compressed_tensors import (
        check_compressed_tensors,
        write_compressed_tensors,
    )

    write_compressed_tensors(calibrated, folding, folder)
    written = VllmFormat(
        path=folder,
        weight_bytes=sum(info.num_bytes for info in read_index(folder).values()),
        activations="dynamic per token",
        folded=folding.folded,
        left_out=folding.left_out,
        quality=quality,
    )
    return written, check_compressed_tensors(folder, calibrated, folding, captured)


@contextlib.contextmanager
def _folder(resume: Path | None, out_dir: Path) -> Iterator[Path]:
    """The folder for what is finished: the caller's, or one that does not outlive this run."""
    if resume is not None:
        yield resume
        return
    with tempfile.TemporaryDirectory(dir=out_dir) as folder:
        yield Path(folder)


def _device() -> Device:
    """Use a GPU if torch can: to calibrate 70B on a CPU takes the better part of a day."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _raise_on_errors(role: Role, source: Source, checks: tuple[Finding, ...]) -> None:
    """Raise CheckpointError if the source was already quantized, else StageError."""
    faults = [
        f"{finding.check}: {finding.detail}" for finding in checks if finding.severity == "error"
    ]
    if not faults:
        return
    message = "\n  ".join(
        [f"the {role}'s checkpoint fails {len(faults)} of {len(checks)} checks", *faults]
    )
    if source.is_quantized:
        raise CheckpointError(
            message, where=source.path, hint="export it again, or name the unquantized checkpoint"
        )
    raise StageError("quantize", message, where=source.path)
