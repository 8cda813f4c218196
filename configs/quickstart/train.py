"""Train the quickstart pair: a small Python-writing target and a draft distilled from it, on a CPU,
in about an hour.

The idea: speculative decoding can be shown on any machine if target and draft are real language
models that agree with each other. So both are Llama-shaped, share one 2048-token byte-level BPE,
and learn from the only corpus every reader of this file already has: the standard library's own
sources. The target learns text; the draft learns the target, first along that text and then along
what the target itself writes, with a loss that ends as one minus the acceptance rate.

    python configs/quickstart/train.py all --out DIR

runs `tokenizer`, `target`, `draft`, `prompts` and `measure` in that order; each can be run alone
and continues from its last checkpoint under `--work`. The script keeps no text it was trained on:
only weights, a tokenizer and sampled text. It does not quantize, compile or serve: that is what the
toolkit is for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import re
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

VOCAB_SIZE = 2048
BOS, EOS = 0, 1
BOS_TEXT, EOS_TEXT = "<|begin_of_text|>", "<|end_of_text|>"
MAX_POSITIONS = 1024
HEAD_DIM = 32
ROPE_THETA = 10000.0
NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    """What tells the target from the draft; everything else about the two is the same."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int


TARGET = Shape(hidden=192, layers=28, heads=6, kv_heads=2, intermediate=448)
DRAFT = Shape(hidden=192, layers=2, heads=6, kv_heads=2, intermediate=448)
SHAPES = {"target": TARGET, "draft": DRAFT}
WRITTEN_PROMPTS = Path(__file__).parent / "written_prompts.txt"
MEASURED = (0.0, 0.8, 1.0)


# --- model
# --------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; parameter names are those of transformers'
    Llama.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.groups = shape.heads // shape.kv_heads
        self.q_proj = nn.Linear(shape.hidden, shape.heads * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(shape.heads * HEAD_DIM, shape.hidden, bias=False)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: Tensor | None, start: int
    ) -> Tensor:
        """x [batch, length, hidden]; cache [2, batch, kv_heads, capacity, HEAD_DIM], filled up to
        `start`.

        More than one token is taken to begin at position 0.
        """
        batch, length, _ = x.shape
        q = rotate(self.q_proj(x).view(batch, length, -1, HEAD_DIM).transpose(1, 2), rotary)
        k = rotate(self.k_proj(x).view(batch, length, -1, HEAD_DIM).transpose(1, 2), rotary)
        v = self.v_proj(x).view(batch, length, -1, HEAD_DIM).transpose(1, 2)
        if cache is not None:
            cache[0, :, :, start : start + length] = k
            cache[1, :, :, start : start + length] = v
            k, v = cache[0, :, :, : start + length], cache[1, :, :, : start + length]
        if (
            length == 1
        ):  # a lone token sees everything, so the heads of a group are as good as a row of queries
            out = F.scaled_dot_product_attention(q.view(batch, -1, self.groups, HEAD_DIM), k, v)
            return self.o_proj(out.reshape(batch, 1, -1))
        k, v = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.mlp = MLP(shape)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: Tensor | None, start: int
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, cache, start)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A plain Llama with tied embeddings: small enough to read, and fast to train because
    nothing else is in the way.
    """

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        angles = torch.outer(
            torch.arange(MAX_POSITIONS), ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        )
        angles = torch.cat([angles, angles], dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                shrink = (
                    math.sqrt(2 * shape.layers)
                    if name.endswith(("o_proj.weight", "down_proj.weight"))
                    else 1.0
                )
                nn.init.normal_(parameter, std=0.02 / shrink, generator=generator)

    def forward(self, tokens: Tensor, cache: list[Tensor] | None = None, start: int = 0) -> Tensor:
        """tokens [batch, length] int64 at positions start, start + 1, ... -> logits [batch,
        length, vocab].
        """
        x = self.embed_tokens(tokens)
        rotary = (
            self.cos[start : start + tokens.shape[1]],
            self.sin[start : start + tokens.shape[1]],
        )
        for index, layer in enumerate(self.layers):
            x = layer(x, rotary, None if cache is None else cache[index], start)
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def new_cache(self, batch: int, length: int) -> list[Tensor]:
        """One [2, batch, kv_heads, length, HEAD_DIM] buffer a layer, in the model's dtype."""
        dtype = self.embed_tokens.weight.dtype
        return [
            torch.zeros(2, batch, self.shape.kv_heads, length, HEAD_DIM, dtype=dtype)
            for _ in self.layers
        ]


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding in the half-split layout that Llama checkpoints use; x [batch, heads,
    length, HEAD_DIM].
    """
    cos, sin = rotary[0].to(x.dtype), rotary[1].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


# --- text
# --------------------------------------------------------------------------------------------------


def read_sources(folders: list[Path]) -> dict[str, str]:
    """Every UTF-8 Python file below the folders, by relative name; a third of the tests, and no
    tables of characters.
    """
    texts = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder).as_posix()
            if "site-packages" in name or name.startswith(("encodings/", "pydoc_data/")):
                continue
            if "test" in Path(name).parts[:-1] and name_hash(name) % 3:
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if text.strip() and not name.endswith(("topics.py", "_data.py")):
                texts[name] = text
    return texts


def name_hash(name: str) -> int:
    """A number that depends on the name alone, so that a split stays the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def is_heldout(name: str) -> bool:
    """About one module in thirty is kept for validation."""
    return name_hash("heldout/" + name) % 30 == 0


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE of VOCAB_SIZE tokens, specials first; a leading BOS comes from the
    template, as in Llama 3.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS_TEXT, EOS_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    template = processors.TemplateProcessing(
        single=f"{BOS_TEXT} $A",
        pair=f"{BOS_TEXT} $A {BOS_TEXT} $B",
        special_tokens=[(BOS_TEXT, BOS)],
    )
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), template]
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """The three files that both transformers and tokenizers read."""
    folder.mkdir(parents=True, exist_ok=True)
    specials = {"bos_token": BOS_TEXT, "eos_token": EOS_TEXT, "pad_token": EOS_TEXT}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        **specials,
    }
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=False))
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "special_tokens_map.json", specials)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens of all files in one row, each file BOS ... EOS, and where a top-level block begins."""

    tokens: Tensor  # [n] int64
    starts: Tensor  # [blocks] int64

    def batch(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """[rows, length + 1] int64: BOS, then text from a block's beginning (half the rows) or from
        anywhere.

        Beginning anywhere with a BOS is what makes the model continue a lone function or class as
        readily as a file.
        """
        anywhere = torch.randint(len(self.tokens) - length, (rows,), generator=generator)
        block = self.starts[torch.randint(len(self.starts), (rows,), generator=generator)]
        offsets = torch.where(torch.rand(rows, generator=generator) < 0.5, anywhere, block)
        offsets = offsets.clamp(max=len(self.tokens) - length)
        rows_of_text = self.tokens[offsets[:, None] + torch.arange(length)]
        return torch.cat([torch.full((rows, 1), BOS), rows_of_text], dim=1)


def encode_corpus(tokenizer: Tokenizer, texts: list[str]) -> Corpus:
    """Tokenise block by block: top-level definitions are what two or more blank lines separate."""
    tokens: list[int] = []
    starts: list[int] = []
    for text in texts:
        tokens.append(BOS)
        blocks = re.split(r"(?<=\n)\n\n(?=\S)", text)
        blocks = [block + "\n\n" for block in blocks[:-1]] + blocks[-1:]
        for encoding in tokenizer.encode_batch(blocks, add_special_tokens=False):
            starts.append(len(tokens))
            tokens.extend(encoding.ids)
        tokens.append(EOS)
    return Corpus(torch.tensor(tokens), torch.tensor(starts))


def load_corpora(args: argparse.Namespace) -> tuple[Tokenizer, Corpus, Corpus]:
    """The tokenizer on disk, and the training and held-out text encoded with it."""
    tokenizer = Tokenizer.from_file(str(args.out / "target" / "tokenizer.json"))
    texts = read_sources(args.source)
    training = encode_corpus(
        tokenizer, [text for name, text in texts.items() if not is_heldout(name)]
    )
    heldout = encode_corpus(tokenizer, [text for name, text in texts.items() if is_heldout(name)])
    print(f"corpus: {len(training.tokens):,} training tokens, {len(heldout.tokens):,} held out")
    return tokenizer, training, heldout


# --- files
# --------------------------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    """Whole or not at all: written beside its place, then renamed into it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_json(path: Path, value: object) -> None:
    """Indented JSON with a final newline."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_jsonl(path: Path, lines: list[dict[str, str]]) -> None:
    """One JSON object a line."""
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def write_model(model: Llama, folder: Path) -> None:
    """A checkpoint that transformers reads: BF16 safetensors, config.json and
    generation_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD_DIM,
        "intermediate_size": shape.intermediate,
        "hidden_act": "silu",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "use_cache": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }
    tensors = {
        f"model.{name}": value.to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    temporary = folder / ".model.safetensors.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(folder / "model.safetensors")
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": EOS,
            "do_sample": False,
            "max_length": MAX_POSITIONS,
        },
    )


def read_model(folder: Path, shape: Shape) -> Llama:
    """The checkpoint's weights, widened to float32."""
    model = Llama(shape)
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict(
        {name.removeprefix("model."): value.float() for name, value in tensors.items()}
    )
    return model.eval()


# --- training
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Budget:
    """Training ends when either bound is reached; the schedule follows whichever is nearer."""

    steps: int
    minutes: float

    def progress(self, step: int, seconds: float) -> float:
        """0 at the beginning, 1 at the end."""
        return min(1.0, max(step / self.steps, seconds / 60 / self.minutes))


def learning_rate(peak: float, step: int, progress: float) -> float:
    """Warm up for 100 steps, hold, and fall linearly to zero over the last 40 %."""
    return peak * min(1.0, (step + 1) / 100, max(0.0, 1 - progress) / 0.4)


def fit(
    model: Llama,
    loss_at: Callable[[float, torch.Generator], Tensor],
    budget: Budget,
    *,
    peak: float,
    seed: int,
    checkpoint: Path,
    on_save: Callable[[], None],
) -> None:
    """AdamW on `loss_at(progress, generator)`, saved to `checkpoint` every two minutes and
    continued from there.
    """
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(seed)
    step, seconds = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"])
        step, seconds = state["step"], state["seconds"]

    def save() -> None:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "seconds": seconds,
        }
        temporary = checkpoint.with_suffix(".tmp")
        torch.save({**state, "generator": generator.get_state()}, temporary)
        temporary.replace(checkpoint)
        on_save()

    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    average, last_save = None, seconds
    while (progress := budget.progress(step, seconds)) < 1:
        began = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(peak, step, progress)
        loss = loss_at(progress, generator)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
        step, seconds = step + 1, seconds + time.monotonic() - began
        if step % 25 == 0:
            print(
                f"step {step} {seconds:.0f}s progress {progress:.3f} loss {average:.4f}", flush=True
            )
        if seconds - last_save > 120:
            save()
            last_save = seconds
    save()


def length_at(progress: float) -> int:
    """Short rows are cheap and come first; the last sixth teaches every position there is."""
    return 256 if progress < 0.84 else MAX_POSITIONS


def train_target(args: argparse.Namespace) -> None:
    """Next-token cross-entropy on the training text."""
    _, training, heldout = load_corpora(args)
    model = Llama(TARGET, seed=args.seed)

    @torch.compile(dynamic=False)
    def text_loss(rows: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(rows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    def loss_at(progress: float, generator: torch.Generator) -> Tensor:
        length = length_at(progress)
        return text_loss(training.batch(args.batch_tokens // length, length, generator))

    def save() -> None:
        write_model(model, args.out / "target")
        print(f"held-out loss {heldout_loss(model, heldout):.4f}", flush=True)

    budget = Budget(args.steps or 4000, args.minutes)
    fit(
        model,
        loss_at,
        budget,
        peak=2e-3,
        seed=args.seed,
        checkpoint=args.work / "target.pt",
        on_save=save,
    )


@torch.no_grad()
def heldout_loss(model: Llama, corpus: Corpus, rows: int = 64, length: int = 256) -> float:
    """Mean cross-entropy in nats a token over fixed rows of the corpus."""
    batch = corpus.batch(rows, length, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()).item()


# --- sampling and acceptance
# --------------------------------------------------------------------------------------------------


@torch.no_grad()
def continuations(
    model: Llama,
    prompts: list[list[int]],
    new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> Tensor:
    """Continue every prompt in one batch -> [prompts, longest + new_tokens] int64, greedily at
    temperature 0.

    The shortest prompt's length is prefilled; longer prompts are fed on while the others already
    write. What follows an EOS is written too: the caller decides whether it counts.
    """
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    rows = torch.full((len(prompts), longest + new_tokens), -1)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    cache = model.new_cache(*rows.shape)
    logits = model(rows[:, :shortest], cache, 0)[:, -1]
    for position in range(shortest, rows.shape[1]):
        if temperature == 0:
            choice = logits.argmax(-1)
        else:
            below = (logits.float() / temperature).softmax(-1).cumsum(-1)
            drawn = below[:, -1:] * torch.rand(len(prompts), 1, generator=generator)
            choice = torch.searchsorted(below, drawn)[:, 0].clamp(max=VOCAB_SIZE - 1)
        rows[:, position] = torch.where(rows[:, position] < 0, choice, rows[:, position])
        if position + 1 < rows.shape[1]:
            logits = model(rows[:, position : position + 1], cache, position)[:, 0]
    return rows


def written_mask(rows: Tensor, prompts: list[list[int]], new_tokens: int) -> Tensor:
    """True where the model wrote: after the prompt, up to `new_tokens` of them and the first EOS
    among them.
    """
    position = torch.arange(rows.shape[1])
    begin = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    written = (position >= begin) & (position < begin + new_tokens)
    ends = ((rows == EOS) & written).int().cumsum(1)
    return written & ((ends == 0) | ((ends == 1) & (rows == EOS)))


def distinct_4grams(tokens: list[int]) -> float:
    """Share of the 4-grams that differ; a text that loops is near 0."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(set(grams)) / max(1, len(grams))


@torch.no_grad()
def acceptance_by_token(target: Llama, draft: Llama, rows: Tensor, temperature: float) -> Tensor:
    """The chance that the draft's token for rows[:, i + 1] is kept -> [rows, length - 1] float32.

    At temperature 0 it is 1 where the draft's first choice is the token the target wrote; above it
    is sum(min(target_probs, draft_probs)), which is what speculative sampling keeps on average
    (Leviathan et al. 2023, 3.3).
    """
    kept = []
    for part in rows.split(16):
        draft_logits = draft(part[:, :-1]).float()
        if temperature == 0:
            kept.append((draft_logits.argmax(-1) == part[:, 1:]).float())
        else:
            target_probs = (target(part[:, :-1]).float() / temperature).softmax(-1)
            kept.append(
                torch.minimum(target_probs, (draft_logits / temperature).softmax(-1)).sum(-1)
            )
    return torch.cat(kept)


# --- distillation
# --------------------------------------------------------------------------------------------------

POOL_BATCH = 512
POOL_LENGTH = 256
CORPUS, LONG = "corpus", "long"
# What the pool is made of: the share of each part of it. A number is the temperature the target
# wrote it at; the coldest stands in for greedy text, which has no gradient at its argmax and too
# soon repeats itself. The long rows teach every position there is.
MIXTURE = {CORPUS: 0.2, LONG: 0.05, "1.0": 0.2, "0.8": 0.3, "0.4": 0.25}


@dataclass(frozen=True, slots=True)
class Distillation:
    """How a draft is trained. mixture: what a batch is made of. peak: the learning rate. tv_weight
    of the loss at a progress from 0 to 1.
    """

    mixture: dict[str, float]
    peak: float
    tv_weight: Callable[[float], float]


FIRST = Distillation(MIXTURE, 1.5e-3, lambda progress: 0.9 * min(1, max(0, progress - 0.3) / 0.2))
# From trained weights, with more of what is measured.
FURTHER = Distillation(
    {CORPUS: 0.1, LONG: 0.05, "1.0": 0.2, "0.8": 0.35, "0.4": 0.3}, 8e-4, lambda _: 0.9
)


def write_pool(
    target: Llama, corpus: Corpus, size: int, seed: int, path: Path
) -> dict[str, Tensor]:
    """About `size` rows of text to distil along, by part of the mixture, each [rows, length + 1]
    int16, kept in `path`.

    A row of the target's own continues a few tokens of the corpus. Rows that loop early are
    dropped: they teach one token many times.
    """
    if path.exists():
        return torch.load(path, weights_only=True)
    generator = torch.Generator().manual_seed(seed)
    pool: dict[str, Tensor] = {}
    for part, share in MIXTURE.items():
        wanted = round(size * share)
        if part in (CORPUS, LONG):
            length = MAX_POSITIONS if part == LONG else POOL_LENGTH
            pool[part] = corpus.batch(
                max(1, wanted * POOL_LENGTH // length), length, generator
            ).short()
            continue
        kept = []
        for done in range(0, wanted, POOL_BATCH):
            length = int(torch.randint(4, 64, (1,), generator=generator))
            prompts = corpus.batch(min(POOL_BATCH, wanted - done), length, generator)[
                :, :-1
            ].tolist()
            rows = continuations(target, prompts, POOL_LENGTH + 1 - length, float(part), generator)
            varied = [distinct_4grams(row[: POOL_LENGTH // 2].tolist()) >= 0.5 for row in rows]
            kept.append(rows[torch.tensor(varied)].short())
        pool[part] = torch.cat(kept)
        print(f"pool at temperature {part}: {len(pool[part])} rows", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(pool, path)
    return pool


@torch.no_grad()
def teach(target: Llama, rows: Tensor) -> Tensor:
    """What the target says along the rows [rows, length + 1] -> logits [rows, length, vocab]
    float16: 1 MB a row of 256.

    Kept in memory, since every row comes up many times and the target costs several times what the
    draft does.
    """
    taught = torch.empty(len(rows), rows.shape[1] - 1, VOCAB_SIZE, dtype=torch.float16)
    per_batch = 4096 // (rows.shape[1] - 1)
    for part, into in zip(rows.split(per_batch), taught.split(per_batch), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            into.copy_(target(part[:, :-1].long()))
    return taught


def start_draft(target: Llama) -> Llama:
    """The target's embeddings and final norm around its first and last layers."""
    draft = Llama(DRAFT)
    draft.embed_tokens.load_state_dict(target.embed_tokens.state_dict())
    draft.norm.load_state_dict(target.norm.state_dict())
    for index, layer in enumerate(draft.layers):
        layer.load_state_dict(
            target.layers[index * (TARGET.layers - 1) // max(1, DRAFT.layers - 1)].state_dict()
        )
    return draft


def distillation_loss(
    target_logits: Tensor, draft_logits: Tensor, temperature: Tensor, tv_weight: Tensor
) -> Tensor:
    """KL(target || draft) at temperature 1, fading into the total variation at the text's own
    temperature.

    One minus the total variation is the acceptance rate, so the second half trains on what is to be
    measured; it says little where the two already disagree altogether, which is why the first half
    and a tenth of the second are KL.
    """
    target_log, draft_log = target_logits.log_softmax(-1), draft_logits.log_softmax(-1)
    kl = (target_log.exp() * (target_log - draft_log)).sum(-1).mean()
    target_probs, draft_probs = (
        (target_logits / temperature).softmax(-1),
        (draft_logits / temperature).softmax(-1),
    )
    tv = 0.5 * (target_probs - draft_probs).abs().sum(-1).mean()
    return (1 - tv_weight) * kl + tv_weight * tv


def train_draft(args: argparse.Namespace) -> None:
    """Distil the target along corpus text and along its own."""
    _, training, heldout = load_corpora(args)
    target = read_model(args.out / "target", TARGET)
    writer = read_model(
        args.out / "target", TARGET
    ).bfloat16()  # as its weights are; six times as fast as float32
    pool = write_pool(writer, training, args.pool, args.seed + 1, args.work / "pool.pt")
    check = write_pool(writer, heldout, 256, args.seed + 2, args.work / "pool_check.pt")
    taught = {part: teach(target, rows) for part, rows in pool.items()}
    print("the target's logits are at hand", flush=True)
    draft = read_model(args.start, DRAFT) if args.start else start_draft(target)
    how = FURTHER if args.start else FIRST

    @torch.compile(dynamic=False)
    def loss_on(
        rows: Tensor, target_logits: Tensor, temperature: Tensor, tv_weight: Tensor
    ) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            draft_logits = draft(rows[:, :-1])
        return distillation_loss(
            target_logits.float(), draft_logits.float(), temperature, tv_weight
        )

    def loss_at(progress: float, generator: torch.Generator) -> Tensor:
        shares = torch.tensor(list(how.mixture.values()))
        part = list(how.mixture)[int(torch.multinomial(shares, 1, generator=generator))]
        rows = pool[part]
        chosen = torch.randint(
            len(rows), (args.batch_tokens // (rows.shape[1] - 1),), generator=generator
        )
        temperature = 1.0 if part in (CORPUS, LONG) else float(part)
        return loss_on(
            rows[chosen].long(),
            taught[part][chosen],
            torch.tensor(temperature),
            torch.tensor(how.tv_weight(progress)),
        )

    def save() -> None:
        write_model(draft, args.out / "draft")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            written = {
                part: rows.long() for part, rows in check.items() if part not in (CORPUS, LONG)
            }
            alphas = {
                part: acceptance_by_token(target, draft, rows, float(part))[:, 63:]
                for part, rows in written.items()
            }
        print(
            "acceptance "
            + " ".join(f"T={part}: {alpha.mean():.3f}" for part, alpha in alphas.items()),
            flush=True,
        )

    budget = Budget(args.steps or 8000, args.minutes)
    fit(
        draft,
        loss_at,
        budget,
        peak=how.peak,
        seed=args.seed,
        checkpoint=args.work / "draft.pt",
        on_save=save,
    )


# --- prompts and calibration text
# -------------------------------------------------------------------------------------

GREEDY_TOKENS = 96
SAMPLED_PROMPTS = 192
CALIB_LINES, HELDOUT_LINES = 160, 48


def read_written(path: Path) -> list[dict[str, str]]:
    """Hand-written prompts: each begins after a line `### domain` and ends before the next."""
    parts = re.split(r"^### (\w+)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return [
        {"prompt": text.strip("\n"), "domain": domain, "source": "written"}
        for domain, text in zip(parts[::2], parts[1::2], strict=True)
    ]


def sampled_texts(target: Llama, count: int, length: int, seed: int) -> Iterator[list[int]]:
    """What the target writes from BOS alone, `length` tokens or up to an EOS; half at
    temperature 1 and half at 0.8.
    """
    generator = torch.Generator().manual_seed(seed)
    for temperature in (1.0, 0.8):
        for row in continuations(
            target, [[BOS]] * (count // 2), length, temperature, generator
        ).tolist():
            yield row[1 : row.index(EOS) if EOS in row else None]


def sampled_prompts(
    target: Llama, tokenizer: Tokenizer, count: int, seed: int
) -> Iterator[dict[str, str]]:
    """Beginnings of random length of the target's own texts that encode back to the tokens they
    came from.
    """
    lengths = random.Random(seed)
    for tokens in sampled_texts(target, count, 60, seed):
        prefix = tokens[: lengths.randint(6, 60)]
        text = tokenizer.decode(prefix)
        if len(prefix) >= 6 and tokenizer.encode(text).ids[1:] == prefix:
            yield {"prompt": text, "domain": domain_of(text), "source": "sampled"}


def domain_of(prompt: str) -> str:
    """A rough label for a prompt nobody labelled: what its first line is."""
    beginnings = {
        "def ": "function",
        "class ": "class",
        '"""': "docstring",
        "import ": "script",
        "from ": "script",
    }
    if prompt.lstrip().startswith(("def test", "class Test")):
        return "test"
    return next(
        (domain for start, domain in beginnings.items() if prompt.lstrip().startswith(start)),
        "script",
    )


def usable_prompts(
    target: Llama, tokenizer: Tokenizer, candidates: list[dict[str, str]], corpus_text: str
) -> list[dict[str, str]]:
    """Those the target continues greedily for half of GREEDY_TOKENS at least, without looping, and
    the corpus lacks.

    A small greedy model falls into loops, where any draft looks perfect; such prompts would flatter
    the numbers.
    """
    fresh = [c for c in candidates if len(c["prompt"]) <= 40 or c["prompt"] not in corpus_text]
    prompts = [tokenizer.encode(candidate["prompt"]).ids for candidate in fresh]
    rows = continuations(target, prompts, GREEDY_TOKENS, 0.0, torch.Generator())
    mask = written_mask(rows, prompts, GREEDY_TOKENS)
    texts = [row[keep].tolist() for row, keep in zip(rows, mask, strict=True)]
    return [
        candidate
        for candidate, text in zip(fresh, texts, strict=True)
        if len(text) >= GREEDY_TOKENS // 2 and distinct_4grams(text) >= 0.5
    ]


def write_prompts(args: argparse.Namespace) -> None:
    """data/: prompts for measuring, and text for calibration and for judging quantization."""
    tokenizer = Tokenizer.from_file(str(args.out / "target" / "tokenizer.json"))
    target = read_model(args.out / "target", TARGET).bfloat16()
    corpus_text = "\n".join(read_sources(args.source).values())
    written = usable_prompts(target, tokenizer, read_written(WRITTEN_PROMPTS), corpus_text)
    distinct = {
        p["prompt"]: p
        for p in sampled_prompts(target, tokenizer, 4 * SAMPLED_PROMPTS, args.seed + 3)
    }
    candidates = random.Random(args.seed).sample(list(distinct.values()), len(distinct))
    sampled = usable_prompts(target, tokenizer, candidates, corpus_text)[:SAMPLED_PROMPTS]
    prompts = [{"id": f"{p['source']}-{i:03}", **p} for i, p in enumerate(written)]
    prompts += [{"id": f"{p['source']}-{i:03}", **p} for i, p in enumerate(sampled)]
    write_jsonl(args.out / "data" / "prompts.jsonl", prompts)
    count = CALIB_LINES + HELDOUT_LINES
    long = [
        tokens
        for tokens in sampled_texts(target, 2 * count, 360, args.seed + 4)
        if len(tokens) >= 200
    ]
    texts = [
        {"text": tokenizer.decode(tokens)}
        for tokens in random.Random(args.seed).sample(long, count)
    ]
    write_jsonl(args.out / "data" / "calib.jsonl", texts[:CALIB_LINES])
    write_jsonl(args.out / "data" / "heldout.jsonl", texts[CALIB_LINES:])
    print(
        f"prompts: {len(written)} written, {len(sampled)} sampled of {len(candidates)} candidates"
    )


# --- measuring
# --------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> None:
    """Print losses, and the acceptance rate of each domain at each temperature, over
    data/prompts.jsonl.
    """
    tokenizer, training, heldout = load_corpora(args)
    target, draft = (read_model(args.out / name, shape) for name, shape in SHAPES.items())
    for name, model in (("target", target), ("draft", draft)):
        print(
            f"{name}: loss {heldout_loss(model, training):.3f} training,"
            f" {heldout_loss(model, heldout):.3f} held out"
        )
    lines = [
        json.loads(line)
        for line in (args.out / "data" / "prompts.jsonl").read_text("utf-8").splitlines()
    ]
    prompts = [tokenizer.encode(line["prompt"]).ids for line in lines]
    labels = [[line["domain"], line["source"], "all"] for line in lines]
    names = sorted({label for row in labels for label in row})
    print("| prompts | n | " + " | ".join(f"T = {temperature}" for temperature in MEASURED) + " |")
    table: dict[str, list[float]] = {name: [] for name in names}
    for temperature in MEASURED:
        rows = continuations(
            target,
            prompts,
            GREEDY_TOKENS,
            temperature,
            torch.Generator().manual_seed(args.seed + 5),
        )
        mask = written_mask(rows, prompts, GREEDY_TOKENS)[:, 1:]
        kept = acceptance_by_token(target, draft, rows, temperature)
        for name in names:
            members = torch.tensor([name in row for row in labels])
            table[name].append(kept[members][mask[members]].mean().item())
    for name, alphas in table.items():
        count = sum(name in row for row in labels)
        print(f"| {name} | {count} | " + " | ".join(f"{alpha:.3f}" for alpha in alphas) + " |")


# --- command line
# --------------------------------------------------------------------------------------------------


def make_tokenizer(args: argparse.Namespace) -> None:
    """Train the tokenizer, put it beside both models, and seed both models so that the folder
    loads at once.
    """
    texts = read_sources(args.source)
    tokenizer = train_tokenizer([text for name, text in texts.items() if not is_heldout(name)])
    for name, shape in SHAPES.items():
        write_tokenizer(tokenizer, args.out / name)
        write_model(Llama(shape, seed=args.seed), args.out / name)


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "tokenizer": make_tokenizer,
    "target": train_target,
    "draft": train_draft,
    "prompts": write_prompts,
    "measure": measure,
}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=[*COMMANDS, "all"])
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="the folder of target/, draft/ and data/; overwritten",
    )
    parser.add_argument(
        "--work", type=Path, default=Path("build/quickstart"), help="checkpoints to continue from"
    )
    parser.add_argument(
        "--source",
        type=Path,
        action="append",
        help="a folder of Python sources, repeatable; default: the stdlib's",
    )
    parser.add_argument("--steps", type=int, help="optimizer steps of one training command")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="wall-clock bound of one training command"
    )
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument(
        "--pool",
        type=int,
        default=4000,
        help="rows of 256 tokens to distil along; 1 MB of memory each",
    )
    parser.add_argument(
        "--start", type=Path, help="draft: a folder of draft weights that are trained further"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.source = args.source or [Path(sysconfig.get_path("stdlib"))]
    return args


def main() -> None:
    """Run one command, or all of them in order."""
    args = parse_args()
    for name in COMMANDS if args.command == "all" else [args.command]:
        COMMANDS[name](args)


if __name__ == "__main__":
    main()
