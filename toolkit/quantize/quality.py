"""How far the quantized model is from its source, on text that it was not calibrated on.

Both are run over the same tokens, batch by batch, in one copy of the model: as its own source
first, then quantized. What is held at any time is one batch's activations. Errors are end to end: a
layer's figure contains what the layers before it lost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.interfaces import Progress
from toolkit.quantize.modelopt import as_source, quantized_linears
from toolkit.quantize.single_layers import measure_single_layers
from toolkit.quantize.source import Source
from toolkit.records.build import LayerError, QuantizationQuality

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAX_TOKENS", "measure", "take_tokens"]

MAX_TOKENS = 16_384  # of held-out text: p99 then rests on 164 tokens
LAYER_TOKENS = 512  # of it, for what each layer alone costs: held once for every layer
CHUNK = 256  # tokens whose logits are held at a time

T = TypeVar("T", "list[int]", "Tensor")


def take_tokens(sequences: list[T], limit: int = MAX_TOKENS) -> list[T]:
    """The first sequences, up to `limit` tokens in all (one at least)."""
    taken: list[T] = []
    for ids in sequences:
        if taken and sum(map(len, taken)) + len(ids) > limit:
            break
        taken.append(ids[:limit])
    return taken


def measure(
    model: Any, source: Source, batches: list[Tensor], progress: Progress
) -> QuantizationQuality:
    """Run `batches` ([n, length] int64) through source and quantized model, teacher-forced.

    Layer errors are ||quantized - source|| / ||source|| (Frobenius) over all tokens of a linear's
    output. KL, agreement and perplexity are over the positions that have a next token in the text.
    Softmaxes are float32. What each decoder layer alone costs is measured on the first
    LAYER_TOKENS.
    """
    import torch

    layers = _LayerErrors(quantized_linears(model))
    divergences: list[Tensor] = []
    agreeing, tokens, source_nll, quantized_nll = 0, 0, 0.0, 0.0
    with torch.no_grad():
        for done, batch in enumerate(batches, start=1):
            with as_source(model, source), layers.watch(layers.keep):
                reference = model.model(input_ids=batch, use_cache=False).last_hidden_state
            with layers.watch(layers.compare):
                hidden = model.model(input_ids=batch, use_cache=False).last_hidden_state
            following = batch[:, 1:].reshape(-1)  # [n * (length - 1)]
            reference = reference[:, :-1].reshape(len(following), -1)
            hidden = hidden[:, :-1].reshape(len(following), -1)
            for start in range(0, len(following), CHUNK):
                part = slice(start, start + CHUNK)
                wanted = torch.log_softmax(
                    model.lm_head(reference[part]).float(), dim=-1
                )  # [chunk, vocab]
                given = torch.log_softmax(model.lm_head(hidden[part]).float(), dim=-1)
                divergences.append((wanted.exp() * (wanted - given)).sum(dim=-1).clamp_min(0.0))
                agreeing += int((wanted.argmax(dim=-1) == given.argmax(dim=-1)).sum())
                column = following[part, None]
                source_nll -= float(wanted.gather(1, column).double().sum())
                quantized_nll -= float(given.gather(1, column).double().sum())
            tokens += len(following)
            progress(done, len(batches), "measuring quality, batches")
    kl = torch.cat(divergences).double()
    few = take_tokens([row for batch in batches for row in batch], LAYER_TOKENS)
    return QuantizationQuality(
        tokens=tokens,
        kl_mean=float(kl.mean()),
        kl_p99=float(torch.quantile(kl, 0.99)),
        top1_agreement=agreeing / tokens,
        source_perplexity=_exp(source_nll / tokens),
        quantized_perplexity=_exp(quantized_nll / tokens),
        layers=layers.result(),
        layer_kl=measure_single_layers(model, source, [row[None] for row in few], progress),
        layer_kl_tokens=sum(len(row) - 1 for row in few),
    )


def _exp(value: float) -> float:
    import math

    return math.exp(min(value, 700.0))  # exp(710) overflows a float


class _LayerErrors:
    """Sums of squares per linear, gathered by forward hooks: `keep` in the source's pass,
    `compare` in the quantized one.
    """

    def __init__(self, linears: dict[str, Any]) -> None:
        self._linears = linears
        self._kept: dict[str, Tensor] = {}
        self._error = dict.fromkeys(linears, 0.0)
        self._norm = dict.fromkeys(linears, 0.0)

    def keep(self, name: str, _module: Any, _inputs: Any, output: Tensor) -> None:
        self._kept[name] = (
            output.cpu()
        )  # one batch of all linears' outputs is more than a GPU has to spare

    def compare(self, name: str, _module: Any, _inputs: Any, output: Tensor) -> None:
        reference = self._kept.pop(name).to(output.device).float()
        self._error[name] += float((output.float() - reference).square().sum(dtype=_float64()))
        self._norm[name] += float(reference.square().sum(dtype=_float64()))

    def watch(self, hook: Callable[..., None]) -> _Hooks:
        return _Hooks(
            [
                module.register_forward_hook(partial(hook, name))
                for name, module in self._linears.items()
            ]
        )

    def result(self) -> tuple[LayerError, ...]:
        return tuple(
            LayerError(
                name, (self._error[name] / self._norm[name]) ** 0.5 if self._norm[name] else 0.0
            )
            for name in self._linears
        )


class _Hooks:
    """Removes hooks at the end of a with block."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def _float64() -> Any:
    import torch

    return torch.float64
