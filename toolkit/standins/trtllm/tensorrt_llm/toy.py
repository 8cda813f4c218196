"""The runtime behind the stand-in of `LLM`: its asynchronous interface over a toy that runs a
target, and under speculation a draft, a verify forward, acceptance by token equality and a rewind.

What it keeps to is read in TRT tensorrt_llm/llmapi and executor/result.py: arguments that
SamplingParams does not have are refused, an output object grows from step to step, `finished` says
when it is whole; and in _torch/pyexecutor/sampler.py: the log-probabilities are the target's own, a
dictionary of the likeliest tokens per place. Penalties, seeds, log-probabilities and counters are
ignored, refused or left at zero as `releases` says.

The toy counts to ten. It takes its place from the length of its cache, as a model takes positions,
and the rest of its logits from the tokens in it. At temperature 0 the text is therefore a fixed
one; above it two of its words may be others. Greedy requests whose prompts begin with TIED are
undecided at one place, by less than what a forward of several tokens rounds otherwise than one of a
single token; prompts that begin with ASTRAY have a draft that is wrong at every other place.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import random
from types import SimpleNamespace
from typing import Any

from .releases import RELEASE

TEXT = "one two three four five six seven eight nine ten"
OTHERS = {3: "vier", 6: "sieben"}  # above temperature 0 in the place of TEXT's
OTHERWISE = 0.4  # so often
WORDS = [*TEXT.split(), *OTHERS.values()]
FIRST = 100  # the id of WORDS[0]
SURE = 6.0  # the logit of the right word; others have less than 1
TIED, ASTRAY = "tied:", "astray:"
TIE, RIVAL = 4, FIRST + WORDS.index("vier")
MARGIN, ROUNDING = 0.01, 0.02  # logits
# The time of a step, so long that a busy machine adds little to it.
STEP_S = float(os.environ.get("TENSORRT_LLM_STAND_IN_STEP_S", "0.01"))
ENGINE_SEED = 42


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
    repetition_penalty: float | None = None
    logprobs: int | None = None
    return_perf_metrics: bool = False
    end_id: int | None = None

    @property
    def has_penalties(self) -> bool:
        return any((self.frequency_penalty, self.presence_penalty, self.repetition_penalty))


@dataclasses.dataclass
class Logprob:
    logprob: float
    rank: int


@dataclasses.dataclass
class Completion:
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None
    cumulative_logprob: float = -1.5
    logprobs: list[dict[int, Logprob]] | None = None
    request_perf_metrics: Any = None


class Target:
    """fault: positions (a forward of several tokens counts its places from one too many) | cache
    (a rewind is forgotten).
    """

    def __init__(self, tied: bool, fault: str | None) -> None:
        self._tied, self._fault = tied, fault
        self.cache: list[int] = []

    def forward(self, tokens: list[int]) -> list[dict[int, float]]:
        """The logits behind each of these tokens, which the cache takes in. The first forward of
        a text takes in none.
        """
        rows = []
        for token in tokens or [-1]:
            self.cache += [token] if token >= 0 else []
            place = len(self.cache) + (self._fault == "positions" and len(tokens) > 1)
            chance = random.Random(f"{self.cache[-2:]} {place}")
            logits = {FIRST + index: chance.random() for index in range(len(WORDS))}
            logits[FIRST + min(place, 9)] = SURE
            if self._tied and place == TIE:
                logits[RIVAL] = SURE - MARGIN + (ROUNDING if len(tokens) > 1 else 0.0)
            rows.append(logits)
        return rows

    def rewind(self, length: int) -> None:
        if self._fault != "cache":
            del self.cache[length:]


class Output:
    def __init__(
        self,
        prompt: str,
        params: SamplingParams,
        draft_len: int,
        step_s: float,
        fault: str | None,
        chance: random.Random,
        most_log_probs: int,
    ) -> None:
        self._draft_len, self._params = draft_len, params
        self._step_s = step_s
        self.prompt_token_ids = list(range(len(prompt.split())))
        self._log_probs = 0 if params.logprobs is None else params.logprobs
        if draft_len:
            self._log_probs = min(self._log_probs, most_log_probs)
        self.outputs = [Completion(logprobs=[] if self._log_probs else None)]
        self.finished = False
        self.avg_decoded_tokens_per_iter: float | None = None
        self._aborted = False
        self._target = Target(prompt.startswith(TIED) and not params.temperature, fault)
        self._astray = prompt.startswith(ASTRAY)
        self._ids: list[int] = []
        self._others: dict[int, int] = {}
        if params.temperature:
            drawn = [chance.random() for _ in range(min(params.max_tokens, len(TEXT.split())))]
            self._others = {
                place: FIRST + WORDS.index(word)
                for place, word in OTHERS.items()
                if place < len(drawn) and drawn[place] < OTHERWISE
            }
        self._iterations = 0

    def abort(self) -> None:
        self._aborted = True

    def aborted(self) -> bool:
        return self._aborted

    def _choose(self, logits: dict[int, float]) -> int:
        place = len(self._ids)
        token = self._others.get(place, max(logits, key=logits.__getitem__))
        self._ids.append(token)
        if self._log_probs:
            whole = math.log(sum(math.exp(value) for value in logits.values()))
            likeliest = sorted(logits, key=logits.__getitem__, reverse=True)[: self._log_probs]
            found = {
                each: Logprob(logits[each] - whole, rank) for rank, each in enumerate(likeliest, 1)
            }
            assert self.outputs[0].logprobs is not None
            self.outputs[0].logprobs.append(found)
        return token

    def _drafts(self) -> list[int]:
        """What the draft takes for the target's next words."""
        places = range(len(self._ids), len(self._ids) + self._draft_len)
        right = [self._others.get(place, FIRST + min(place, 9)) for place in places]
        return [
            FIRST if self._astray and place % 2 else token
            for place, token in zip(places, right, strict=True)
        ]

    def _forward(self) -> None:
        """One iteration: prefill, a decode forward, or a verify forward with its rewind."""
        drafts = self._drafts() if self._ids else []
        rows = self._target.forward([*self._ids[-1:], *drafts])
        before = len(self._ids)
        for row, draft in zip(rows, [*drafts, None], strict=True):
            if self._choose(row) != draft:
                break
        self._target.rewind(len(self._ids) - 1)
        del self._ids[self._params.max_tokens :]
        assert len(self._ids) > before

    async def _step(self) -> None:
        await asyncio.sleep(self._step_s)
        self._iterations += 1
        self._forward()
        completion, limit = self.outputs[0], min(self._params.max_tokens, len(TEXT.split()))
        del self._ids[limit:]
        whole = " ".join(WORDS[token - FIRST] for token in self._ids)
        end = min(
            (whole.index(word) for word in self._params.stop or () if word in whole), default=None
        )
        if end is not None:
            del self._ids[len(whole[: end + 1].split()) :]
        completion.text, completion.token_ids = whole[:end], list(self._ids)
        if completion.logprobs is not None:
            del completion.logprobs[len(self._ids) :]
        self.finished = self._aborted or end is not None or len(self._ids) == limit
        if self.finished:
            completion.finish_reason = "length" if end is None else "stop"
            self.avg_decoded_tokens_per_iter = len(self._ids) / self._iterations
            if self._params.return_perf_metrics:
                completion.request_perf_metrics = self._metrics()

    def _metrics(self) -> SimpleNamespace:
        """Of drafts, zeros where the release does not count them."""
        steps = self._iterations - 1 if RELEASE.counts_drafts else 0
        accepted = len(self._ids) - self._iterations if RELEASE.counts_drafts else 0
        drafts = SimpleNamespace(
            total_draft_tokens=steps * self._draft_len, total_accepted_draft_tokens=accepted
        )
        return SimpleNamespace(
            kv_cache_metrics=SimpleNamespace(num_reused_blocks=0, kv_cache_hit_rate=0.0),
            timing_metrics=SimpleNamespace(arrival_time=0.0),
            speculative_decoding=drafts,
        )

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


class Toy:
    """The runtime behind `LLM`. draft_len 0: without speculation. step_s: the time of a step.
    fault: as in Target. samples False: every request is answered greedily. one_model: target and
    draft are one model, whose sampler gets no logits (TRT _torch/speculative/interface.py,
    without_logits).
    """

    def __init__(
        self,
        draft_len: int,
        step_s: float = STEP_S,
        fault: str | None = None,
        *,
        samples: bool = True,
        one_model: bool = RELEASE.one_model,
    ) -> None:
        self.samples = samples
        self._one_model = one_model
        self._draft_len, self._step_s, self._fault = draft_len, step_s, fault
        self._stream = random.Random(ENGINE_SEED)

    def generate_async(
        self, prompt: str, sampling_params: SamplingParams, streaming: bool = False
    ) -> Output:
        if prompt == "refuse me":
            raise ValueError("the runtime refuses this prompt")
        if not self.samples:
            sampling_params = dataclasses.replace(sampling_params, temperature=None)
        speculates = self._draft_len > 0
        if sampling_params.has_penalties and speculates and RELEASE.one_model:
            raise ValueError("penalties need speculative_config.enable_penalty")
        seed = sampling_params.seed if RELEASE.has_seeds else None
        chance = self._stream if seed is None else random.Random(seed)
        most_log_probs = 0 if self._one_model else RELEASE.log_probs
        return Output(
            prompt,
            sampling_params,
            self._draft_len,
            self._step_s,
            self._fault,
            chance,
            most_log_probs,
        )

    def generate(self, prompts: list[Any], sampling_params: SamplingParams) -> list[Output]:
        async def finished() -> list[Output]:
            outputs = [self.generate_async(str(each), sampling_params) for each in prompts]
            return [await output.aresult() for output in outputs]

        return asyncio.run(finished())

    def shutdown(self) -> None:
        pass
