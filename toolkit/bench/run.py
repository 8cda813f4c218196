"""The workflow of `toolkit bench`: connect, choose arms and loads, find the server's counters, run.

It works with every endpoint that `toolkit.bench.transports` can talk to, and needs no YAML of the
toolkit.
"""

from __future__ import annotations

import asyncio
import datetime
import platform
import random
import resource
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from toolkit.errors import UsageError
from toolkit.interfaces import Progress
from toolkit.words import WireProtocol

if TYPE_CHECKING:
    from toolkit.bench.prompts import Prompt
    from toolkit.bench.runner import Arm, Load, Plan
    from toolkit.bench.transports import Transport
    from toolkit.client import Options
    from toolkit.records.bench import BenchRun

__all__ = ["BenchOptions", "apart", "bench", "check", "sweep"]

FILLED = 4  # the least number of requests in a sweep, per request in flight
MAX_PROMPTS = 1_000_000  # of a file
METRICS_PORTS = {8000: 8002, 8001: 8002}  # Triton's usual ports: HTTP or gRPC -> metrics


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of `toolkit bench`. gates and goodput are text that has not been parsed yet.

    max_tokens_from: each request has a number of output tokens from this one to `max_tokens`, drawn
    evenly. max_prompts: of the file, from its first. lead_in: as in `Load`. chat: the checkpoint
    whose template writes messages for endpoints that take text. alone: `Arm.alone` of the arms
    `baseline` and `served`, if these are servers of ours.
    """

    prompts: Path
    protocol: Literal["auto", WireProtocol] = "auto"
    model: str | None = None
    baseline: str | None = None
    against_plain: bool = False
    max_tokens: int = 64
    max_tokens_from: int | None = None
    temperature: float = 0.0
    concurrency: tuple[int, ...] = ()
    rate: float | None = None
    arrivals: str = "poisson"
    requests: int | None = None
    rounds: int | None = None
    max_rounds: int | None = None
    warm_up: int = 8
    precision: float = 0.05
    goodput: str | None = None
    gates: tuple[str, ...] = ()
    timeout_s: float = 120.0
    metrics_url: str | None = None
    api_key: str | None = None
    seed: int = 0
    chat: Path | None = None
    lead_in: float = 0.0
    max_prompts: int = MAX_PROMPTS
    alone: Mapping[str, Callable[[], AbstractContextManager[None]]] = field(default_factory=dict)


def bench(
    url: str, options: BenchOptions, *, progress: Progress = lambda done, total, what: None
) -> BenchRun:
    """Measure the endpoint at url. Raises UsageError for arguments that cannot work, StageError if
    the endpoint cannot be used.
    """
    plan = check(url, options)
    with _many_files():
        return asyncio.run(_bench(url, options, plan, progress))


def check(url: str | None, options: BenchOptions) -> Plan:
    """Plan the run. Raises UsageError for arguments that cannot work, before anything is started or
    connected.

    url: None if the endpoint is not known yet.
    """
    from toolkit.bench.transports import check_address

    for address in (url, options.baseline):
        if address is not None:
            check_address(address, options.protocol)
    if options.metrics_url is not None:
        check_address(options.metrics_url)
    if options.baseline is not None and options.against_plain:
        raise UsageError(
            "--baseline and --against-plain are two first arms", hint="Choose one of them."
        )
    return _plan(options)


@contextmanager
def _many_files() -> Iterator[None]:
    """Raise the soft limit of open files to the hard limit inside. Every HTTP connection is an open
    file, and the usual soft limit is 1024.
    """
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))


def sweep(
    url: str,
    model: str,
    prompts: Path,
    levels: Sequence[int],
    *,
    against_plain: bool,
    requests: int,
    max_tokens: int,
    seed: int,
    protocol: WireProtocol = "triton-grpc",
    baseline: str | None = None,
    metrics_url: str | None = None,
    chat: Path | None = None,
    alone: Mapping[str, Callable[[], AbstractContextManager[None]]] | None = None,
    progress: Progress = lambda done, total, what: None,
) -> BenchRun:
    """Measure a deployment at each concurrency, next to its own plain decoding if asked: 2 rounds,
    and a third if those are not precise enough. baseline: the URL of a second server that decodes
    plainly. chat, alone: as in BenchOptions.
    """
    options = BenchOptions(
        prompts=prompts,
        protocol=protocol,
        model=model,
        baseline=baseline,
        against_plain=against_plain,
        max_tokens=max_tokens,
        concurrency=tuple(levels),
        requests=max(requests, FILLED * max(levels)),
        rounds=2,
        max_rounds=3,
        precision=0.1,
        metrics_url=metrics_url,
        seed=seed,
        chat=chat,
        alone=alone or {},
    )
    return bench(url, options, progress=progress)


async def _bench(url: str, options: BenchOptions, plan: Plan, progress: Progress) -> BenchRun:
    from toolkit.bench.runner import run_bench
    from toolkit.bench.transports import connect

    transports: list[Transport] = []
    try:
        for one in (options.baseline, url):
            if one is not None:
                transports.append(
                    await connect(
                        one,
                        protocol=options.protocol,
                        model=options.model,
                        timeout_s=options.timeout_s,
                        api_key=options.api_key,
                    )
                )
        if any(transport.protocol != "openai-chat" for transport in transports):
            _check_text(plan.prompts)
        return await run_bench(
            _with_counters(_arms(transports, options), url, options),
            plan,
            settings=_settings(url, options, plan),
            environment=_environment(),
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            progress=progress,
        )
    finally:
        for transport in transports:
            await transport.close()


def _plan(options: BenchOptions) -> Plan:
    from toolkit.bench.limits import parse_goodput, parse_limit
    from toolkit.bench.prompts import read_unwritten
    from toolkit.bench.runner import Plan

    prompts, domains = read_unwritten(options.prompts, options.max_prompts, options.chat)
    if options.chat is not None or options.protocol not in ("auto", "openai-chat"):
        _check_text(prompts)
    two = options.against_plain or options.baseline is not None
    if (
        options.rounds is not None
        and options.max_rounds is not None
        and options.max_rounds < options.rounds
    ):
        what = f"--max-rounds {options.max_rounds} is less than --rounds {options.rounds}"
        raise UsageError(what, hint="Raise the one or lower the other.")
    limits = tuple(parse_limit(text) for text in options.gates)
    for limit in limits:
        if limit.scope.over is not None and not two:
            raise UsageError(
                f"the limit on {limit.name} compares two arms, and only one is measured",
                hint="Name a second endpoint with --baseline, or use --against-plain.",
            )
    rounds = options.rounds or min(3 if two else 1, options.max_rounds or 3)
    max_rounds = options.max_rounds or max(rounds, 8 if two else rounds)
    loads = _loads(options)
    requests = options.requests or len(prompts)
    if (trace := loads[0].trace) is not None:
        if options.requests is not None and options.requests > len(trace):
            raise UsageError(
                f"{options.requests} requests and {len(trace)} arrivals in the trace",
                hint="Leave --requests out, or lower it.",
            )
        requests = options.requests or len(trace)
    return Plan(
        prompts=prompts,
        domains=domains,
        loads=loads,
        requests=requests,
        rounds=rounds,
        max_rounds=max_rounds,
        max_tokens=_lengths(options, requests),
        warm_up=options.warm_up,
        precision=options.precision,
        goodput_ms=parse_goodput(options.goodput) if options.goodput else {},
        limits=limits,
        seed=options.seed,
    )


def _lengths(options: BenchOptions, requests: int) -> tuple[int, ...]:
    """The output tokens to ask for, if they differ from request to request."""
    if options.max_tokens_from is None:
        return ()
    if options.max_tokens_from > options.max_tokens:
        what = f"--max-tokens-from {options.max_tokens_from} is above --max-tokens"
        raise UsageError(f"{what} {options.max_tokens}", hint="Raise the one or lower the other.")
    draw = random.Random(options.seed)
    return tuple(draw.randint(options.max_tokens_from, options.max_tokens) for _ in range(requests))


def _check_text(prompts: Sequence[Prompt]) -> None:
    """Raise UsageError for a prompt that cannot be sent as text."""
    from toolkit.bench.prompts import text_of

    for prompt in prompts:
        text_of(prompt)


def _loads(options: BenchOptions) -> tuple[Load, ...]:
    from toolkit.bench.arrivals import read_trace
    from toolkit.bench.runner import Load

    trace = (
        None if options.arrivals in ("poisson", "constant") else read_trace(Path(options.arrivals))
    )
    if (options.rate is not None or trace is not None) and options.concurrency:
        raise UsageError(
            "--concurrency is a closed loop, --rate and a trace are open ones",
            hint="Choose one of them.",
        )
    if trace is not None:
        if options.rate is not None:
            raise UsageError(
                "a trace has its own times, so --rate says nothing", hint="Leave --rate out."
            )
        return (Load(trace=trace, arrivals="trace"),)
    if options.rate is not None:
        arrivals: Literal["constant", "poisson"] = "poisson"
        if options.arrivals == "constant":
            arrivals = "constant"
        return (Load(rate=options.rate, arrivals=arrivals, lead_in=options.lead_in),)
    return tuple(Load(concurrency=level) for level in options.concurrency or (1,))


def _arms(transports: list[Transport], options: BenchOptions) -> list[Arm]:
    from toolkit.bench.runner import Arm
    from toolkit.client import Options

    served = Options(max_tokens=options.max_tokens, temperature=options.temperature)
    if options.baseline is not None:
        return [
            Arm(
                name,
                transport,
                apart(transport, served),
                alone=options.alone.get(name, nullcontext),
            )
            for name, transport in zip(("baseline", "served"), transports, strict=True)
        ]
    if not options.against_plain:
        alone = options.alone.get("served", nullcontext)
        return [Arm("served", transports[0], apart(transports[0], served), alone=alone)]
    plain = Options(
        max_tokens=options.max_tokens, temperature=options.temperature, num_draft_tokens=0
    )
    # If the model has no such input, this raises before anything is measured.
    transports[0].prepare("", plain)
    return [
        Arm(name, transports[0], apart(transports[0], arm_options))
        for name, arm_options in (("plain", plain), ("speculative", served))
    ]


def apart(transport: Transport, options: Options) -> Options:
    """The options of an arm whose requests begin with what others of this arm left in a KV cache,
    but not with what another arm or another run did, where the model has the input cache_salt.
    """
    salted = replace(options, cache_salt=uuid.uuid4().hex)
    try:
        transport.prepare("", salted)
    except UsageError:
        return options
    return salted


def _with_counters(arms: Sequence[Arm], url: str, options: BenchOptions) -> list[Arm]:
    """The arms with the counters of their servers, where these can be read. The page that the user
    named belongs to the server of the last arm. Raises UsageError if that one cannot be read.
    """
    readers: dict[tuple[str, str], Callable[[], Mapping[str, float]]] = {}
    metered: list[Arm] = []
    for arm in arms:
        is_baseline = options.baseline is not None and arm is arms[0]
        where = options.baseline if is_baseline and options.baseline is not None else url
        stated = None if is_baseline else options.metrics_url
        address = stated or _metrics_of(where)
        read = None
        if address is not None:
            model = arm.transport.model
            read = readers.setdefault((address, model), partial(_read, address, model))
        metered.append(replace(arm, counters=_if_readable(read, address, stated)))
    return metered


def _read(address: str, model: str) -> Mapping[str, float]:
    from toolkit.bench.counters import read_counters

    return read_counters(address, model)


def _if_readable(
    read: Callable[[], Mapping[str, float]] | None, address: str | None, stated: str | None
) -> Callable[[], Mapping[str, float]] | None:
    if read is None:
        return None
    try:
        read()
    except (OSError, ValueError, HTTPException) as error:
        if stated is None:
            return None
        raise UsageError(
            f"the counters cannot be read: {error}", where=address, hint="Correct --metrics-url."
        ) from error
    return read


def _metrics_of(url: str) -> str | None:
    """The usual address of the counters: Triton's metrics port, else `/metrics` of the server."""
    parts = urlsplit(url if "://" in url else f"grpc://{url}")
    if parts.port in METRICS_PORTS and parts.path in ("", "/"):
        return f"http://{parts.hostname}:{METRICS_PORTS[parts.port]}/metrics"
    return None if parts.scheme == "grpc" else f"{parts.scheme}://{parts.netloc}/metrics"


def _settings(url: str, options: BenchOptions, plan: Plan) -> dict[str, str]:
    said = {
        "url": url,
        "prompts": str(options.prompts),
        "max_tokens": options.max_tokens,
        **({"max_tokens_from": options.max_tokens_from} if options.max_tokens_from else {}),
        "temperature": options.temperature,
        "requests": plan.requests,
        "rounds": plan.rounds,
        "max_rounds": plan.max_rounds,
        "warm_up": plan.warm_up,
        "precision": plan.precision,
        "arrivals": "closed" if plan.loads[0].concurrency is not None else plan.loads[0].arrivals,
        "goodput": options.goodput or "",
        "gates": " ".join(options.gates),
        "seed": plan.seed,
    }
    return {name: str(value) for name, value in said.items()}


def _environment() -> dict[str, str]:
    from importlib.metadata import version

    from toolkit import __version__

    libraries = {name: version(name) for name in ("aiohttp", "grpcio", "numpy")}
    return {
        "toolkit": __version__,
        "python": platform.python_version(),
        "client": platform.platform(),
        **libraries,
    }
