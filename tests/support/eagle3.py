"""Small EAGLE-3 heads beside a small target, made in seconds: one with random weights, and one
trained on the target's own greedy text, so that some of its drafts are accepted.

The head is the one layer of SafeAILab/EAGLE as vllm/model_executor/models/llama_eagle3.py runs it:
it reads the hidden states of three of the target's layers at a position and the embedding of the
next token, and predicts the token after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.checkpoints import BOS_ID, EOS_ID, write_checkpoint
from toolkit.standins.heads import head_tensors
from toolkit.standins.heads import write_head as write_head_files

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 2, 1, 32
LAYERS, CAPTURED = 4, (1, 2, 3)
ROPE_THETA, EPS = 10000.0, 1e-6


def write_eagle3_target(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A random four-layer Llama with the byte tokenizer, of sizes that vLLM's CPU kernels take."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS,
        "init_scale": 2.0,
        **overrides,
    }
    return write_checkpoint(directory, family="llama", seed=seed, **settings)


def head_config(
    vocab_size: int = 258, draft_vocab_size: int = 256, **changes: Any
) -> dict[str, Any]:
    """config.json of a head. A change to None removes the key."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "max_position_embeddings": 1024,
        "rms_norm_eps": EPS,
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "dtype": "float32",
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(CAPTURED),
        },
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def write_head(
    directory: Path,
    *,
    config: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> Path:
    """Write a head's folder; by default a random one, whose 256 ids are the target's first."""
    config = head_config() if config is None else config
    if tensors is None:
        tensors = head_tensors(config, range(config["draft_vocab_size"]))
    return write_head_files(directory, config, tensors)


def train_head(directory: Path, target: Path, prompts: Sequence[str], *, steps: int = 150) -> float:
    """Train a head on the target's greedy continuations of `prompts`, and write it.

    Takes a few seconds. Returns the share of the tokens that it predicts, teacher-forced.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer
    from torch.nn.functional import cross_entropy

    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    texts = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        texts.append(
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False
            )[0]
        )
    length = min(len(text) for text in texts)
    ids = torch.stack([text[:length] for text in texts])
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
        captured = torch.cat([states[layer] for layer in CAPTURED], -1)[:, :-2]
        embedded = model.get_input_embeddings()(ids[:, 1:-1])
    config = head_config(vocab_size=model.config.vocab_size)
    tensors = head_tensors(config, range(config["draft_vocab_size"]))
    weights = {n: t.requires_grad_() for n, t in tensors.items() if t.is_floating_point()}
    optimizer = torch.optim.Adam(weights.values(), lr=5e-3)
    wanted = ids[:, 2:].clamp(max=config["draft_vocab_size"] - 1)
    for _ in range(steps):
        logits = forward(weights, captured, embedded)
        loss = cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    write_head(directory, config=config, tensors={n: t.detach() for n, t in tensors.items()})
    return float((logits.argmax(-1) == ids[:, 2:]).float().mean())


def forward(weights: dict[str, Tensor], captured: Tensor, embedded: Tensor) -> Tensor:
    """captured [batch, tokens, 3 x hidden], embedded [batch, tokens, hidden] of the next token ->
    logits [batch, tokens, draft vocabulary] of the token after it.
    """
    import torch
    from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (HIDDEN,), weights[f"{name}.weight"], EPS)

    def project(x: Tensor, name: str) -> Tensor:
        return linear(x, weights[f"{name}.weight"])

    residual = project(captured, "fc")
    x = torch.cat(
        [norm(embedded, "midlayer.input_layernorm"), norm(residual, "midlayer.hidden_norm")], -1
    )

    def heads(name: str, count: int) -> Tensor:
        split = project(x, f"midlayer.self_attn.{name}").unflatten(-1, (count, HEAD_DIM))
        return split.transpose(1, 2)

    query, key = _rotated(heads("q_proj", HEADS)), _rotated(heads("k_proj", KV_HEADS))
    attended = scaled_dot_product_attention(
        query, key, heads("v_proj", KV_HEADS), is_causal=True, enable_gqa=True
    )
    residual = residual + project(attended.transpose(1, 2).flatten(-2), "midlayer.self_attn.o_proj")
    x = norm(residual, "midlayer.post_attention_layernorm")
    gated = silu(project(x, "midlayer.mlp.gate_proj")) * project(x, "midlayer.mlp.up_proj")
    return project(norm(residual + project(gated, "midlayer.mlp.down_proj"), "norm"), "lm_head")


def _rotated(x: Tensor) -> Tensor:
    """RoPE; x [batch, heads, tokens, head_dim]."""
    import torch

    half = HEAD_DIM // 2
    angles = torch.outer(torch.arange(x.shape[2]), ROPE_THETA ** (-torch.arange(half) / half))
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
