"""A stand-in for TensorRT-LLM's `LLM` in tests of our model.py: its asynchronous interface, one token a step or, with a
speculative_config, three. At temperature 0 the text is a fixed one; above it two of its words may be others.

Copied beside a served model only. What it keeps to is read in TRT tensorrt_llm/llmapi and executor/result.py: arguments
that SamplingParams does not have are refused, an output object grows from step to step, `finished` says when it is whole.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import random
from typing import Any

TEXT = "one two three four five six seven eight nine ten"
OTHERS = {3: "vier", 6: "sieben"}  # above temperature 0 in the place of TEXT's
OTHERWISE = 0.4  # so often


@dataclasses.dataclass
class SamplingParams:
    max_tokens: int = 32
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    return_perf_metrics: bool = False


@dataclasses.dataclass
class Completion:
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None
    cumulative_logprob: float = -1.5
    request_perf_metrics: Any = None


class Output:
    def __init__(self, prompt: str, params: SamplingParams, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self.prompt_token_ids = list(range(len(prompt.split())))
        self.outputs = [Completion()]
        self.finished = False
        self.avg_decoded_tokens_per_iter: float | None = None
        self._aborted = False
        self._words = TEXT.split()[: params.max_tokens]
        self._ids = list(range(100, 100 + len(self._words)))
        if params.temperature:
            chance = random.Random(params.seed)
            for place, word in OTHERS.items():
                if place < len(self._words) and chance.random() < OTHERWISE:
                    self._words[place], self._ids[place] = word, 200 + place
        whole = " ".join(self._words)
        self._end = min((whole.index(word) for word in params.stop or () if word in whole), default=None)
        if self._end is not None:
            self._words = whole[: self._end + 1].split()
        self._iterations = 0

    def abort(self) -> None:
        self._aborted = True

    def aborted(self) -> bool:
        return self._aborted

    async def _step(self) -> None:
        await asyncio.sleep(0.01)
        completion, self._iterations = self.outputs[0], self._iterations + 1
        count = min(len(self._words), len(completion.token_ids) + (1 if self._iterations == 1 else self._tokens_per_step))
        completion.text, completion.token_ids = " ".join(self._words[:count])[: self._end], self._ids[:count]
        self.finished = self._aborted or count == len(self._words)
        if self.finished:
            completion.finish_reason = "length" if self._end is None else "stop"
            self.avg_decoded_tokens_per_iter = count / self._iterations

    def __aiter__(self) -> Output:
        return self

    async def __anext__(self) -> Output:
        if self.finished:
            raise StopAsyncIteration
        await self._step()
        return self

    async def aresult(self) -> Output:
        while not self.finished:
            await self._step()
        return self


class LLM:
    def __init__(self, model: str, speculative_config: dict[str, Any] | None = None, **settings: Any) -> None:
        folders = [model] if speculative_config is None else [model, speculative_config["speculative_model"]]
        here = [folder for folder in folders if not folder.startswith("/models/")]  # not a container's
        if missing := [folder for folder in here if not pathlib.Path(folder).is_dir()]:
            raise FileNotFoundError(f"no checkpoint at {missing}")
        self._tokens_per_step = 1 if speculative_config is None else 3
        print(f"stand-in LLM: {'plain' if speculative_config is None else 'speculative'}", flush=True)

    def generate_async(self, prompt: str, sampling_params: SamplingParams, streaming: bool = False) -> Output:
        if prompt == "refuse me":
            raise ValueError("the runtime refuses this prompt")
        return Output(prompt, sampling_params, self._tokens_per_step)

    def shutdown(self) -> None:
        pass
