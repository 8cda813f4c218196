"""The quantize stage: a source checkpoint in; out comes a quantized one, measured before the export and checked after it."""

from __future__ import annotations

import gc
from importlib.metadata import version
from pathlib import Path

from toolkit.checkpoints.reader import read_index
from toolkit.config.schema import CalibrationConfig, QuantizationConfig
from toolkit.errors import CheckpointError, StageError, UsageError
from toolkit.interfaces import Fingerprint, Progress
from toolkit.quantize.algorithms import Algorithm, algorithm_of
from toolkit.quantize.calibrate import batches_of, encode, forward_loop, split_texts
from toolkit.quantize.check import check_form
from toolkit.quantize.checkpoint import copy_as_it_is, finish
from toolkit.quantize.source import Source, check_weights, open_source
from toolkit.records import Finding, QuantizationQuality, QuantizedCheckpoint

__all__ = ["VERSION", "fingerprint", "quantize"]

VERSION = 2


def fingerprint(quantization: QuantizationConfig) -> Fingerprint:
    """What beside config and content decides the bytes that this stage writes."""
    libraries = (
        ("tokenizers",) if quantization.quant_algo == "NO_QUANT" else ("nvidia-modelopt", "torch", "transformers", "tokenizers")
    )
    return {name: version(name) for name in libraries}


def quantize(
    role: str,
    source: Path,
    quantization: QuantizationConfig,
    calibration: CalibrationConfig | None,
    out_dir: Path,
    progress: Progress,
    *,
    vocab_size: int | None = None,
) -> QuantizedCheckpoint:
    """Write the checkpoint `source`, quantized as asked, into `out_dir`. The same input gives the same bytes.

    vocab_size: rows of embedding and LM head to keep, where pairing found more of padding; None keeps all.

    A source that ModelOpt has quantized already is checked and used as it is. Raises CheckpointError for a source that is
    damaged, contradicts itself or has another algorithm than the one asked for, UsageError for calibration text that cannot be
    used, and StageError when the export fails a check.
    """
    opened = open_source(source, vocab_size)
    algorithm = algorithm_of(quantization.quant_algo)
    _agree(opened, quantization)
    check_weights(opened, progress)
    out_dir.mkdir(parents=True, exist_ok=True)
    quality: QuantizationQuality | None = None
    read: tuple[Finding, ...] = ()
    if algorithm is None or opened.is_quantized:
        copy_as_it_is(opened, out_dir)
    else:
        if calibration is None:
            raise UsageError(
                f"quantizing the {role} needs calibration text", mend="add a `calibration` section with a `dataset`"
            )
        quality, read = _quantize(opened, algorithm, quantization.kv_cache_quant_algo, calibration, out_dir, progress)
    checks = check_form(out_dir, opened.shape, opened.dtype, algorithm, quantization.kv_cache_quant_algo) + read
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
    )


def _agree(source: Source, quantization: QuantizationConfig) -> None:
    """An already quantized checkpoint must have the algorithm that the YAML names."""
    if not source.is_quantized:
        return
    asked = (quantization.quant_algo, quantization.kv_cache_quant_algo)
    found = (source.quant_algo or "NO_QUANT", source.kv_cache_quant_algo)
    if asked != found:
        raise CheckpointError(
            f"is already quantized with {_spell(found)}, the YAML asks for {_spell(asked)}",
            where=source.path,
            mend=f"set quantization: {{quant_algo: {found[0]}{f', kv_cache_quant_algo: {found[1]}' if found[1] else ''}}}, "
            "or name the unquantized checkpoint",
        )


def _spell(names: tuple[str, str | None]) -> str:
    return names[0] if names[1] is None else f"{names[0]} and a {names[1]} KV cache"


def _quantize(
    source: Source,
    algorithm: Algorithm,
    kv_cache_quant_algo: str | None,
    calibration: CalibrationConfig,
    out_dir: Path,
    progress: Progress,
) -> tuple[QuantizationQuality, tuple[Finding, ...]]:
    """Calibrate, measure, note, export, complete, read back: in this order, since the export changes the model."""
    texts, heldout_texts = split_texts(calibration)
    length = min(calibration.calib_max_seq_length, source.shape.max_position_embeddings)
    samples = encode(texts, source.path, length, source.shape.vocab_size)
    heldout_samples = encode(heldout_texts, source.path, length, source.shape.vocab_size)

    # Heavy, and not needed before the calibration text was found good.
    from toolkit.quantize.modelopt import export, load_model, loudly, quantize_model, quiet
    from toolkit.quantize.quality import measure, take_tokens
    from toolkit.quantize.readback import capture, read_back

    report = loudly(progress)
    with quiet():
        model = load_model(source)
        batches = batches_of(samples, calibration.batch_size)
        quantize_model(model, algorithm, kv_cache_quant_algo, forward_loop(batches, report))
        quality = measure(model, source, batches_of(take_tokens(heldout_samples), 1), report)
        captured = capture(model, algorithm)
        export(model, source.dtype, out_dir)
    del model
    gc.collect()  # ModelOpt's modules refer to one another in circles
    finish(source, out_dir, algorithm.name, kv_cache_quant_algo)
    progress(0, None, "reading back")
    return quality, read_back(out_dir, source, captured)


def _refuse_errors(role: str, source: Source, checks: tuple[Finding, ...]) -> None:
    faults = [f"{finding.check}: {finding.detail}" for finding in checks if finding.severity == "error"]
    if not faults:
        return
    text = f"the {role}'s checkpoint fails {len(faults)} of {len(checks)} checks\n  " + "\n  ".join(faults)
    if source.is_quantized:
        raise CheckpointError(text, where=source.path, mend="export it again, or name the unquantized checkpoint")
    raise StageError("quantize", text, where=source.path)
