"""A stand-in for Triton's backend `tensorrtllm`, for tests only: a Python-based backend that a real
tritonserver loads under that name, for the packaged `config.pbtxt` as it is.

It checks what the real one checks, from its sources and not from our models:

- The engine folder holds what `trtllm-build` leaves (`rank{N}.engine` per rank), of one version.
- A response holds `output_ids` and `sequence_length`; who does not request both gets an error.
- A request holds one sequence, since no packaged engine is decoupled (triton_backend/
  inflight_batcher_llm/src/utils.cc, createRequestsFromInputTensors, B).
- Logits have the engine's own type (`pretrained_config.logits_dtype`). If config.pbtxt states
  another one, the response fails (triton_backend/inflight_batcher_llm/src/
  model_instance_state.cc, fillTritonResponse, B).
- Logits of generated tokens exist only if the engine was built to gather them (B).
- Draft logits are copied into the engine's only if both have one type
  (cpp/tensorrt_llm/runtime/bufferManager.cpp, copy, B).
- Draft tokens need an engine for external drafts, and fit into its `max_draft_len`. Such an engine
  gives no log-probabilities (I).
- top_p of 0 or less is unset (utils.cc, getSamplingConfigFromTensors, B); with neither top_k nor
  top_p it decodes greedily (B).

The "model" is a fixed language: the logits of a token depend on the three tokens before it. The
draft's differ a little, so that some drafts are kept and some are not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

DTYPES = {"float32": np.float32, "float16": np.float16}
TRITON_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16"}
NAMES = {np.dtype(np.float32): "FLOAT", np.dtype(np.float16): "HALF"}  # as the runtime prints them
DRAFT_TOKENS_EXTERNAL = 2
LETTERS = slice(97, 123)  # bytes that are text
CONTEXT = 3


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        folder = Path(config["parameters"]["gpt_model_path"]["string_value"])
        engine = json.loads((folder / "config.json").read_text())
        self.pretrained, self.built = engine["pretrained_config"], engine["build_config"]
        ranks = range(self.pretrained["mapping"]["world_size"])
        missing = [rank for rank in ranks if not (folder / f"rank{rank}.engine").is_file()]
        if missing:
            raise pb_utils.TritonModelException(f"engine file of rank {missing[0]} does not exist")
        self.verifies = self.built["speculative_decoding_mode"] == DRAFT_TOKENS_EXTERNAL
        outputs = {tensor["name"]: tensor["data_type"] for tensor in config["output"]}
        self.logits_type = outputs["generation_logits"]
        self.vocab_size = int(self.pretrained["vocab_size"])

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            outputs = self._run(inputs, set(request.requested_output_names()))
        except RuntimeError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array) for name, array in outputs.items()]
        )

    def _run(self, inputs: dict[str, Any], wanted: set[str]) -> dict[str, Any]:
        prompt = inputs["input_ids"]
        if prompt.ndim != 2:
            raise RuntimeError("Expected inputTokens tensors to have 2 dimensions")
        if len(prompt) > 1:
            raise RuntimeError(
                "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction"
                " policy"
            )
        ids, count = prompt[0].tolist(), int(single(inputs, "request_output_len"))
        if len(ids) + count > self.built["max_seq_len"]:
            raise RuntimeError("the sequence is longer than max_seq_len")
        drafts = inputs["draft_input_ids"][0].tolist() if "draft_input_ids" in inputs else []
        self._check_drafts(drafts, inputs.get("draft_logits"))
        rows: list[Any] = []
        new = self._generate(ids, count, drafts, inputs, rows)
        whole = new if single(inputs, "exclude_input_in_output", False) else ids + new
        made = {
            "output_ids": np.array([[whole]], dtype=np.int32),
            "sequence_length": np.array([[len(whole)]], dtype=np.int32),
        }
        for name in made:
            if name not in wanted:
                raise RuntimeError(populating(f"{name} tensor must be present in list of output"))
        if "generation_logits" in wanted and single(inputs, "return_generation_logits", False):
            made["generation_logits"] = self._logits_tensor(rows)
        if "output_log_probs" in wanted and not self.verifies:
            log_probs = [log_softmax(row)[token] for row, token in zip(rows, new, strict=True)]
            made["output_log_probs"] = np.array([[log_probs]], dtype=np.float32)
        return {name: array for name, array in made.items() if name in wanted}

    def _check_drafts(self, drafts: list[int], draft_logits: Any) -> None:
        if not drafts:
            return
        if not self.verifies:
            raise RuntimeError(executor("Request has draft tokens, but the engine does not"))
        if len(drafts) > self.built["max_draft_len"]:
            raise RuntimeError(executor("Draft tokens exceed max_draft_len"))
        engine_type = np.dtype(DTYPES[self.pretrained["logits_dtype"]])
        if draft_logits is not None and draft_logits.dtype != engine_type:
            names = f"{NAMES[draft_logits.dtype]} != {NAMES[engine_type]}"
            raise RuntimeError(executor(f"Assertion failed: Incompatible data types: {names}"))

    def _logits_tensor(self, rows: list[Any]) -> Any:
        """generation_logits [1, beam 1, tokens, vocab] in the engine's type."""
        if not self.built["gather_generation_logits"]:
            raise RuntimeError(executor("Need to build engine with gather_generation_logits"))
        dtype = self.pretrained["logits_dtype"]
        if TRITON_TYPES[dtype] != self.logits_type:
            check = "generationLogitsType == model_state_->getLogitsDataType()"
            raise RuntimeError(populating(f"Assertion failed: {check}"))
        return np.stack(rows)[None, None].astype(DTYPES[dtype])

    def _generate(
        self, ids: list[int], count: int, drafts: list[int], inputs: dict[str, Any], rows: list[Any]
    ) -> list[int]:
        """The new tokens: drafts that are kept and one more, or `count` of them. rows: gets the
        logits behind each.
        """
        name = "random_seed" if "random_seed" in inputs else "seed"  # the former up to 0.21
        random = np.random.default_rng(int(single(inputs, name, 0)))
        draft_logits, new = inputs.get("draft_logits"), list[int]()
        while len(new) < count:
            logits = self._logits(ids + new)
            rows.append(logits)
            weights = probabilities(logits, inputs)
            if draft_logits is None or len(new) >= len(drafts):
                token = int(random.choice(self.vocab_size, p=weights))
            else:
                behind = draft_logits.reshape(-1, draft_logits.shape[-1])[len(new)]
                token = reject(drafts[len(new)], probabilities(behind, inputs), weights, random)
            new.append(token)
            is_kept = len(new) <= len(drafts) and token == drafts[len(new) - 1]
            if token == single(inputs, "end_id", -1) or (drafts and not is_kept):
                break
        return new

    def _logits(self, ids: list[int]) -> Any:
        last = [token + 1 for token in ids[-CONTEXT:]]
        logits = np.random.default_rng(last).normal(size=self.vocab_size)
        logits[LETTERS] += 8.0
        if not self.verifies:
            logits += np.random.default_rng([*last, 1]).normal(scale=0.8, size=self.vocab_size)
        return logits.astype(DTYPES[self.pretrained["logits_dtype"]]).astype(np.float64)


def single(inputs: dict[str, Any], name: str, default: Any = None) -> Any:
    """The value of a tensor with one. Such tensors are `reshape`d to [batch] in the template."""
    if name not in inputs:
        return default
    array = inputs[name]
    if array.shape != (1,):
        raise RuntimeError(f"{name} has the shape {array.shape}: Invalid size for tensor")
    return array[0]


def probabilities(logits: Any, inputs: dict[str, Any]) -> Any:
    top_k = int(single(inputs, "runtime_top_k", 0))
    top_p = float(single(inputs, "runtime_top_p", 0.0))
    if top_k == 1 or (top_k == 0 and top_p <= 0.0):
        return np.eye(len(logits))[int(np.argmax(logits))]
    temperature = float(single(inputs, "temperature", 1.0))
    weights = np.exp(log_softmax(logits.astype(np.float64) / temperature))
    order = np.argsort(weights)[::-1]
    kept = np.cumsum(weights[order]) - weights[order] < (top_p if top_p > 0.0 else 1.0)
    kept[top_k or len(logits) :] = False
    weights[order[~kept]] = 0.0
    return weights / weights.sum()


def reject(draft: int, draft_probs: Any, target_probs: Any, random: Any) -> int:
    """The draft, or the token that replaces it."""
    if random.random() * draft_probs[draft] < target_probs[draft]:
        return draft
    rest = np.maximum(target_probs - draft_probs, 0.0)
    return int(random.choice(len(rest), p=rest / rest.sum()))


def log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def executor(message: str) -> str:
    return (
        "Executor failed process requestId 1 due to the following error: Encountered an error in"
        f" forwardAsync function: [TensorRT-LLM][ERROR] {message}"
    )


def populating(message: str) -> str:
    return f"Error encountered while populating response: [TensorRT-LLM][ERROR] {message}"
