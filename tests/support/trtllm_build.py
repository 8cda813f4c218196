"""A stand-in for `trtllm-build`, for tests only: the contract of its command line and of what it
leaves behind, without a GPU.

It takes exactly the flags of a version, refuses what the real one refuses, makes the same silent
adjustments, prints the same kind of log, and writes an engine directory of the same shape, whose
rank files hold the checkpoint's bytes. It decodes nothing and chooses no kernels. Its table of
flags stands here by itself, made from the same contract as `toolkit.facts.trtllm_build` and not
from it: where the two differ, one of them was changed by mistake.

The environment says what it is: STANDIN_VERSION (1.2.1), STANDIN_SM (90), STANDIN_DEVICES (8), and
how it fails, STANDIN_FAIL: oom | host-oom | killed | partial-ranks | hollow | disk-full | tactics |
silent | logits (they keep the checkpoint's type); STANDIN_FAIL_RANK (0) says in which rank. Only
the standard library is used, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

VERSION = os.environ.get("STANDIN_VERSION", "1.2.1")
SM = int(os.environ.get("STANDIN_SM", "90"))
DEVICES = int(os.environ.get("STANDIN_DEVICES", "8"))
FAIL = os.environ.get("STANDIN_FAIL", "")
FAIL_RANK = int(os.environ.get("STANDIN_FAIL_RANK", "0"))

SWITCH = "enable|disable"
DTYPE = "auto|float16|float32|bfloat16|int32|disable"
FLAGS = (
    ("--checkpoint_dir", "text", None),
    ("--model_config", "text", None),
    ("--build_config", "text", None),
    ("--model_cls_file", "text", None),
    ("--model_cls_name", "text", None),
    ("--output_dir", "text", "engine_outputs"),
    ("--max_batch_size", "int", 2048),
    ("--max_input_len", "int", 1024),
    ("--max_seq_len --max_decoder_seq_len", "int", None),
    ("--max_beam_width", "int", 1),
    ("--max_num_tokens", "int", 8192),
    ("--opt_num_tokens", "int", None),
    ("--max_encoder_input_len", "int", 1024),
    ("--max_prompt_embedding_table_size --max_multimodal_len", "int", 0),
    ("--kv_cache_type", "continuous|paged|disabled", None),
    ("--paged_kv_cache", SWITCH, None),
    ("--input_timing_cache", "text", None),
    ("--output_timing_cache", "text", "model.cache"),
    ("--profiling_verbosity", "layer_names_only|detailed|none", "layer_names_only"),
    ("--strip_plan", "flag", False),
    ("--weight_sparsity", "flag", False),
    ("--weight_streaming", "flag", False),
    ("--fast_build", "flag", False),
    ("--workers", "int", 1),
    ("--log_level", "internal_error|error|warning|info|verbose|debug|trace", "info"),
    ("--enable_debug_output", "flag", False),
    ("--visualize_network", "text", None),
    ("--dry_run", "flag", False),
    ("--monitor_memory", "flag", False),
    ("--logits_dtype", "float16|float32", None),
    ("--gather_context_logits", "flag", False),
    ("--gather_generation_logits", "flag", False),
    ("--gather_all_token_logits", "flag", False),
    ("--lora_dir", "list", None),
    ("--lora_ckpt_source", "hf|nemo", "hf"),
    ("--lora_target_modules", "list", None),
    ("--max_lora_rank", "int", 64),
    (
        "--speculative_decoding_mode",
        "draft_tokens_external|lookahead_decoding|medusa|explicit_draft_tokens|eagle",
        None,
    ),
    ("--max_draft_len", "int", 0),
    ("--bert_attention_plugin", DTYPE, "auto"),
    ("--gpt_attention_plugin", DTYPE, "auto"),
    ("--fp8_rowwise_gemm_plugin", DTYPE, "disable"),
    ("--lora_plugin", DTYPE, "disable"),
    ("--moe_plugin", DTYPE, "auto"),
    ("--mamba_conv1d_plugin", DTYPE, "auto"),
    ("--nccl_plugin", DTYPE, "auto"),
    ("--gemm_plugin", "auto|float16|float32|bfloat16|int32|fp8|nvfp4|disable", None),
    ("--gemm_swiglu_plugin", "fp8|disable", "disable"),
    ("--low_latency_gemm_plugin", "fp8|disable", "disable"),
    ("--low_latency_gemm_swiglu_plugin", "fp8|disable", "disable"),
    ("--gemm_allreduce_plugin", "float16|bfloat16|disable", "disable"),
    ("--dora_plugin", SWITCH, "disable"),
    ("--context_fmha", SWITCH, "enable"),
    ("--bert_context_fmha_fp32_acc", SWITCH, "disable"),
    ("--remove_input_padding", SWITCH, "enable"),
    ("--use_paged_context_fmha", SWITCH, "enable"),
    ("--use_fp8_context_fmha", SWITCH, "enable"),
    ("--fuse_fp4_quant", SWITCH, "disable"),
    ("--multiple_profiles", SWITCH, "disable"),
    ("--paged_state", SWITCH, "enable"),
    ("--streamingllm", SWITCH, "disable"),
    ("--norm_quant_fusion", SWITCH, "disable"),
    ("--reduce_fusion", SWITCH, "disable"),
    ("--user_buffer", SWITCH, "disable"),
    ("--use_fused_mlp", SWITCH, "enable"),
    ("--pp_reduce_scatter", SWITCH, "disable"),
    ("--tokens_per_block", "int", 32),
)
FLAGS_UP_TO_0_21 = (
    ("--auto_parallel", "int", 1),
    ("--gpus_per_node", "int", 8),
    ("--cluster_key", "text", None),
)
# Arguments of PretrainedConfig without a default (models/modeling_utils.py).
REQUIRED = (
    "architecture",
    "dtype",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# Refused from SM 100 on (plugin/plugin.py).
HOPPER_PLUGINS = (
    "gemm_swiglu_plugin",
    "fp8_rowwise_gemm_plugin",
    "low_latency_gemm_plugin",
    "low_latency_gemm_swiglu_plugin",
    "bert_context_fmha_fp32_acc",
)
MODES = {
    "draft_tokens_external": 2,
    "medusa": 4,
    "lookahead_decoding": 8,
    "explicit_draft_tokens": 16,
    "eagle": 32,
}
PLUGINS_WITHOUT_FLAG: dict[str, Any] = {
    "identity_plugin": None,
    "qserve_gemm_plugin": None,
    "weight_only_groupwise_quant_matmul_plugin": None,
    "weight_only_quant_matmul_plugin": None,
    "smooth_quant_plugins": True,
    "smooth_quant_gemm_plugin": None,
    "layernorm_quantization_plugin": None,
    "rmsnorm_quantization_plugin": None,
    "quantize_per_token_plugin": False,
    "quantize_tensor_plugin": False,
    "paged_kv_cache": None,
    "manage_weights": False,
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="trtllm-build", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for names, kind, default in (*FLAGS, *(FLAGS_UP_TO_0_21 if VERSION.startswith("0.") else ())):
        options: dict[str, Any] = {"default": default, "help": "of the contract"}
        if kind == "flag":
            options["action"] = "store_true"
        elif kind == "int":
            options["type"] = int
        elif kind == "list":
            options["nargs"] = "+"
        elif kind != "text" and names != "--kv_cache_type":
            options["choices"] = kind.split("|")
        elif names == "--kv_cache_type":
            options["type"] = _kv_cache_type
        made.add_argument(*names.split(), **options)
    return made


def _kv_cache_type(text: str) -> str:
    if text.upper() not in ("CONTINUOUS", "PAGED", "DISABLED"):
        raise argparse.ArgumentTypeError(
            f"Invalid value '{text}'. Expected one of ['continuous', 'paged', 'disabled']"
        )
    return text.upper()


def say(text: str, level: str = "I", program: str = "TRT-LLM") -> None:
    print(f"[{time.strftime('%m/%d/%Y-%H:%M:%S')}] [{program}] [{level}] {text}", flush=True)


def main() -> None:
    arguments = parser().parse_args()
    print(f"[TensorRT-LLM] TensorRT-LLM version: {VERSION}", flush=True)
    if (
        arguments.gather_context_logits or arguments.gather_all_token_logits
    ) and arguments.max_draft_len > 0:
        raise RuntimeError("Gather context logits is not support with draft len > 0. ")
    out_dir = Path(arguments.output_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    if min(DEVICES, arguments.workers) == 0:
        raise ValueError("max_workers must be greater than 0")
    checkpoint = Path(arguments.checkpoint_dir)
    pretrained = json.loads((checkpoint / "config.json").read_text())
    missing = [name for name in REQUIRED if name not in pretrained]
    if missing:
        raise TypeError(f"PretrainedConfig() missing required arguments: {missing}")
    pretrained = {"logits_dtype": "float32", **pretrained}
    if (
        arguments.logits_dtype is not None and FAIL != "logits"
    ):  # as build_model does, before the engine is made
        pretrained["logits_dtype"] = arguments.logits_dtype
    if arguments.multiple_profiles == "enable" and arguments.opt_num_tokens is not None:
        raise RuntimeError("multiple_profiles is enabled, while opt_num_tokens is set. ")
    if pretrained["architecture"] not in (
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "QWenForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    ):
        raise AssertionError(f"Unsupported model architecture: {pretrained['architecture']}")
    if arguments.pp_reduce_scatter == "enable":
        raise AssertionError("PP reduce scatter is only supported in the mixtral model.")
    build = adjusted(arguments, pretrained)
    Path(arguments.output_timing_cache).write_bytes(b"timing cache")
    for rank in range(int(pretrained["mapping"]["world_size"])):
        build_rank(
            rank,
            checkpoint,
            out_dir,
            {"version": VERSION, "pretrained_config": pretrained, "build_config": build},
        )
    say("Total time of building all engines: 00:00:00")


def adjusted(arguments: argparse.Namespace, pretrained: dict[str, Any]) -> dict[str, Any]:
    """build_config as the engine records it, after everything that the builder does on its own."""
    quant = pretrained["quantization"]
    algo, kv_algo = quant["quant_algo"], quant["kv_cache_quant_algo"]
    plugins = plugin_config(arguments, pretrained)
    mode = MODES.get(arguments.speculative_decoding_mode, 1)
    max_seq_len = arguments.max_seq_len or int(pretrained["max_position_embeddings"])
    max_input_len, max_num_tokens = (
        min(arguments.max_input_len, max_seq_len),
        arguments.max_num_tokens,
    )
    if mode != 1:
        say(f"Increasing max_seq_len ({max_seq_len}) by max_draft_len ({arguments.max_draft_len})")
        max_seq_len += arguments.max_draft_len
        needed = arguments.max_batch_size * (arguments.max_draft_len + 1)
        if max_num_tokens < needed:
            say(
                f"max_num_tokens ({max_num_tokens}) is smaller. New max_num_tokens is set to"
                f" {needed}."
            )
            max_num_tokens = needed
    if mode == 32 and (arguments.max_batch_size > 512 or arguments.max_draft_len > 256):
        raise RuntimeError("EAGLE: max_batch_size or max_draft_len too large")
    adjust_attention(plugins, algo, kv_algo)
    refuse_precision(plugins, algo, kv_algo)
    adjust_fusions(plugins, algo, pretrained)
    return {
        "max_input_len": max_input_len,
        "max_seq_len": max_seq_len,
        "opt_batch_size": 8,
        "max_batch_size": arguments.max_batch_size,
        "max_beam_width": arguments.max_beam_width,
        "max_num_tokens": max_num_tokens,
        "opt_num_tokens": (
            arguments.opt_num_tokens or arguments.max_batch_size * arguments.max_beam_width
        ),
        "max_prompt_embedding_table_size": 0,
        "kv_cache_type": arguments.kv_cache_type or "PAGED",
        "gather_context_logits": (
            arguments.gather_context_logits or arguments.gather_all_token_logits
        ),
        "gather_generation_logits": (
            arguments.gather_generation_logits or arguments.gather_all_token_logits
        ),
        "strongly_typed": True,
        "force_num_profiles": None,
        "profiling_verbosity": arguments.profiling_verbosity,
        "enable_debug_output": arguments.enable_debug_output,
        "max_draft_len": arguments.max_draft_len,
        "speculative_decoding_mode": mode,
        "use_refit": False,
        "input_timing_cache": arguments.input_timing_cache,
        "output_timing_cache": arguments.output_timing_cache,
        "lora_config": {},
        "weight_sparsity": arguments.weight_sparsity,
        "weight_streaming": arguments.weight_streaming,
        "use_strip_plan": arguments.strip_plan,
        "max_encoder_input_len": arguments.max_encoder_input_len,
        "monitor_memory": arguments.monitor_memory,
        "use_mrope": False,
        "plugin_config": plugins,
    }


def adjust_attention(plugins: dict[str, Any], algo: str | None, kv_algo: str | None) -> None:
    if not plugins["context_fmha"]:
        plugins.update(use_fp8_context_fmha=False, use_paged_context_fmha=False)
    elif algo != "FP8" or SM < 89:
        plugins["use_fp8_context_fmha"] = False
        if kv_algo == "FP8":
            say("FP8 Paged Context FMHA is disabled because FP8 context FMHA is disabled.", "W")
            plugins["use_paged_context_fmha"] = False
    elif plugins["use_paged_context_fmha"]:
        plugins["use_fp8_context_fmha"] = kv_algo == "FP8"
    if kv_algo == "INT8":
        plugins["use_paged_context_fmha"] = False


def refuse_precision(plugins: dict[str, Any], algo: str | None, kv_algo: str | None) -> None:
    if 100 <= SM < 120:
        if algo in ("W8A16", "W4A16") or kv_algo == "INT8":
            raise RuntimeError("INT8/INT4 quantization is not supported on SM>=100.")
        if algo is not None and algo.startswith("W8A8_SQ"):
            raise RuntimeError("SmoothQuant is not supported on SM>=100.")
    if SM >= 100 and any(plugins[name] for name in HOPPER_PLUGINS):
        raise NotImplementedError("This plugin is not supported on SM>=100.")


def adjust_fusions(plugins: dict[str, Any], algo: str | None, pretrained: dict[str, Any]) -> None:
    if algo not in (None, "FP8", "MIXED_PRECISION"):
        plugins["use_fused_mlp"] = False
    family = pretrained["architecture"] in (
        "LlamaForCausalLM",
        "Gemma2ForCausalLM",
        "MedusaForCausalLM",
    )
    if plugins["reduce_fusion"] and (pretrained["mapping"]["tp_size"] == 1 or not family):
        plugins["reduce_fusion"] = False
    plugins["nccl_plugin"] = (
        pretrained["dtype"] if pretrained["mapping"]["world_size"] > 1 else None
    )
    if algo == "W8A16":
        plugins["weight_only_quant_matmul_plugin"] = pretrained["dtype"]


def plugin_config(arguments: argparse.Namespace, pretrained: dict[str, Any]) -> dict[str, Any]:
    """Switches as truth values, types as text, `auto` as the checkpoint's type; disabled or
    unset is null.
    """
    start = next(
        index for index, (names, _, _) in enumerate(FLAGS) if names == "--bert_attention_plugin"
    )
    found: dict[str, Any] = {"dtype": pretrained["dtype"]}
    for names, kind, _ in FLAGS[start:]:
        name = names.split()[0].removeprefix("--")
        value = getattr(arguments, name)
        if kind == SWITCH:
            value = value == "enable"
        elif kind != "int":
            value = {"auto": pretrained["dtype"], "disable": None}.get(value, value)
        found[name] = value
    if found["streamingllm"]:
        raise AssertionError("StreamingLLM is no longer supported")
    return {**found, **PLUGINS_WITHOUT_FLAG, "manage_weights": arguments.fast_build}


def build_rank(rank: int, checkpoint: Path, out_dir: Path, config: dict[str, Any]) -> None:
    weights = checkpoint / f"rank{rank}.safetensors"
    if not weights.is_file():
        raise FileNotFoundError(str(weights))
    say("Total time of constructing network from module object 0.01 seconds")
    say("Build TensorRT engine Unnamed Network 0")
    if rank == FAIL_RANK:
        fail()
    say("Total time of building Unnamed Network 0: 00:00:00")
    if rank == 0:
        (out_dir / "config.json").write_text(json.dumps(config, indent=4))
        say(f"Config saved to {out_dir / 'config.json'}.")
    if FAIL == "partial-ranks" and rank == FAIL_RANK:
        return
    say(f"Serializing engine to {out_dir / f'rank{rank}.engine'}...")
    with (out_dir / f"rank{rank}.engine").open("wb") as engine:
        engine.write(b"ptrt" + bytes(1020))
        if FAIL == "killed" and rank == FAIL_RANK:
            engine.write(weights.read_bytes()[:100])
            engine.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        if not (FAIL == "hollow" and rank == FAIL_RANK):
            with weights.open("rb") as source:
                shutil.copyfileobj(source, engine)
    say("Engine serialized. Total time: 00:00:00")


def fail() -> None:
    if FAIL == "oom":
        size = 24793579520
        say(
            "[virtualMemoryBuffer.cpp::resizePhysical::140] Error Code 2: OutOfMemory (no further"
            " information)",
            "E",
            "TRT",
        )
        say(f"Requested amount of GPU memory ({size} bytes) could not be allocated.", "W", "TRT")
        gave_up("Engine building failed, please check the error log.")
    if FAIL == "host-oom":
        raise RuntimeError(
            "A process in the process pool was terminated abruptly while the future was running or"
            " pending."
        )
    if FAIL == "disk-full":
        raise OSError(28, "No space left on device")
    if FAIL == "tactics":
        say(
            "Error Code 10: Internal Error (Could not find any implementation for node"
            " LlamaForCausalLM/lm_head.)",
            "E",
            "TRT",
        )
        gave_up("Engine building failed, please check the error log.")
    if FAIL == "silent":
        sys.exit(7)


def gave_up(text: str) -> NoReturn:
    raise AssertionError(text)


if __name__ == "__main__":
    main()
