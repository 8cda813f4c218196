"""`bench`: any endpoint, or a deployment that is served for it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.common import (
    VERDICTS,
    Debug,
    Json,
    Overrides,
    app,
    console,
    here,
    load,
    packaged_here,
    placed,
    say,
    show,
    show_json,
)
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.config.schema import DeploymentConfig
    from toolkit.records.bench import BenchRun


@app.command("bench")
def bench_command(
    where: Annotated[
        str | None,
        typer.Argument(
            help="A deployment's YAML file, or an endpoint.",
            metavar="CONFIG|URL",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON Lines with a `prompt` per line.", metavar="FILE", show_default="the YAML's"
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Closed loop: requests at a time. 1,2,4,8 is a sweep.",
            metavar="N[,N...]",
            show_default="1",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Open loop: requests per second.", min=0.001, show_default=False),
    ] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            help="Of an open loop: poisson, constant, or a trace file.", metavar="KIND|FILE"
        ),
    ] = "poisson",
    against_plain: Annotated[
        bool | None,
        typer.Option(
            "--against-plain/--as-served",
            help="Measure plain decoding in turns with speculation.",
            show_default="--against-plain for a CONFIG that speculates",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Measure this endpoint in turns with the first.", metavar="URL", show_default=False
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="Requests per arm and round.", min=1, show_default="one per prompt"),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Rounds at least.", min=1, show_default="1, or 3 with two arms"),
    ] = None,
    max_rounds: Annotated[
        int | None,
        typer.Option(help="Rounds at most.", min=1, show_default="8 with two arms, else --rounds"),
    ] = None,
    precision: Annotated[
        float,
        typer.Option(
            help="Wanted half width of the speed ratio's interval, as a share.", min=0.001
        ),
    ] = 0.05,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Output tokens at most.", min=1, show_default="64, or the YAML's"),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    warm_up: Annotated[
        int, typer.Option(help="Requests per arm that are not measured.", min=0)
    ] = 8,
    gate: Annotated[
        list[str] | None,
        typer.Option(
            help="A limit: ttft_p90<=200, speed>=1.2, tokens_per_s>=100. Repeatable.",
            metavar="LIMIT",
        ),
    ] = None,
    goodput: Annotated[
        str | None,
        typer.Option(
            help="What makes a request good: ttft=200,tpot=25 (ms).",
            metavar="LIMITS",
            show_default=False,
        ),
    ] = None,
    protocol: Annotated[
        str, typer.Option(help="auto, triton-grpc, triton-http, openai-chat or openai-completions.")
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(
            help="The served model.", show_default="tensorrt_llm, or the first one listed"
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="The server's Prometheus page.", metavar="URL", show_default="where it usually is"
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            help="Environment variable with the endpoint's API key.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds until a request counts as failed.", min=0.001)
    ] = 120.0,
    out: Annotated[
        Path | None, typer.Option(help="Save the run as JSON.", metavar="FILE", show_default=False)
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            help="Judge two saved runs: is B slower than A?", metavar="A B", show_default=False
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="With --compare: how much slower B may be, as a share.", min=0.0)
    ] = 0.05,
    seed: Annotated[int, typer.Option(help="Of arrivals, order and intervals.")] = 0,
    overrides: Overrides = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure any Triton or OpenAI-compatible endpoint: latency, throughput, goodput,
    speculation against plain.
    """
    if compare is not None:
        if where is not None:
            raise UsageError(
                "--compare judges saved runs, and measures nothing", hint=f"Leave {where!r} out."
            )
        _compare(*compare, tolerance, as_json=as_json)
        return
    if where is None:
        raise UsageError(
            "neither an endpoint nor --compare A B", hint="toolkit bench --help shows both."
        )
    asked: dict[str, Any] = {
        "protocol": protocol,
        "model": model,
        "baseline": baseline,
        "temperature": temperature,
        "concurrency": _levels(concurrency),
        "rate": rate,
        "arrivals": arrivals,
        "requests": requests,
        "rounds": rounds,
        "max_rounds": max_rounds,
        "warm_up": warm_up,
        "precision": precision,
        "goodput": goodput,
        "gates": tuple(gate or ()),
        "timeout_s": timeout,
        "api_key": _api_key(api_key_env),
        "seed": seed,
    }
    if Path(where).is_file():
        loaded = load(Path(where), overrides)
        asked["prompts"] = prompts or loaded.validation.prompts
        asked["max_tokens"] = max_tokens or loaded.validation.max_tokens
        plain = (
            loaded.speculation.is_enabled and baseline is None
            if against_plain is None
            else against_plain
        )
        with placed(Path(where), overrides):
            run = _bench_deployment(loaded, {**asked, "against_plain": plain})
    else:
        if prompts is None or overrides:
            what = "--set belongs to a CONFIG" if overrides else "no prompts to send"
            raise UsageError(
                what, where=where, hint="Leave --set out." if overrides else "Give --prompts FILE."
            )
        asked |= {"prompts": prompts, "max_tokens": max_tokens or 64, "metrics_url": metrics}
        run = _bench_endpoint(where, {**asked, "against_plain": bool(against_plain)})
    _finish_bench(run, out, as_json=as_json)


def _levels(text: str | None) -> tuple[int, ...]:
    levels = text.split(",") if text is not None else []
    if not all(level.strip().isdecimal() and int(level) > 0 for level in levels):
        raise UsageError(
            f"{text!r} is no number of requests at a time",
            hint="Write --concurrency 4, or 1,2,4,8.",
        )
    return tuple(int(level) for level in levels)


def _api_key(name: str | None) -> str | None:
    if name is not None and not os.environ.get(name):
        raise UsageError(
            f"the environment has no {name}", hint="Export it, or leave --api-key-env out."
        )
    return None if name is None else os.environ[name]


def _bench_deployment(config: DeploymentConfig, asked: dict[str, Any]) -> BenchRun:
    """Package what is missing, serve it on free ports, measure it."""
    from toolkit.workflows.serve import serve

    packaged = packaged_here(config)
    repository = here().repository(config.name)
    say(f"starting tritonserver on {repository}")
    with serve(config, repository) as (_, servers):
        server = servers.server
        served = {"model": asked["model"] or packaged.model, "metrics_url": server.metrics_url}
        return _bench_endpoint(server.grpc_url, {**asked, **served})


def _bench_endpoint(url: str, asked: dict[str, Any]) -> BenchRun:
    from toolkit.bench.run import BenchOptions, bench
    from toolkit.cli.progress import displayed

    with displayed() as display:
        return bench(url, BenchOptions(**asked), progress=display.started("bench"))


def _finish_bench(run: BenchRun, out: Path | None, *, as_json: bool) -> None:
    from toolkit.records.codec import to_json

    text = json.dumps(to_json(run), separators=(",", ":"))
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"the run cannot be saved: {error.strerror}", where=out) from error
    if as_json:
        show(text)
    else:
        from toolkit.report.bench import print_run

        print_run(run, console())
        if out is not None:
            show(f"saved in {out}")
    raise typer.Exit(VERDICTS[run.verdict])


def _compare(a: Path, b: Path, tolerance: float, *, as_json: bool) -> None:
    from toolkit.bench.compare import compare_runs, read_run
    from toolkit.report.bench import print_comparison

    found = compare_runs(read_run(a), read_run(b), tolerance=tolerance)
    if as_json:
        show_json(found)
    else:
        print_comparison(found, console())
    raise typer.Exit(VERDICTS[found.verdict])
