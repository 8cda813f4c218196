"""The files of a Triton model repository: what `tritonserver --model-repository FOLDER` loads, and how people use it.

    FOLDER/tensorrt_llm/config.pbtxt              tensors, decoupled or not
    FOLDER/tensorrt_llm/1/model.py  model.yaml    our Python model and its settings
    FOLDER/tensorrt_llm/1/engines/{target,draft}  the engines, so that the repository is self-contained
    FOLDER/README.md  launch.sh  validate_latency.py

Triton looks at the subfolders of a repository only, so files beside the model do not disturb it. Nothing in it names a path of
the machine that made it: it can be moved and copied.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from toolkit import client
from toolkit.config.schema import SpeculationConfig, TritonConfig
from toolkit.errors import StageError
from toolkit.pipeline.files import store_error
from toolkit.records import CompiledEngine
from toolkit.triton import model_config
from toolkit.triton.contract import INPUTS, METRICS, MODEL, OUTPUTS, PACKAGE_VERSION

__all__ = ["model_settings", "write_repository"]

MODEL_SOURCE = Path(__file__).parent / "models" / "llmapi" / "model.py"
CANCELLATION_CHECK_PERIOD_MS = 50  # each look at a request costs about 0.1 ms of the model's process


def model_settings(
    target: CompiledEngine,
    draft: CompiledEngine | None,
    speculation: SpeculationConfig,
    triton: TritonConfig,
    threads: int | None,
) -> dict[str, Any]:
    """The content of model.yaml: arguments of TensorRT-LLM's LLM() where it has the word, then Triton's and our own section."""
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
    elif speculation.kind == "ngram":
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
        # Here and not in speculative_config: TensorRT-LLM's versions mean different things by its keys.
        "draft_len_schedule": [list(step) for step in (speculation.draft_len_schedule or {}).items()],
        "default_max_tokens": triton.default_max_tokens,
        "max_queue_size": triton.max_queue_size,
        "request_timeout_s": triton.request_timeout_s,
        "stream_interval_ms": triton.stream_interval_ms,
        "threads": threads,
    }
    return settings


def write_repository(
    target: CompiledEngine,
    draft: CompiledEngine | None,
    speculation: SpeculationConfig,
    triton: TritonConfig,
    threads: int | None,
    folder: Path,
) -> None:
    """Write the whole repository into `folder`, which is made if need be. Raises StageError when it cannot be written."""
    import yaml

    version = folder / MODEL / "1"
    try:
        version.mkdir(parents=True, exist_ok=True)
        model_config.write(model_config.build(decoupled=triton.decoupled), folder / MODEL / "config.pbtxt")
        shutil.copyfile(MODEL_SOURCE, version / "model.py")
        settings = model_settings(target, draft, speculation, triton, threads)
        (version / "model.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        for engine in [target, draft] if draft is not None else [target]:
            _link_tree(engine.path, version / "engines" / engine.role)
        shutil.copyfile(client.__file__, folder / "validate_latency.py")
        (folder / "launch.sh").write_text(LAUNCH, encoding="utf-8")
        (folder / "launch.sh").chmod(0o755)
        (folder / "README.md").write_text(_readme(target, draft, speculation, triton), encoding="utf-8")
    except OSError as error:
        what = f"cannot write the model repository: {error.strerror or error}"
        raise store_error("package", error, folder) or StageError("package", what, where=folder) from error


def _link_tree(source: Path, destination: Path) -> None:
    """Copy a folder by hard links, which cost no space; by content where the file system has none."""

    def link(origin: str, copy: str) -> str:
        try:
            os.link(origin, copy)
        except OSError:
            shutil.copyfile(origin, copy)
        return copy

    shutil.copytree(source, destination, copy_function=link)


# Candidates in order: the one that is asked for, the active environment, the project's own when the repository lies in its
# triton_repo/ folder.
LAUNCH = """\
#!/bin/sh
# Serve this repository with tritonserver on loopback. Arguments go to tritonserver, for example:
#     ./launch.sh --http-port=8000 --grpc-port=8001 --metrics-port=8002
# PYTHON names a Python that has the toolkit installed, if the one on PATH has not.
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd) || exit 1
for python in "$PYTHON" python3 python "$here/../../.venv/bin/python"; do
    if [ -n "$python" ] && "$python" -c 'import toolkit.triton' 2>/dev/null; then
        exec "$python" -m toolkit.triton.launch "$here" "$@"
    fi
done
echo "no Python with the toolkit found: set PYTHON=/path/to/python, or activate its environment" >&2
exit 2
"""


def _readme(target: CompiledEngine, draft: CompiledEngine | None, speculation: SpeculationConfig, triton: TritonConfig) -> str:
    pair = f"target {target.quant_algo or target.dtype}"
    if draft is not None:
        pair += f", draft {draft.quant_algo or draft.dtype}, up to {speculation.max_draft_len} draft tokens per step"
    elif speculation.kind == "ngram":
        pair += f", prompt lookup, up to {speculation.max_draft_len} draft tokens per step"
    inputs = "\n".join(_row(spec.name, spec.dtype, spec.meaning) for spec in INPUTS)
    outputs = "\n".join(_row(spec.name, spec.dtype, spec.meaning) for spec in OUTPUTS)
    metrics = "\n".join(f"| `{spec.name}` | {spec.kind} | {spec.meaning} |" for spec in METRICS)
    streams = "streams (decoupled)" if triton.decoupled else "answers each request once (not decoupled)"
    return f"""\
# Triton model repository

One model, `{MODEL}`, in the form of TensorRT-LLM's `llmapi` template: {pair}. It {streams}.
At most {target.max_input_len} prompt tokens, {target.max_seq_len} tokens in all, {target.max_batch_size} requests at once.

## Launch

    ./launch.sh --http-port=8000 --grpc-port=8001 --metrics-port=8002

finds a `tritonserver` (the one on PATH, else the one inside the nvidia-pytriton wheel) and serves on loopback; add
`--http-address=0.0.0.0 --grpc-address=0.0.0.0` to serve others. In an environment where

- `tritonserver` is on PATH with its backends beside it (`/opt/tritonserver`, as in NVIDIA's containers), and
- the Python of its Python backend has the toolkit installed (numpy below 2 with Triton before 25.01),

nothing more is needed than `tritonserver --model-repository .`, which listens on every interface unless told otherwise.

## Call

    curl -d '{{"text_input": "def main", "sampling_param_max_tokens": 32}}' localhost:8000/v2/models/{MODEL}/generate
    python validate_latency.py --url localhost:8001 --prompts prompts.jsonl

`validate_latency.py` needs `tritonclient[grpc]` and numpy. It measures TTFT, TPOT, token-weighted ITL and tokens/s with and
without speculation, and is a Python API too: `Client("localhost:8001").stream("def main")`.

## Inputs

| name | type | meaning |
|---|---|---|
{inputs}

## Outputs

While streaming, a response holds only what is new of text and tokens, and never the prompt. Without streaming there is one
response, which begins with the prompt unless `sampling_param_exclude_input_from_output` is true. Statistics come last.

| name | type | meaning |
|---|---|---|
{outputs}

## Metrics

| name | kind | meaning |
|---|---|---|
{metrics}
"""


def _row(name: str, dtype: str, meaning: str) -> str:
    return f"| `{name}` | {dtype.removeprefix('TYPE_')} | {meaning.replace('|', 'or')} |"
