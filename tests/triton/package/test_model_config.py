"""config.pbtxt: Triton's own message type reads back what was written. The tensors are those of
TensorRT-LLM's template and ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import StageError
from toolkit.triton.package import model_config
from toolkit.triton.tensors.contract import INPUTS, OUTPUTS

# The tensors of TensorRT-LLM 1.2.1, triton_backend/all_models/llmapi/tensorrt_llm/config.pbtxt:
# name, type, dims, optional.
TEMPLATE_INPUTS = {
    ("text_input", "TYPE_STRING", -1, False),
    ("streaming", "TYPE_BOOL", 1, True),
    ("sampling_param_best_of", "TYPE_INT32", 1, True),
    ("sampling_param_temperature", "TYPE_FP32", 1, True),
    ("sampling_param_top_k", "TYPE_INT32", 1, True),
    ("sampling_param_top_p", "TYPE_FP32", 1, True),
    ("sampling_param_frequency_penalty", "TYPE_FP32", 1, True),
    ("sampling_param_presence_penalty", "TYPE_FP32", 1, True),
    ("sampling_param_max_tokens", "TYPE_INT32", 1, True),
    ("sampling_param_stop", "TYPE_STRING", -1, True),
    ("sampling_param_seed", "TYPE_UINT64", 1, True),
    ("sampling_param_exclude_input_from_output", "TYPE_BOOL", 1, True),
    ("sampling_param_return_perf_metrics", "TYPE_BOOL", 1, True),
    ("return_finish_reason", "TYPE_BOOL", 1, True),
    ("return_stop_reason", "TYPE_BOOL", 1, True),
    ("return_cumulative_logprob", "TYPE_BOOL", 1, True),
    ("stop", "TYPE_BOOL", 1, True),
}
TEMPLATE_OUTPUTS = {
    ("text_output", "TYPE_STRING"),
    ("finish_reason", "TYPE_STRING"),
    ("stop_reason", "TYPE_STRING"),
    ("cumulative_logprob", "TYPE_FP32"),
    ("kv_cache_reused_block", "TYPE_INT32"),
    ("kv_cache_missed_block", "TYPE_INT32"),
    ("kv_cache_alloc_new_blocks", "TYPE_INT32"),
    ("kv_cache_alloc_total_blocks", "TYPE_INT32"),
    ("kv_cache_hit_rate", "TYPE_FP32"),
    ("arrival_time_ns", "TYPE_INT64"),
    ("first_scheduled_time_ns", "TYPE_INT64"),
    ("first_token_time_ns", "TYPE_INT64"),
    ("last_token_time_ns", "TYPE_INT64"),
    ("acceptance_rate", "TYPE_FP32"),
    ("total_accepted_draft_tokens", "TYPE_INT32"),
    ("total_draft_tokens", "TYPE_INT32"),
}


def test_the_template_s_tensors_are_there_as_they_are() -> None:
    inputs = {
        (spec.name, spec.dtype, spec.dims[0], spec.optional) for spec in INPUTS if not spec.ours
    }
    outputs = {(spec.name, spec.dtype) for spec in OUTPUTS if not spec.ours}
    assert inputs == TEMPLATE_INPUTS
    assert outputs == TEMPLATE_OUTPUTS
    assert all(spec.dims == (-1,) for spec in OUTPUTS if not spec.ours)


def test_what_is_ours_is_optional_and_named_once() -> None:
    assert all(spec.optional for spec in INPUTS if spec.ours)
    for specs in (INPUTS, OUTPUTS):
        assert len({spec.name for spec in specs}) == len(specs)


@pytest.mark.parametrize("decoupled", [True, False])
def test_written_config_reads_back_equal(tmp_path: Path, decoupled: bool) -> None:
    config = model_config.build(decoupled=decoupled)
    model_config.write(config, tmp_path / "config.pbtxt")
    again = model_config.read(tmp_path / "config.pbtxt")
    assert again == config
    assert again.model_transaction_policy.decoupled is decoupled
    assert again.max_batch_size == 0
    assert [tensor.name for tensor in again.input] == [spec.name for spec in INPUTS]
    assert {tensor.name for tensor in again.input if not tensor.optional} == {"text_input"}


def test_config_text_is_the_one_that_was_reviewed(golden: Any) -> None:
    golden("config.pbtxt", model_config.render(model_config.build(decoupled=True)))


def test_a_file_that_triton_would_not_read_is_refused_with_its_position(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text('name: "x"\nbackendd: "python"\n')
    with pytest.raises(StageError, match=r"config.pbtxt: not a Triton model configuration: 2:1"):
        model_config.read(tmp_path / "config.pbtxt")
