"""Acceptance of models that do not fit into memory: each reads given texts once, layer by layer.

A model that is streamed cannot write: every token would read all its weights from the disk. So the
texts come from elsewhere, and `GivenTexts.source` says from where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.shape import read_shape
from toolkit.config.schema import DeploymentConfig, TorchEngineConfig
from toolkit.errors import UsageError
from toolkit.interfaces import Progress
from toolkit.pipeline.machine import usable_cores
from toolkit.records.build import QuantizedCheckpoint
from toolkit.rounding import duration, size
from toolkit.words import Device, TextSource

if TYPE_CHECKING:
    from toolkit.advise.observe import LogitsOf, Text
    from toolkit.advise.stage import GivenTexts
    from toolkit.plan.streamed import StreamedPass
    from toolkit.speculative.text import TextCodec

__all__ = [
    "StreamedModels",
    "all_texts",
    "evenly",
    "given_texts",
    "judged_texts",
    "number_of_texts",
]

Ids = tuple[int, ...]

# Of text without a prompt, so many tokens stand for one.
PROMPT_TOKENS = 32
# The target's arithmetic takes no more than this, by the estimate, but for the least texts.
COMPUTE_S = 3600.0
MIN_TEXTS = 8


class StreamedModels:
    """Reads a fixed set of texts through any checkpoint, each checkpoint once."""

    def __init__(
        self, texts: Sequence[Ids], engine: TorchEngineConfig, folder: Path, progress: Progress
    ) -> None:
        """texts: token ids. engine: says in which dtype and with how many threads to compute.
        folder: keeps what is finished for the next run, if this one is killed.
        """
        self._texts, self._dtype, self._device = texts, engine.dtype, _device(engine)
        self._threads, self._folder, self._progress = engine.threads, folder, progress
        self._streamed: dict[Path, LogitsOf] = {}

    def logits_of(self, checkpoint: QuantizedCheckpoint) -> LogitsOf:
        """The checkpoint's model, which knows the texts. Raises CheckpointError."""
        path = checkpoint.path
        if path not in self._streamed:
            self._streamed[path] = self._stream(checkpoint)
        return self._streamed[path]

    def _stream(self, checkpoint: QuantizedCheckpoint) -> LogitsOf:
        import torch

        from toolkit.engines.embedded.streamed import stream_texts

        if self._threads is not None:
            torch.set_num_threads(self._threads)
        what = f"{checkpoint.role} {checkpoint.quant_algo or 'NO_QUANT'}"
        self._progress(0, None, f"{what}: {self._estimate(checkpoint)}")
        streamed = stream_texts(
            checkpoint.path,
            self._texts,
            dtype=self._dtype,
            device=self._device,
            state=self._folder / f"{len(self._streamed)}.safetensors",
            progress=self._progress,
            what=what,
        )

        def logits_of(text: Text) -> Iterator[Any]:
            return streamed.logits(_read(text), len(text.prompt))

        return logits_of

    def _estimate(self, checkpoint: QuantizedCheckpoint) -> str:
        """What a pass will take, in words."""
        from toolkit.plan.streamed import streamed_bytes

        tokens = sum(map(len, self._texts))
        expected = _pass(checkpoint, tokens, self._device)
        memory = streamed_bytes(
            read_shape(checkpoint.path), checkpoint.quant_algo or "NO_QUANT", self._dtype
        )
        return (
            f"reading {len(self._texts)} texts of {tokens:,} tokens, one layer at a time:"
            f" {size(expected.bytes_read)} from the disk and {expected.flops / 1e12:,.1f} TFLOP,"
            f" some {duration(expected.seconds)} (rates assumed); takes {size(memory)} of memory"
        )


def _pass(checkpoint: QuantizedCheckpoint, tokens: int, device: Device) -> StreamedPass:
    from toolkit.plan.streamed import streamed_pass

    shape, algo = read_shape(checkpoint.path), checkpoint.quant_algo or "NO_QUANT"
    return streamed_pass(shape, algo, tokens=tokens, device=device, cores=usable_cores())


def _device(engine: TorchEngineConfig) -> Device:
    import torch

    return "cuda" if engine.device != "cpu" and torch.cuda.is_available() else "cpu"


def _read(text: Text) -> Ids:
    """The tokens that a model has to read to choose every output token."""
    return (*text.prompt, *text.output[:-1])


def all_texts(given: GivenTexts, heldout: Sequence[Sequence[int]] = ()) -> list[Ids]:
    """Everything that a model is asked about: the given texts, and held-out texts whose every token
    but the first is judged.
    """
    return [*map(_read, given.texts), *(tuple(ids[:-1]) for ids in heldout)]


def given_texts(
    config: DeploymentConfig, engine: TorchEngineConfig, codec: TextCodec
) -> GivenTexts:
    """All texts that there are to observe acceptance on: the completions that the prompt file has
    beside its prompts; else held-out text; else, without calibration text, the prompts.

    Raises UsageError if none is long enough.
    """
    from toolkit.advise.stage import GivenTexts
    from toolkit.pipeline.texts import PROMPT_KEYS, read_texts
    from toolkit.quantize.calibrate import split_texts

    validation = config.validation
    completions = _completions(config, engine, codec)
    if completions:
        return GivenTexts(completions, "completions")
    source: TextSource = "prompts" if config.calibration is None else "held-out text"
    if config.calibration is None:
        chat, limit = config.target.checkpoint, validation.max_prompts
        texts = read_texts(validation.prompts, *PROMPT_KEYS, limit=limit, chat=chat)
    else:
        texts = split_texts(config.calibration, config.target.checkpoint)[1]
    encoded = [codec.encode(text)[: engine.max_seq_len] for text in texts]
    given = GivenTexts(_continued(encoded, validation.max_tokens), source)
    if not given.texts:
        raise UsageError(
            "no text is long enough to measure acceptance on",
            where=validation.prompts,
            hint="Give its lines a `completion`: what the target wrote after the prompt.",
        )
    return given


def judged_texts(given: GivenTexts, heldout: Sequence[Sequence[int]], max_tokens: int) -> list[Ids]:
    """The held-out texts on which targets are compared, as many and as long as the given texts; the
    given texts themselves, if they are held out.
    """
    if given.source == "held-out text":
        return [(*text.prompt, *text.output) for text in given.texts]
    cut = (tuple(ids[: PROMPT_TOKENS + max_tokens]) for ids in heldout)
    return [ids for ids, _ in zip(cut, given.texts, strict=False)]


def _completions(
    config: DeploymentConfig, engine: TorchEngineConfig, codec: TextCodec
) -> list[Text]:
    from toolkit.advise.observe import Text
    from toolkit.pipeline.rows import read_rows
    from toolkit.pipeline.texts import PROMPT_KEYS, Writer

    validation, write = config.validation, Writer(config.target.checkpoint).text
    texts = []
    for row in read_rows(validation.prompts, *PROMPT_KEYS, limit=validation.max_prompts):
        prompt, completion, domain = write(row), row.completion, row.domain
        before, ids = codec.encode(prompt), codec.encode(prompt + completion)
        # A token may reach over the end of the prompt; it then counts as written.
        pairs = zip(before, ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        output = tuple(ids[same : same + validation.max_tokens])
        if completion and 0 < same <= engine.max_input_len and len(output) > 1:
            texts.append(Text(domain, tuple(ids[:same]), output, validation.max_tokens))
    return texts


def _continued(encoded: Sequence[Sequence[int]], max_tokens: int) -> list[Text]:
    """Texts whose first tokens stand for the prompt, and the next ones for what is written."""
    from toolkit.advise.observe import Text

    texts = []
    for ids in encoded:
        first = min(PROMPT_TOKENS, max(1, len(ids) // 4))
        output = tuple(ids[first : first + max_tokens])
        if len(output) > 1:
            texts.append(Text("all", tuple(ids[:first]), output, max_tokens))
    return texts


def number_of_texts(
    checkpoint: QuantizedCheckpoint, texts: Sequence[Ids], engine: TorchEngineConfig
) -> int:
    """How many of the texts can be read in COMPUTE_S by the estimate; MIN_TEXTS at least."""
    device = _device(engine)
    of_weights_s = _pass(checkpoint, 0, device).seconds
    computing_s = _pass(checkpoint, sum(map(len, texts)), device).seconds - of_weights_s
    return min(len(texts), max(MIN_TEXTS, int(len(texts) * COMPUTE_S / computing_s)))


def evenly(given: GivenTexts, count: int) -> GivenTexts:
    """So many of the texts, from all parts of the file."""
    total = len(given.texts)
    return replace(given, texts=[given.texts[i * total // count] for i in range(count)])
