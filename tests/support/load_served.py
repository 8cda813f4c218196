"""A program that loads the model file of packaged llmapi repositories over the stand-in for
TensorRT-LLM, as Triton's Python backend would.

Reads the repositories' paths from its arguments. Writes a JSON list: for each of them, what LLM()
says to the settings of model.yaml as they are (`raw`) and through the model file (`served`): null,
or the error. For a model that was loaded, also whether its scheduling overlaps (`overlaps`), by
upstream's own rule, whether it samples at all (`samples`), and the class of its speculative_config
(`config`).
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import yaml

from toolkit.standins.trtllm import PACKAGE
from toolkit.triton.package import model_config

sys.path.insert(0, str(PACKAGE.parent))
backend: Any = ModuleType("triton_python_backend_utils")
backend.TritonModelException = RuntimeError
backend.triton_string_to_numpy = lambda name: np.object_
backend.Logger = SimpleNamespace(log_error=print)
backend.MetricFamily = MagicMock()  # what is counted is tested in a real tritonserver
sys.modules[backend.__name__] = backend


def error_of(call: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return call(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def overlaps(args: Any) -> bool:
    """TRT _torch/speculative/interface.py: support_overlap_scheduler."""
    from tensorrt_llm.llmapi.llm_args import DraftTargetDecodingConfig, EagleDecodingConfig
    from tensorrt_llm.releases import RELEASE

    config = args.speculative_config
    drafts = isinstance(config, DraftTargetDecodingConfig)
    supported = drafts and (RELEASE.one_model or RELEASE.overlaps_draft_models)
    supported |= isinstance(config, EagleDecodingConfig) and config.is_one_model
    return not args.disable_overlap_scheduler and (args.speculative_config is None or supported)


def load(repository: Path) -> dict[str, Any]:
    from tensorrt_llm import LLM

    version = repository / "tensorrt_llm" / "1"
    settings = yaml.safe_load((version / "model.yaml").read_text(encoding="utf-8"))
    raw = {name: settings[name] for name in settings if name not in ("triton_config", "toolkit")}
    spec = importlib.util.spec_from_file_location(f"served_{repository.name}", version / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as Python's import does; dataclasses look there
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    config = model_config.read(version.parent / "config.pbtxt")
    transaction = {"decoupled": config.model_transaction_policy.decoupled}
    _, served = error_of(
        lambda: model.initialize(
            {
                "model_repository": str(version.parent),
                "model_version": "1",
                "model_config": json.dumps({"model_transaction_policy": transaction}),
            }
        )
    )
    answer = {"raw": error_of(lambda: LLM(**raw))[1], "served": served}
    if served is None:
        answer["overlaps"] = overlaps(model._llm.args)
        answer["samples"] = model._llm.samples
        answer["config"] = type(model._llm.args.speculative_config).__name__
        model.finalize()
    return answer


if __name__ == "__main__":
    answers = [load(Path(repository)) for repository in sys.argv[1:]]
    print(json.dumps(answers))
