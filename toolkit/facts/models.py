"""The config.json of public models, so that a plan can be made before anything is downloaded.

Only the keys that a plan needs are here, in Hugging Face's own spelling. If the YAML names a
folder, the folder's config.json is read instead.
"""

from __future__ import annotations

import re
from typing import Any

from toolkit.facts.source import Source

__all__ = ["CONFIGS", "HEAD_CONFIGS", "SOURCES", "is_instruct"]

INSTRUCT = re.compile(r"[-_.](instruct|it|chat)([-_.]|$)", re.IGNORECASE)


def _model(
    architecture: str, vocab_size: int, sizes: tuple[int, ...], length: int, **rest: Any
) -> dict[str, Any]:
    """sizes: hidden size, layers, heads, KV heads, head_dim, intermediate size of the MLP.
    length: max_position_embeddings.
    """
    hidden, layers, heads, kv_heads, head_dim, inner = sizes
    return {
        "architectures": [architecture],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "max_position_embeddings": length,
        "torch_dtype": "bfloat16",
        **rest,
    }


def _llama3(*sizes: int, factor: float, tied: bool = False) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rest = {
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-5,
    }
    return _model("LlamaForCausalLM", 128256, sizes, 131072, **rest)


def _qwen25(vocab_size: int, *sizes: int, tied: bool) -> dict[str, Any]:
    rest = {"rope_theta": 1e6, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6}
    return _model("Qwen2ForCausalLM", vocab_size, sizes, 32768, **rest)


def _qwen3(*sizes: int, tied: bool) -> dict[str, Any]:
    rest = {"rope_theta": 1e6, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6}
    return _model("Qwen3ForCausalLM", 151936, sizes, 40960, **rest)


def _mistral(*sizes: int) -> dict[str, Any]:
    rest = {
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
    }
    return _model("MistralForCausalLM", 32768, sizes, 32768, **rest)


def _hyperclova_seed(*sizes: int, length: int) -> dict[str, Any]:
    return _model("LlamaForCausalLM", 110592, sizes, length, tie_word_embeddings=True)


# All of them are trained on conversations, also those whose names do not say so (Qwen 3).
CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.3-70B-Instruct": _llama3(8192, 80, 64, 8, 128, 28672, factor=8.0),
    "meta-llama/Llama-3.1-405B-Instruct": _llama3(16384, 126, 128, 8, 128, 53248, factor=8.0),
    "meta-llama/Llama-3.1-70B-Instruct": _llama3(8192, 80, 64, 8, 128, 28672, factor=8.0),
    "meta-llama/Llama-3.1-8B-Instruct": _llama3(4096, 32, 32, 8, 128, 14336, factor=8.0),
    "meta-llama/Llama-3.2-3B-Instruct": _llama3(3072, 28, 24, 8, 128, 8192, factor=32.0, tied=True),
    "meta-llama/Llama-3.2-1B-Instruct": _llama3(2048, 16, 32, 8, 64, 8192, factor=32.0, tied=True),
    "Qwen/Qwen2.5-72B-Instruct": _qwen25(152064, 8192, 80, 64, 8, 128, 29568, tied=False),
    "Qwen/Qwen2.5-32B-Instruct": _qwen25(152064, 5120, 64, 40, 8, 128, 27648, tied=False),
    "Qwen/Qwen2.5-7B-Instruct": _qwen25(152064, 3584, 28, 28, 4, 128, 18944, tied=False),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen25(151936, 1536, 28, 12, 2, 128, 8960, tied=True),
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen25(151936, 896, 24, 14, 2, 64, 4864, tied=True),
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 64, 8, 128, 25600, tied=False),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 8, 128, 12288, tied=False),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 8, 128, 6144, tied=True),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 8, 128, 3072, tied=True),
    "mistralai/Mistral-Large-Instruct-2407": _mistral(12288, 88, 96, 8, 128, 28672),
    "mistralai/Mistral-7B-Instruct-v0.3": _mistral(4096, 32, 32, 8, 128, 14336),
    "naver-hyperclovax/HyperCLOVAX-SEED-Text-Instruct-1.5B": _hyperclova_seed(
        2048, 24, 16, 8, 128, 7168, length=16384
    ),
    "naver-hyperclovax/HyperCLOVAX-SEED-Text-Instruct-0.5B": _hyperclova_seed(
        1024, 24, 16, 8, 128, 4096, length=4096
    ),
}
# Heads, which are no models of their own.
HEAD_CONFIGS: dict[str, dict[str, Any]] = {
    "nvidia/Llama-3.3-70B-Instruct-Eagle3": {
        **_llama3(8192, 1, 64, 8, 128, 28672, factor=8.0),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 128256,
    },
}
SOURCES = {
    "HEAD_CONFIGS": Source(
        "the head's 3.2 G parameters as published: one layer of the target's sizes, fc of three"
        " layers, and two tables of 128,256 rows. Its config.json was not seen: a build reads the"
        " real one after the download, and plans again",
        "I",
    ),
    "meta-llama": Source(
        "config.json of the model on huggingface.co; 405B as corrected to 8 KV heads", "B"
    ),
    "Qwen": Source("config.json of the model on huggingface.co", "B"),
    "mistralai": Source(
        "config.json of the model on huggingface.co, as first published (32768 positions)", "B"
    ),
    "naver-hyperclovax": Source(
        "neither config.json was read. Both: tagged llama on huggingface.co, contexts of 16k and 4k"
        " on their cards. 0.5B: modules that transformers prints (LlamaForCausalLM, embeddings"
        " 110592 x 1024, 24 layers, 2048 rows of q, 1024 of k and v, 4096 of the MLP), which give"
        " the card's 0.57 B; 16 heads of 128 are inferred. 1.5B: sizes inferred, which give 1.59 B",
        "I",
    ),
}


def is_instruct(hub_id: str) -> bool:
    """Whether the model is trained on conversations: it is known, or its name says so."""
    return hub_id in CONFIGS or INSTRUCT.search(hub_id.rpartition("/")[2]) is not None
