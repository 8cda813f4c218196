"""The quantize stage: a source checkpoint in; out comes a quantized one, measured, and checked as
it was written.

The unified form is always made; TRT-LLM's form stands in a folder of its own beside it, where the
engine flow needs it.
"""

from __future__ import annotations

import gc
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.checkpoints.quantized import Quantization, other_than_asked
from toolkit.checkpoints.reader import read_index
from toolkit.config.schema import CalibrationConfig, QuantizationConfig
from toolkit.errors import CheckpointError, StageError, UsageError
from toolkit.interfaces import Fingerprint, Progress
from toolkit.pipeline.memory import freed_blocks_returned
from toolkit.quantize.algorithms import Algorithm, algorithm_of
from toolkit.quantize.calibrate import batches_of, encode, forward_loop, split_texts
from toolkit.quantize.check import check_form
from toolkit.quantize.checkpoint import copy_as_it_is, copy_code, finish, write_configs
from toolkit.quantize.partition import Ranks, partition
from toolkit.quantize.source import Source, check_weights, open_source
from toolkit.records.build import QuantizationQuality, QuantizedCheckpoint, TrtllmForm
from toolkit.records.measured import Finding
from toolkit.words import Device, KvCacheQuantAlgo, Role

if TYPE_CHECKING:
    from toolkit.quantize.calibrated import Calibrated

__all__ = ["TRTLLM_FOLDER", "VERSION", "Ranks", "fingerprint", "quantize"]

VERSION = 6
TRTLLM_FOLDER = "trtllm"


def fingerprint(quantization: QuantizationConfig) -> Fingerprint:
    """What beside config and content decides the bytes that this stage writes."""
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
    with_code: bool = False,
) -> QuantizedCheckpoint:
    """Write the checkpoint `source`, quantized as asked, into `out_dir`. The same input gives the
    same bytes.

    vocab_size: rows of embedding and LM head to keep, where pairing found more of padding; None
    keeps all. trtllm: write TRT-LLM's form as well, for these ranks, from the same calibration;
    None: the unified form alone. with_code: take the source's Python modules along, for a runtime
    that is told to trust them.

    A source that ModelOpt has quantized already is checked and used as it is. Raises
    CheckpointError for a source that is damaged, contradicts itself or has another algorithm than
    the one asked for, UsageError for calibration text that cannot be used and for ranks that do not
    divide the model, and StageError when what was written fails a check.
    """
    opened = open_source(source, vocab_size)
    algorithm = algorithm_of(quantization.quant_algo)
    _agree(opened, quantization)
    if trtllm is not None:
        partition(opened.shape, trtllm)  # refuses what cannot be divided before time is spent
    check_weights(opened, progress)
    out_dir.mkdir(parents=True, exist_ok=True)
    quality: QuantizationQuality | None = None
    if algorithm is None or opened.is_quantized:
        read = _take_over(opened, trtllm, out_dir, progress)
    else:
        if calibration is None:
            raise UsageError(
                f"quantizing the {role} needs calibration text",
                hint="add a `calibration` section with a `dataset`",
            )
        quality, read = _quantize(
            opened,
            algorithm,
            quantization.kv_cache_quant_algo,
            calibration,
            trtllm,
            out_dir,
            progress,
        )
    if with_code:
        copy_code(source, out_dir)
    checks = (
        check_form(out_dir, opened.shape, opened.dtype, algorithm, quantization.kv_cache_quant_algo)
        + read
    )
    _refuse_errors(role, opened, checks)
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
    )


def _take_over(
    source: Source, trtllm: Ranks | None, out_dir: Path, progress: Progress
) -> tuple[Finding, ...]:
    """A checkpoint that stays as it is: copied, and divided among ranks where that is asked for."""
    copy_as_it_is(source, out_dir)
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


def _agree(source: Source, quantization: QuantizationConfig) -> None:
    """An already quantized checkpoint must have the algorithm that the YAML names."""
    found = Quantization(source.quant_algo, source.kv_cache_quant_algo, ())
    fault = other_than_asked(found, quantization.quant_algo, quantization.kv_cache_quant_algo)
    if fault is not None:
        raise CheckpointError(fault[0], where=source.path, hint=fault[1])


def _quantize(
    source: Source,
    algorithm: Algorithm,
    kv_cache_quant_algo: KvCacheQuantAlgo | None,
    calibration: CalibrationConfig,
    trtllm: Ranks | None,
    out_dir: Path,
    progress: Progress,
) -> tuple[QuantizationQuality, tuple[Finding, ...]]:
    """Calibrate, measure, write and complete, read back. Every form comes from the one
    calibration.
    """
    texts, heldout_texts = split_texts(calibration)
    length = min(calibration.calib_max_seq_length, source.shape.max_position_embeddings)
    samples = encode(texts, source.path, length, source.shape.vocab_size)
    heldout_samples = encode(heldout_texts, source.path, length, source.shape.vocab_size)

    # Heavy, and not needed before the calibration text was found good.
    from toolkit.quantize.calibrated import calibrated_from_model
    from toolkit.quantize.hf_format import write_hf_weights
    from toolkit.quantize.modelopt import (
        load_model,
        loudly,
        quantization_configs,
        quantize_model,
        quiet,
    )
    from toolkit.quantize.quality import measure, take_tokens
    from toolkit.quantize.readback import capture, read_back
    from toolkit.quantize.streaming import computing_on

    report = loudly(progress)
    with quiet():
        model = load_model(source)
        loop = forward_loop(batches_of(samples, calibration.batch_size), report)
        with computing_on(model, _device()):
            quantize_model(model, algorithm, kv_cache_quant_algo, loop, scratch=out_dir)
            quality = measure(model, source, batches_of(take_tokens(heldout_samples), 1), report)
        calibrated = calibrated_from_model(model, source, algorithm)
        report(0, None, "writing")
        captured = capture(model, calibrated)
        write_hf_weights(calibrated, out_dir)
        write_configs(source, out_dir, *quantization_configs(model))
        finish(source, out_dir, algorithm.name, kv_cache_quant_algo)
        report(0, None, "reading back")
        read = read_back(out_dir, calibrated, captured)
        if trtllm is not None:
            read += _write_trtllm(calibrated, trtllm, out_dir / TRTLLM_FOLDER, report)
    del model, calibrated
    gc.collect()  # ModelOpt's modules refer to one another in circles
    return quality, read


def _device() -> Device:
    """A GPU where there is one that torch can use: calibrating 70B on a CPU takes the better
    part of a day.
    """
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _refuse_errors(role: Role, source: Source, checks: tuple[Finding, ...]) -> None:
    faults = [
        f"{finding.check}: {finding.detail}" for finding in checks if finding.severity == "error"
    ]
    if not faults:
        return
    text = f"the {role}'s checkpoint fails {len(faults)} of {len(checks)} checks\n  " + "\n  ".join(
        faults
    )
    if source.is_quantized:
        raise CheckpointError(
            text, where=source.path, hint="export it again, or name the unquantized checkpoint"
        )
    raise StageError("quantize", text, where=source.path)
