"""Time steps of vLLM's own server for the advisor: plain, and with every way to draft.

vLLM runs only in its server, and no request states a draft length. So a server is started for each
of a few lengths, one after the other: without speculation, with a draft model at 1 and at the
longest length, with prompt lookup at the longest. `advise/cost.py` puts the other lengths on the
line between them. A draft model served alone would not tell its share of a step: a server's step
has the work of scheduling and sending, which a drafted token does not.

A client sends waves of requests that run at the same time and end at a fixed number of tokens. A
step's time is (last token - first token) / steps, between the moment at which all requests of the
wave have their first token and the moment at which one has its last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import DeploymentConfig
from toolkit.errors import StageError
from toolkit.interfaces import Progress
from toolkit.pipeline.sources import digest_sources
from toolkit.pipeline.stage import Done, Finished
from toolkit.records.build import QuantizedCheckpoint
from toolkit.words import Drafter
from toolkit.workflows.serve_vllm import vllm_server
from toolkit.workflows.stages.keys import spec_parts

if TYPE_CHECKING:
    from toolkit.advise.cost import ServedTimes, StepCosts
    from toolkit.client import RequestTiming
    from toolkit.openai_client import OpenAiClient

__all__ = ["VllmCosts", "wave_of", "waves_of"]

ROUNDS = 6  # waves of every batch size and temperature on each server
ATTEMPTS = 4  # to let the requests of a wave run at the same time, each with twice the tokens
MIN_TOKENS = 48  # of a request, so that a step that accepts all drafts happens a few times


@dataclass(frozen=True, slots=True)
class VllmCosts:
    """Implements toolkit.workflows.stages.tune.CostsOnServer.

    target: the target's quantized checkpoint. drafts: those of the drafting methods, by name.
    """

    config: DeploymentConfig
    target: Callable[[Finished], Done]
    drafts: Callable[[Finished], Mapping[str, Done]]

    def parts(self, finished: Finished) -> Mapping[str, Any]:
        """What decides the costs, beside prompts and machine: checkpoints, arguments, the installed
        vLLM, and our own sources.
        """
        from toolkit.engines.spec import engine_spec
        from toolkit.engines.vllm.environment import find_environment

        engine = self.config.vllm_engine
        assert engine is not None, "only for the kind vllm"
        environment = find_environment(engine.python, version=engine.vllm)
        drafts = self.drafts(finished)
        return {
            "target": self.target(finished).entry.digest,
            "drafts": {name: done.entry.digest for name, done in drafts.items()},
            "spec": spec_parts(engine_spec(_speculating(self.config, "none", 1), "target")),
            "vllm": f"{environment.distribution} {environment.version}",
            "vllm_torch": environment.torch,
            "toolkit_sources": digest_sources([__name__]),
        }

    def measure(
        self,
        finished: Finished,
        methods: Sequence[tuple[str, Drafter]],
        prompts: Sequence[tuple[str, int]],
        longest: int,
        progress: Progress,
    ) -> dict[str, dict[float, StepCosts]]:
        """Costs of every draft length up to `longest`: name of the method -> temperature -> costs.

        methods: (name, drafter). prompts: (text, tokens). Raises ServerError if a server does not
        start or dies, StageError if it cannot be measured.
        """
        from toolkit.advise.cost import served_costs

        target = self.target(finished).record
        drafts = {name: done.record for name, done in self.drafts(finished).items()}

        def timed(name: str, drafter: Drafter | None, length: int) -> dict[float, ServedTimes]:
            args = _arguments(self.config, target, drafts.get(name), drafter, length)
            doing = f"{name}: timing steps of {length} draft tokens on vLLM"
            if drafter is None:
                doing = "timing plain steps on vLLM"
            return self._times(args, prompts, doing, progress)

        plain = timed("", None, 0)
        costs: dict[str, dict[float, StepCosts]] = {}
        for name, drafter in methods:
            lengths = [longest]
            if drafter == "draft_target" and longest > 1:
                lengths = [1, longest]
            speculating = [timed(name, drafter, length) for length in lengths]
            costs[name] = {
                temperature: served_costs(
                    times,
                    [others[temperature] for others in speculating],
                    draft_lens=range(1, longest + 1),
                )
                for temperature, times in plain.items()
            }
        return costs

    def _times(
        self,
        args: Mapping[str, Any],
        prompts: Sequence[tuple[str, int]],
        doing: str,
        progress: Progress,
    ) -> dict[float, ServedTimes]:
        """Start a server with these arguments, and time it: temperature -> times."""
        from toolkit.advise.cost import batch_sizes
        from toolkit.client import ClientError
        from toolkit.engines.vllm.server import GONE_S

        config = self.config
        temperatures = (0.0, config.validation.temperature)
        batches = batch_sizes(config.engine.max_batch_size)
        room = config.engine.max_seq_len - max(tokens for _, tokens in prompts)
        fewest = max(config.validation.max_tokens, MIN_TOKENS)
        lengths = [min(fewest * 2**attempt, room) for attempt in range(ATTEMPTS)]
        texts = [text for text, _ in prompts]
        server = vllm_server(config, args, config.triton.on_free_ports, progress=progress)
        with server, server.client(ignore_eos=True) as client:
            try:
                progress(0, None, doing)
                return waves_of(client, texts, batches, temperatures, lengths)
            except ClientError as error:
                server.check(wait_s=GONE_S)
                raise StageError("tune", f"{doing}: a request failed: {error}") from error


def _speculating(config: DeploymentConfig, kind: str, length: int) -> DeploymentConfig:
    """The deployment with one draft length at every load."""
    changes = {
        "kind": kind,
        "max_draft_len": length,
        "draft_len_schedule": None,
        "max_concurrency": None,
    }
    speculation = config.speculation.model_copy(update=changes)
    return config.model_copy(update={"speculation": speculation})


def _arguments(
    config: DeploymentConfig,
    target: QuantizedCheckpoint,
    draft: QuantizedCheckpoint | None,
    drafter: Drafter | None,
    length: int,
) -> dict[str, Any]:
    """The arguments of the deployment's server with this way to draft, None for none.

    Prefixes are not cached: every prompt is sent several times, and is to be read each time.
    """
    from toolkit.engines.spec import engine_spec
    from toolkit.engines.vllm.arguments import engine_args, resolved
    from toolkit.engines.vllm.backend import served_checkpoint

    spec = engine_spec(_speculating(config, drafter or "none", length), "target")
    assert spec.vllm is not None, "only for the kind vllm"
    args = engine_args(spec, spec.vllm, target.kv_cache_quant_algo)
    folder = None if draft is None else served_checkpoint(draft).absolute()
    placed = resolved(args, served_checkpoint(target).absolute(), folder)
    return {**placed, "enable_prefix_caching": False}


def waves_of(
    client: OpenAiClient,
    prompts: Sequence[str],
    batches: Sequence[int],
    temperatures: Sequence[float],
    lengths: Sequence[int],
) -> dict[float, ServedTimes]:
    """Send ROUNDS waves of every batch size at every temperature, after one wave of each size that
    does not count.

    lengths: tokens of a request, at the first attempt and at those after it.
    """
    import numpy as np

    from toolkit.advise.cost import ServedSteps, ServedTimes

    waves: dict[tuple[float, int], list[tuple[float, float]]] = {}
    first_token_ns: dict[float, list[int]] = {temperature: [] for temperature in temperatures}

    def send(number: int, batch: int, temperature: float, max_tokens: int) -> list[RequestTiming]:
        chosen = [prompts[(number * batch + index) % len(prompts)] for index in range(batch)]
        return client.measure(
            chosen, concurrency=batch, max_tokens=max_tokens, temperature=temperature
        )

    for batch in batches:
        send(0, batch, 0.0, lengths[0])
    for number in range(ROUNDS):
        for temperature in temperatures:
            for batch in batches:
                for max_tokens in lengths:
                    timings = send(number, batch, temperature, max_tokens)
                    wave = wave_of(timings)
                    if wave is not None:
                        break
                else:
                    raise StageError(
                        "tune",
                        f"{batch} requests of {lengths[-1]} tokens did not run at the same time for"
                        " a single step",
                        hint="Lower engine.max_batch_size, or measure while nothing else runs.",
                    )
                waves.setdefault((temperature, batch), []).append(wave)
                if batch == 1 and timings[0].ttft_ns is not None:
                    first_token_ns[temperature].append(timings[0].ttft_ns)

    def steps(temperature: float, batch: int) -> ServedSteps:
        step_ns, drafted = zip(*waves[temperature, batch], strict=True)
        return ServedSteps(np.array(step_ns), np.array(drafted))

    return {
        temperature: ServedTimes(
            {batch: steps(temperature, batch) for batch in batches},
            np.array(first_token_ns[temperature], dtype=np.float64),
        )
        for temperature in temperatures
    }


def wave_of(timings: Sequence[RequestTiming]) -> tuple[float, float] | None:
    """(nanoseconds of a step, tokens that it drafts for each request) while all requests of a wave
    run; None if they did not run at the same time for a single step.

    A chunk may hold several steps if the client is slower than the server, so the steps between
    two chunks are their share of all steps.
    """
    began = max(timing.chunks[0][0] for timing in timings)
    ended = min(timing.chunks[-1][0] for timing in timings)
    spent_ns, counted, steps, drafted = 0, 0.0, 0, 0
    for timing in timings:
        inside = [received_ns for received_ns, _ in timing.chunks if began <= received_ns <= ended]
        own_steps = _steps_of(timing)
        steps += own_steps
        drafted += timing.statistics.drafted or 0
        if len(inside) > 1:
            spent_ns += inside[-1] - inside[0]
            counted += own_steps * (len(inside) - 1) / (len(timing.chunks) - 1)
    return (spent_ns / counted, drafted / steps) if counted else None


def _steps_of(timing: RequestTiming) -> int:
    """The steps between the first token and the last. vLLM counts those with drafts; prompt lookup
    has others, which have a chunk each.
    """
    verify_steps = timing.statistics.verify_steps
    if verify_steps is None:  # a step has one token
        return max((timing.output_tokens or 1) - 1, 1)
    return max(verify_steps, len(timing.chunks) - 1, 1)
