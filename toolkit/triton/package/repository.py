"""Writes a Triton model repository for embedded engines: the files that
`tritonserver --model-repository FOLDER` loads, and the files that help people use them.

    llmapi  FOLDER/tensorrt_llm/config.pbtxt                tensors, decoupled or not
            FOLDER/tensorrt_llm/1/model.py  model.yaml      our Python model and its settings
            FOLDER/tensorrt_llm/1/libtriton_toolkit.so      the backend that runs it
            FOLDER/tensorrt_llm/1/engines/{target,draft}    the engines
    bls     FOLDER/tensorrt_llm{,_draft}/1/model.py engine  one engine each
            FOLDER/{preprocessing,postprocessing,tensorrt_llm_bls,ensemble}
    both    FOLDER/README.md  launch.sh  validate_latency.py

Triton looks only at the subfolders of a repository, so files beside the models do not disturb it.
The repository is self-contained, and no file in it names a path of the machine that made it, so it
can be moved and copied.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit import client
from toolkit.config.schema import SpeculationConfig, TritonConfig
from toolkit.errors import StageError
from toolkit.pipeline.files import store_error
from toolkit.records.build import CompiledEngine
from toolkit.templates import render_template
from toolkit.triton.native.build import BACKEND, LIBRARY, backend_name, build_backend
from toolkit.triton.package import layout_bls, model_config, monitoring
from toolkit.triton.package.deploy import PORTS
from toolkit.triton.package.monitoring import Monitored
from toolkit.triton.package.tensor_rows import tensor_rows
from toolkit.triton.tensors.contract import (
    BLS_MODEL,
    DRAFT_MODEL,
    ENSEMBLE,
    METRICS,
    MODEL,
    PACKAGE_VERSION,
)

__all__ = ["bls_of", "link_tree", "model_settings", "write_client", "write_repository"]

LEAST_DRAFT_TIMEOUT_S = 5.0

MODEL_SOURCE = Path(__file__).parents[1] / "models" / "llmapi" / "model.py"
ENGINE_SOURCE = Path(__file__).parents[1] / "models" / "engine" / "model.py"
CANCELLATION_CHECK_PERIOD_MS = 50  # one check of a request costs the model about 0.1 ms


def model_settings(
    target: CompiledEngine,
    draft: CompiledEngine | None,
    speculation: SpeculationConfig,
    triton: TritonConfig,
    threads: int | None,
    reuse_prefixes: bool,
) -> dict[str, Any]:
    """The content of model.yaml: first settings that are named like TensorRT-LLM's LLM() arguments,
    then Triton's section, then ours.
    """
    settings: dict[str, Any] = {
        "model": "engines/target",
        "dtype": target.dtype,
        "max_batch_size": target.max_batch_size,
        "max_input_len": target.max_input_len,
        "max_seq_len": target.max_seq_len,
    }
    if draft is not None:
        settings["speculative_config"] = {
            "decoding_type": "Draft_Target",
            "max_draft_len": speculation.max_draft_len,
            "speculative_model": "engines/draft",
        }
    elif speculation.has_ngram:
        settings["speculative_config"] = {
            "decoding_type": "NGram",
            "max_draft_len": speculation.max_draft_len,
            "max_matching_ngram_size": speculation.max_matching_ngram_size,
        }
    settings["triton_config"] = {
        "max_batch_size": 0,
        "decoupled": triton.decoupled,
        "cancellation_check_period_ms": CANCELLATION_CHECK_PERIOD_MS,
    }
    settings["toolkit"] = {
        "package_version": PACKAGE_VERSION,
        "acceptance": speculation.acceptance,
        # Not in speculative_config, where TensorRT-LLM's versions give this key different meanings.
        "draft_len_schedule": [list(step) for step in speculation.draft_len_by_load.items()],
        "max_prompt_tokens": speculation.max_prompt_tokens,
        "adaptive": speculation.adaptive_settings,
        "default_max_tokens": triton.default_max_tokens,
        "max_queue_size": triton.max_queue_size,
        "request_timeout_s": triton.request_timeout_s,
        "stream_interval_ms": triton.stream_interval_ms,
        "threads": threads,
        "enable_prefix_caching": reuse_prefixes,
    }
    return settings


def bls_of(
    target: CompiledEngine,
    draft: CompiledEngine | None,
    speculation: SpeculationConfig,
    triton: TritonConfig,
    threads: int | None,
    end_ids: Sequence[int],
    reuse_prefixes: bool,
) -> layout_bls.Bls:
    """The values of the `bls` layout for embedded engines."""
    parameters = {
        "max_beam_width": "1",
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": "engine",
        "enable_kv_cache_reuse": str(reuse_prefixes).lower(),
        "exclude_input_in_output": "false",
        "tokenizer_dir": "engine",
    }
    our_parameters = {} if threads is None else {"threads": str(threads)}
    # A request whose draft does not answer has to have time left to go on plainly.
    timeout_s = triton.request_timeout_s
    draft_timeout_s = min(timeout_s, max(LEAST_DRAFT_TIMEOUT_S, timeout_s / 4))
    # If the draft's process dies, our backend answers the calls that it has taken. Triton's Python
    # backend leaves them open, and with them the requests that wait for a draft.
    draft_backend: layout_bls.TritonBackend = "python"
    if backend_name(triton.backend) == BACKEND:
        draft_backend = "toolkit"
    engine = layout_bls.EngineModel(
        "python", parameters, {"request_timeout_s": str(timeout_s), **our_parameters}
    )
    draft_engine = layout_bls.EngineModel(
        draft_backend, parameters, {"request_timeout_s": str(draft_timeout_s), **our_parameters}
    )
    max_draft_len = 0 if draft is None else speculation.longest_draft
    return layout_bls.Bls(
        target=engine,
        draft=None if draft is None else draft_engine,
        max_batch_size=target.max_batch_size,
        decoupled=triton.decoupled,
        end_ids=tuple(end_ids),
        request_timeout_s=triton.request_timeout_s,
        bls_queue_size=triton.max_queue_size,
        settings=layout_bls.settings_of(
            triton,
            max_input_len=target.max_input_len,
            max_seq_len=target.max_seq_len,
            max_draft_len=max_draft_len,
            max_prompt_tokens=speculation.max_prompt_tokens,
            adaptive=speculation.adaptive_settings,
            acceptance=speculation.acceptance,
            seeds="request",
            log_probs="logits",
            end_token="returned",
            keeps_slots=True,
            vocab_size=target.vocab_size,
        ),
    )


def write_repository(
    target: CompiledEngine,
    draft: CompiledEngine | None,
    speculation: SpeculationConfig,
    triton: TritonConfig,
    threads: int | None,
    end_ids: Sequence[int],
    reuse_prefixes: bool,
    folder: Path,
) -> None:
    """Write the whole repository into `folder`, and create the folder if needed. Raises StageError
    if it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if triton.layout == "bls":
            bls = bls_of(target, draft, speculation, triton, threads, end_ids, reuse_prefixes)
            _write_bls(target, draft, bls, folder)
        else:
            _write_llmapi(target, draft, speculation, triton, threads, reuse_prefixes, folder)
        write_client(folder)
        (folder / "launch.sh").write_text(
            render_template(__file__, "launch_torch.sh.j2"), encoding="utf-8"
        )
        (folder / "launch.sh").chmod(0o755)
        draft_len = speculation.longest_draft
        monitoring.write(Monitored(monitoring.EMBEDDED_JOB, PORTS["metrics"], draft_len), folder)
        (folder / "README.md").write_text(
            _readme(target, draft, speculation, triton, folder), encoding="utf-8"
        )
    except OSError as error:
        what = f"cannot write the model repository: {error.strerror or error}"
        raise store_error("package", error, folder) or StageError(
            "package", what, where=folder
        ) from error


def _write_llmapi(
    target: CompiledEngine,
    draft: CompiledEngine | None,
    speculation: SpeculationConfig,
    triton: TritonConfig,
    threads: int | None,
    reuse_prefixes: bool,
    folder: Path,
) -> None:
    import yaml

    version = folder / MODEL / "1"
    version.mkdir(parents=True, exist_ok=True)
    backend = backend_name(triton.backend)
    if backend == BACKEND:
        build_backend(version / LIBRARY)
    config = model_config.build(decoupled=triton.decoupled, backend=backend)
    model_config.write(config, folder / MODEL / "config.pbtxt")
    shutil.copyfile(MODEL_SOURCE, version / "model.py")
    settings = model_settings(target, draft, speculation, triton, threads, reuse_prefixes)
    (version / "model.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    for engine in [target, draft] if draft is not None else [target]:
        link_tree(engine.path, version / "engines" / engine.role)


def _write_bls(
    target: CompiledEngine, draft: CompiledEngine | None, bls: layout_bls.Bls, folder: Path
) -> None:
    for name, config in layout_bls.model_configs(bls).items():
        (folder / name / "1").mkdir(parents=True, exist_ok=True)
        if config.backend == BACKEND:
            build_backend(folder / name / "1" / LIBRARY)
        model_config.write(config, folder / name / "config.pbtxt")
    layout_bls.write_models(folder, target.path)
    for model, engine in ((MODEL, target), (DRAFT_MODEL, draft)):
        if engine is not None:
            shutil.copyfile(ENGINE_SOURCE, folder / model / "1" / "model.py")
            link_tree(engine.path, folder / model / "1" / "engine")


def write_client(folder: Path) -> None:
    """Write the latency client, which runs without the toolkit."""
    shutil.copyfile(client.__file__, folder / "validate_latency.py")


def link_tree(source: Path, destination: Path) -> None:
    """Copy a folder by hard links, which cost no space. Files that cannot be linked are copied."""

    def link(origin: str, copy: str) -> str:
        try:
            os.link(origin, copy)
        except OSError:
            shutil.copyfile(origin, copy)
        return copy

    shutil.copytree(source, destination, copy_function=link)


def _readme(
    target: CompiledEngine,
    draft: CompiledEngine | None,
    speculation: SpeculationConfig,
    triton: TritonConfig,
    folder: Path,
) -> str:
    """folder: the repository, complete but for this file."""
    pair = f"target {target.quant_algo or target.dtype}"
    if draft is not None:
        pair += (
            f", draft {draft.quant_algo or draft.dtype}, up to {speculation.max_draft_len} draft"
            " tokens per step"
        )
    elif speculation.has_ngram:
        pair += f", prompt lookup, up to {speculation.max_draft_len} draft tokens per step"
    if triton.layout == "bls":
        interface = (
            f"Clients call the model `{BLS_MODEL}`, or `{ENSEMBLE}`, which decodes without drafts"
            " and does not stream. The tensors are those of TensorRT-LLM's `inflight_batcher_llm`"
            " templates."
        )
        model, prompt_tensor, tokens_tensor = BLS_MODEL, "exclude_input_in_output", "max_tokens"
    else:
        interface = (
            f"Clients call the model `{MODEL}`. Its tensors are those of TensorRT-LLM's `llmapi`"
            " template."
        )
        model, prompt_tensor = MODEL, "sampling_param_exclude_input_from_output"
        tokens_tensor = "sampling_param_max_tokens"
    config = model_config.read(folder / model / "config.pbtxt")
    return render_template(
        __file__,
        "readme_torch.md.j2",
        interface=interface,
        pair=pair,
        streams=(
            "streams its answers (decoupled)"
            if triton.decoupled
            else "answers each request once (not decoupled)"
        ),
        target=target,
        model=model,
        is_native=config.backend == BACKEND,
        prompt_tensor=prompt_tensor,
        tokens_tensor=tokens_tensor,
        inputs=tensor_rows(config.input),
        outputs=tensor_rows(config.output),
        metrics=METRICS,
        metrics_port=PORTS["metrics"],
        speculates=speculation.is_enabled,
    )
