"""The `bls` layout: preprocessing, two engine models, postprocessing, the BLS model that clients
call, and the ensemble, which is the same without drafts.

Tensors and parameters are those of TensorRT-LLM's `inflight_batcher_llm` templates
(`toolkit.facts.triton_tensors`), so TensorRT-LLM's clients work. The three models around the
engines are ours. The backend that serves the engines is an argument. Every version folder of our
models holds the few modules of the toolkit that the model imports, since the container that serves
it does not have the toolkit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from toolkit.config.schema import TritonConfig
from toolkit.facts.triton_tensors import (
    BLS,
    ENGINE,
    ENSEMBLE,
    ENSEMBLE_STEPS,
    LOGITS_DATATYPES,
    POSTPROCESSING,
    PREPROCESSING,
    ModelFacts,
)
from toolkit.facts.trtllm_build import LOGITS_DTYPE
from toolkit.pipeline.sources import ROOT, source_files
from toolkit.triton.tensors import contract
from toolkit.words import AcceptanceChoice, LogProbSource, SeedScope

__all__ = ["Bls", "EngineModel", "model_configs", "settings_of", "write_model", "write_models"]

MODEL_SOURCES = Path(__file__).parents[1] / "models"
MAX_BLS_INSTANCES = 32  # each is a small process
TOKENIZER_FOLDER = "tokenizer"  # beside the model.py of preprocessing and postprocessing
PLACEHOLDER_TYPES = {
    "logits_datatype": LOGITS_DATATYPES[LOGITS_DTYPE],
    "encoder_input_features_data_type": "TYPE_FP16",
}

TritonBackend: TypeAlias = Literal["tensorrtllm", "python", "toolkit"]  # toolkit: of our own
EndToken: TypeAlias = Literal["returned", "hidden"]


@dataclass(frozen=True, slots=True)
class EngineModel:
    """One of the two engine models. parameters: values of the template's parameters, by name.
    our_parameters: parameters that the template does not have.
    """

    backend: TritonBackend
    parameters: Mapping[str, str]
    our_parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bls:
    """The values that fill the layout. draft None: no speculation. settings: our parameters of the
    BLS model.
    """

    target: EngineModel
    draft: EngineModel | None
    max_batch_size: int
    decoupled: bool
    end_ids: Sequence[int]
    settings: Mapping[str, str]
    accumulate_tokens: bool = False
    # Engine tensors that this version spells differently: new name -> its name.
    names: Mapping[str, str] = field(default_factory=dict)
    # A request occupies one BLS instance while it runs, and the other two models for well under a
    # millisecond.
    preprocessing_instances: int = 1
    postprocessing_instances: int = 1
    # None: as many as the target has slots, at most MAX_BLS_INSTANCES.
    bls_instances: int | None = None
    request_timeout_s: float = 120.0  # how long a request may wait in the queue of BLS
    bls_queue_size: int = 256
    max_queue_delay_microseconds: int = 0
    max_queue_size: int = 0
    prompt_embedding_table_data_type: str = "TYPE_FP16"


def settings_of(
    triton: TritonConfig,
    *,
    max_input_len: int,
    max_seq_len: int,
    max_draft_len: int,
    acceptance: AcceptanceChoice,
    seeds: SeedScope,
    log_probs: LogProbSource,
    end_token: EndToken,
    keeps_slots: bool,
    vocab_size: int | None = None,
    max_prompt_tokens: int | None = None,
    adaptive: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Our parameters of the BLS model. For seeds and log_probs see `toolkit.triton.tensors.bls`.
    end_token: whether the engines can return the token that ended a text. keeps_slots: whether they
    keep a slot for the next call of a request. max_prompt_tokens: longer
    prompts are decoded plainly. adaptive: how draft lengths are chosen; None: they are fixed.
    """
    return {
        **({} if max_prompt_tokens is None else {"max_prompt_tokens": str(max_prompt_tokens)}),
        **({} if adaptive is None else {"adaptive": json.dumps(dict(adaptive), sort_keys=True)}),
        "log_probs": log_probs,
        "end_token": end_token,
        "keeps_slots": str(keeps_slots).lower(),
        **({} if vocab_size is None else {"vocab_size": str(vocab_size)}),
        "max_input_len": str(max_input_len),
        "max_seq_len": str(max_seq_len),
        "max_draft_len": str(max_draft_len),
        "acceptance": acceptance,
        "seeds": seeds,
        "on_draft_failure": triton.on_draft_failure,
        "default_max_tokens": str(triton.default_max_tokens),
        "request_timeout_s": str(triton.request_timeout_s),
        "stream_interval_ms": str(triton.stream_interval_ms),
    }


def model_configs(bls: Bls) -> dict[str, Any]:
    """Model name -> its ModelConfig message.

    The engines answer each call once and are not decoupled, as in TensorRT-LLM's own draft-target
    setup. Only the BLS model streams.
    """
    from tritonclient.grpc import model_config_pb2 as pb

    types = {
        **PLACEHOLDER_TYPES,
        "prompt_embedding_table_data_type": bls.prompt_embedding_table_data_type,
    }
    draft_name = (
        {} if bls.draft is None else {"tensorrt_llm_draft_model_name": contract.DRAFT_MODEL}
    )
    configs = {
        contract.PREPROCESSING: _config(
            contract.PREPROCESSING,
            PREPROCESSING,
            {"tokenizer_dir": TOKENIZER_FOLDER, "add_special_tokens": "true"},
            {
                "end_ids": ",".join(map(str, bls.end_ids)),
                "max_input_len": bls.settings["max_input_len"],
            },
            types=types,
        ),
        contract.POSTPROCESSING: _config(
            contract.POSTPROCESSING,
            POSTPROCESSING,
            {"tokenizer_dir": TOKENIZER_FOLDER, "skip_special_tokens": "true"},
            {},
            types=types,
        ),
        contract.BLS_MODEL: _config(
            contract.BLS_MODEL,
            BLS,
            {
                "accumulate_tokens": str(bls.accumulate_tokens).lower(),
                "tensorrt_llm_model_name": contract.MODEL,
                **draft_name,
            },
            {
                "package_version": str(contract.PACKAGE_VERSION),
                contract.STREAM_TEXT_PARAMETER: "cumulative"
                if bls.accumulate_tokens
                else contract.STREAM_TEXT,
                "end_ids": ",".join(map(str, bls.end_ids)),
                **{f"engine_{new}": old for new, old in bls.names.items() if new != old},
                **bls.settings,
            },
            types=types,
        ),
        contract.MODEL: _config(
            contract.MODEL,
            ENGINE,
            bls.target.parameters,
            bls.target.our_parameters,
            types=types,
            backend=bls.target.backend,
            names=bls.names,
        ),
    }
    if bls.draft is not None:
        configs[contract.DRAFT_MODEL] = _config(
            contract.DRAFT_MODEL,
            ENGINE,
            bls.draft.parameters,
            bls.draft.our_parameters,
            types=types,
            backend=bls.draft.backend,
            names=bls.names,
        )
    for name in {contract.MODEL, contract.DRAFT_MODEL} & set(configs):
        configs[name].model_transaction_policy.decoupled = False
        if configs[name].backend != "tensorrtllm":
            _add_tensors(configs[name], contract.ENGINE_INPUTS)
    instances = {
        contract.PREPROCESSING: bls.preprocessing_instances,
        contract.POSTPROCESSING: bls.postprocessing_instances,
        contract.BLS_MODEL: bls.bls_instances or min(bls.max_batch_size, MAX_BLS_INSTANCES),
    }
    for name, config in configs.items():
        config.max_batch_size = bls.max_batch_size
        config.instance_group.add(count=instances.get(name, 1), kind=pb.ModelInstanceGroup.KIND_CPU)
        if name in (contract.PREPROCESSING, contract.MODEL, contract.DRAFT_MODEL):
            config.dynamic_batching.preferred_batch_size.append(bls.max_batch_size)
            config.dynamic_batching.max_queue_delay_microseconds = bls.max_queue_delay_microseconds
            config.dynamic_batching.default_queue_policy.max_queue_size = bls.max_queue_size
    bls_config = configs[contract.BLS_MODEL]
    bls_config.model_transaction_policy.decoupled = bls.decoupled
    # Triton's queue refuses requests that are too many. It never batches two of them: each reaches
    # the preferred size (triton-inference-server/core, src/dynamic_batch_scheduler.cc).
    bls_config.dynamic_batching.preferred_batch_size.append(1)
    queue_policy = bls_config.dynamic_batching.default_queue_policy
    queue_policy.max_queue_size = bls.bls_queue_size
    queue_policy.default_timeout_microseconds = int(1e6 * bls.request_timeout_s)
    ours = contract.BLS_INPUTS
    if bls.target.backend == "python":
        ours += contract.CACHE_INPUTS
    _add_tensors(bls_config, ours, contract.BLS_OUTPUTS)
    configs[contract.ENSEMBLE] = _ensemble(bls, types)
    return configs


def _ensemble(bls: Bls, types: Mapping[str, str]) -> Any:
    """Triton itself passes the tensors from step to step, so it takes no settings of ours. It does
    not stream, because the engines are not decoupled.
    """
    config = _config(contract.ENSEMBLE, ENSEMBLE, {}, {}, types=types, names=bls.names)
    config.backend, config.platform = "", "ensemble"
    config.max_batch_size = bls.max_batch_size
    for facts in ENSEMBLE_STEPS:
        step = config.ensemble_scheduling.step.add(model_name=facts.model, model_version=-1)
        is_engine = facts.model == contract.MODEL
        for tensor, name in facts.inputs.items():
            own = bls.names.get(tensor, tensor) if is_engine else tensor
            step.input_map[own] = bls.names.get(name, name)
        for tensor, name in facts.outputs.items():
            step.output_map[tensor] = name
    return config


def _config(
    name: str,
    facts: ModelFacts,
    parameters: Mapping[str, str],
    our_parameters: Mapping[str, str],
    *,
    types: Mapping[str, str],
    backend: TritonBackend = "python",
    names: Mapping[str, str] | None = None,
) -> Any:
    """Fill a template. A parameter without a value stays a placeholder, which the backend reads as
    unset.
    """
    from tritonclient.grpc import model_config_pb2 as pb

    def dtype(text: str) -> int:
        return int(pb.DataType.Value(types[text[2:-1]] if text.startswith("${") else text))

    config = pb.ModelConfig(name=name, backend=backend)
    for tensor in facts.inputs:
        spec = config.input.add(
            name=(names or {}).get(tensor.name, tensor.name),
            data_type=dtype(tensor.dtype),
            dims=tensor.dims,
            optional=tensor.optional,
            allow_ragged_batch=tensor.ragged,
        )
        if tensor.scalar:
            spec.reshape.SetInParent()
    for tensor in facts.outputs:
        config.output.add(name=tensor.name, data_type=dtype(tensor.dtype), dims=tensor.dims)
    known = {fact.name for fact in facts.parameters}
    if unknown := sorted(set(parameters) - known):
        raise ValueError(f"the template of {name} has no parameters {unknown}")
    for fact in facts.parameters:
        if fact.fixed is not None:
            config.parameters[fact.name].string_value = fact.fixed
        elif fact.name in parameters:
            config.parameters[fact.name].string_value = parameters[fact.name]
        elif fact.in_template and fact.key is not None:
            config.parameters[fact.name].string_value = f"${{{fact.key}}}"
    for key, value in our_parameters.items():
        config.parameters[key].string_value = value
    return config


def _add_tensors(
    config: Any,
    inputs: Sequence[contract.TensorSpec],
    outputs: Sequence[contract.TensorSpec] = (),
) -> None:
    from tritonclient.grpc import model_config_pb2 as pb

    for spec in inputs:
        config.input.add(
            name=spec.name, data_type=pb.DataType.Value(spec.dtype), dims=spec.dims, optional=True
        )
    for spec in outputs:
        config.output.add(name=spec.name, data_type=pb.DataType.Value(spec.dtype), dims=spec.dims)


def write_model(source: str, version: Path) -> None:
    """Write one of our models, with the modules of the toolkit that it imports."""
    version.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(MODEL_SOURCES / source / "model.py", version / "model.py")
    models = MODEL_SOURCES.relative_to(ROOT).as_posix()
    for relative in source_files([f"toolkit.triton.models.{source}.model"]):
        if relative.startswith(models):
            continue
        destination = version / "toolkit" / relative
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / relative, destination)


def write_models(folder: Path, tokenizer_dir: Path) -> None:
    """Write our three models with what they need: code, modules and tokenizer."""
    sources = {
        contract.PREPROCESSING: "preprocessing",
        contract.POSTPROCESSING: "postprocessing",
        contract.BLS_MODEL: "bls",
    }
    for model, source in sources.items():
        version = folder / model / "1"
        write_model(source, version)
        if model != contract.BLS_MODEL:
            (version / TOKENIZER_FOLDER).mkdir(exist_ok=True)
            for file in _tokenizer_files(tokenizer_dir):
                shutil.copyfile(file, version / TOKENIZER_FOLDER / file.name)


def _tokenizer_files(folder: Path) -> Iterator[Path]:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            yield folder / name
