"""Every family, and every variation of one that a config.json can ask for."""

from __future__ import annotations

from typing import Any

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"tie_word_embeddings": True},
    "llama_biases": {"attention_bias": True, "mlp_bias": True},
    "llama_head_dim_of_its_own": {
        "head_dim": 24,
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    },
    "llama_no_grouping": {"num_key_value_heads": 4},
    "llama_one_kv_head": {"num_key_value_heads": 1},
    "llama_odd_sizes": {
        "vocab_size": 301,
        "intermediate_size": 90,
        "hidden_size": 52,
        "head_dim": 10,
    },
    "llama_linear_rope": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    },
    "llama_dynamic_rope_within_its_length": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    },
    "llama_llama3_rope": {"rope_parameters": LLAMA3},
    "llama_yarn_rope": {"rope_parameters": YARN},
    "llama_yarn_with_a_stated_factor": {
        "rope_parameters": {**YARN, "attention_factor": 0.8, "beta_fast": 16.0}
    },
    "llama_float16": {"dtype": "float16"},
    "llama_float32": {"dtype": "float32"},
    "mistral": {"family": "mistral", "sliding_window": None},
    "mistral_sliding_window": {"family": "mistral", "sliding_window": 9},
    "qwen2": {"family": "qwen2"},
    "qwen2_sliding_in_the_second_layer": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen3": {"family": "qwen3"},
    "qwen3_tied_with_biases": {
        "family": "qwen3",
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
}
