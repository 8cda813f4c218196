"""Measure how far the quantized model is from its source, on text that it was not calibrated on.

Source and quantized model are run over the same tokens, batch by batch, in one copy of the model:
first switched to its source, then quantized. Only the activations of one batch are held at a time.
Errors are end to end: the error of a layer includes the errors of all layers before it.
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
from toolkit.resampling import bootstrap_ratio_of_sums

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAX_TOKENS", "measure", "take_tokens"]

MAX_TOKENS = 16_384  # of held-out text; p99 then rests on 164 tokens
LAYER_TOKENS = 512  # of these, for the cost of each single layer; held once per layer
LOGIT_TOKENS = 256  # tokens whose logits are held at a time

T = TypeVar("T", "list[int]", "Tensor")


def take_tokens(sequences: list[T], limit: int = MAX_TOKENS) -> list[T]:
    """The first sequences, up to `limit` tokens in total, but at least one sequence."""
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

    The error of a layer is ||quantized - source|| / ||source|| (Frobenius) over all tokens of a
    linear's output. KL, agreement and perplexity are taken over the positions that have a next
    token in the text. Softmaxes are float32. The cost of each single decoder layer is measured on
    the first LAYER_TOKENS tokens.
    """
    import torch

    layers = _LayerErrors(quantized_linears(model))
    divergences: list[Tensor] = []
    agreements: list[Tensor] = []
    lengths: list[int] = []  # positions of each text
    tokens, source_nll, quantized_nll = 0, 0.0, 0.0
    with torch.no_grad():
        for done, batch in enumerate(batches, start=1):
            with as_source(model, source), layers.watch(layers.keep):
                reference = model.model(input_ids=batch, use_cache=False).last_hidden_state
            with layers.watch(layers.compare):
                hidden = model.model(input_ids=batch, use_cache=False).last_hidden_state
            following = batch[:, 1:].reshape(-1)  # [n * (length - 1)]
            reference = reference[:, :-1].reshape(len(following), -1)
            hidden = hidden[:, :-1].reshape(len(following), -1)
            for start in range(0, len(following), LOGIT_TOKENS):
                part = slice(start, start + LOGIT_TOKENS)
                # log-probabilities [LOGIT_TOKENS, vocab] of the source and of the quantized model
                source_log = torch.log_softmax(model.lm_head(reference[part]).float(), dim=-1)
                quantized_log = torch.log_softmax(model.lm_head(hidden[part]).float(), dim=-1)
                kl_terms = source_log.exp() * (source_log - quantized_log)
                divergences.append(kl_terms.sum(dim=-1).clamp_min(0.0))
                agreements.append(source_log.argmax(dim=-1) == quantized_log.argmax(dim=-1))
                column = following[part, None]
                source_nll -= float(source_log.gather(1, column).double().sum())
                quantized_nll -= float(quantized_log.gather(1, column).double().sum())
            tokens += len(following)
            lengths += [batch.shape[1] - 1] * len(batch)
            progress(done, len(batches), "measuring quality, batches")
    kl = torch.cat(divergences).double()
    agreeing = torch.cat(agreements)
    layer_rows = take_tokens([row for batch in batches for row in batch], LAYER_TOKENS)
    return QuantizationQuality(
        tokens=tokens,
        kl_mean=float(kl.mean()),
        kl_p99=float(torch.quantile(kl, 0.99)),
        top1_agreement=int(agreeing.sum()) / tokens,
        source_perplexity=_exp(source_nll / tokens),
        quantized_perplexity=_exp(quantized_nll / tokens),
        layers=layers.result(),
        layer_kl=measure_single_layers(model, source, [row[None] for row in layer_rows], progress),
        layer_kl_tokens=sum(len(row) - 1 for row in layer_rows),
        texts=len(lengths),
        kl_interval=_interval(kl, lengths),
        top1_interval=_interval(agreeing.double(), lengths),
    )


def _interval(values: Tensor, lengths: list[int]) -> tuple[float, float]:
    """The interval of the mean of values [tokens], whose texts have these lengths."""
    import torch

    sums = [float(part.sum()) for part in torch.split(values, lengths)]
    _, low, high = bootstrap_ratio_of_sums(sums, lengths)
    return low, high


def _exp(value: float) -> float:
    import math

    return math.exp(min(value, 700.0))  # exp(710) overflows a float


class _LayerErrors:
    """Sums of squares per linear, gathered by forward hooks: `keep` during the source's pass,
    `compare` during the quantized pass.
    """

    def __init__(self, linears: dict[str, Any]) -> None:
        self._linears = linears
        self._kept: dict[str, Tensor] = {}
        self._error = dict.fromkeys(linears, 0.0)
        self._norm = dict.fromkeys(linears, 0.0)

    def keep(self, name: str, _module: Any, _inputs: Any, output: Tensor) -> None:
        # The outputs of all linears for one batch are more than a GPU has to spare.
        self._kept[name] = output.cpu()

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
        return tuple(LayerError(name, self._relative_error(name)) for name in self._linears)

    def _relative_error(self, name: str) -> float:
        if not self._norm[name]:
            return 0.0
        return float((self._error[name] / self._norm[name]) ** 0.5)


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
