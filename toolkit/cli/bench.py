"""`toolkit bench`: measure an endpoint, or serve a deployment and measure it."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.common import (
    EXIT_CODES,
    Debug,
    Json,
    Overrides,
    app,
    console,
    here,
    load,
    located_plan_errors,
    package_to_serve,
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
            help="A deployment's YAML file, or the URL of an endpoint.",
            metavar="CONFIG|URL",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help=(
                "JSON Lines file with a `prompt` or `messages` in each line, or a published"
                " benchmark's file."
            ),
            metavar="FILE",
            show_default="the YAML's file",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint whose chat template writes `messages` for an endpoint of text.",
            metavar="DIR",
            show_default="the CONFIG's target",
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Closed loop with this many requests in flight. 1,2,4,8 is a sweep.",
            metavar="N[,N...]",
            show_default="1",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Open loop with this many requests per second.", min=0.001, show_default=False
        ),
    ] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            help="Arrival times of the open loop: poisson, constant or a trace file.",
            metavar="KIND|FILE",
        ),
    ] = "poisson",
    against_plain: Annotated[
        bool | None,
        typer.Option(
            "--against-plain/--as-served",
            help="Measure plain decoding too, in turns with speculation.",
            show_default="--against-plain for a CONFIG that can be served both ways at once",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Measure this endpoint too, in turns with the first.",
            metavar="URL",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="Requests per arm and round.", min=1, show_default="one per prompt"),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Minimum number of rounds.", min=1, show_default="1, or 3 with two arms"),
    ] = None,
    max_rounds: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of rounds.",
            min=1,
            show_default="8 with two arms, else --rounds",
        ),
    ] = None,
    precision: Annotated[
        float,
        typer.Option(
            help="Wanted half width of the speed ratio's interval, as a fraction.", min=0.001
        ),
    ] = 0.05,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of output tokens per request.",
            min=1,
            show_default="64, or the YAML's value",
        ),
    ] = None,
    max_tokens_from: Annotated[
        int | None,
        typer.Option(
            help=(
                "Each request asks for a number of output tokens from this one to --max-tokens,"
                " drawn evenly, so that those that begin together do not end together."
            ),
            min=1,
            show_default="all ask for --max-tokens",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0.0)
    ] = 0.0,
    warm_up: Annotated[
        int, typer.Option(help="Warm-up requests per arm, which are not measured.", min=0)
    ] = 8,
    gate: Annotated[
        list[str] | None,
        typer.Option(
            help="A limit to meet: ttft_p90<=200, speed>=1.2, tokens_per_s>=100. Repeatable.",
            metavar="LIMIT",
        ),
    ] = None,
    goodput: Annotated[
        str | None,
        typer.Option(
            help="Limits in ms that a good request meets: ttft=200,tpot=25.",
            metavar="LIMITS",
            show_default=False,
        ),
    ] = None,
    protocol: Annotated[
        str,
        typer.Option(
            help=(
                "The endpoint's protocol: auto, triton-grpc, triton-http, openai-chat or"
                " openai-completions."
            )
        ),
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(
            help="Name of the served model.",
            show_default="tensorrt_llm_bls or tensorrt_llm, or the first one that the server lists",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics-url",
            "--metrics",
            help="The server's Prometheus page.",
            metavar="URL",
            show_default="its usual address",
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            help="Environment variable that holds the endpoint's API key.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a request counts as failed.", min=0.001)
    ] = 120.0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Save the run in this file, as JSON.", metavar="FILE", show_default=False
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            help="Judge two saved runs: is B slower than A?", metavar="A B", show_default=False
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(help="With --compare: how much slower B may be, as a fraction.", min=0.0),
    ] = 0.05,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the arrival times, the lengths, the random order and the intervals."
        ),
    ] = 0,
    overrides: Overrides = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure any Triton or OpenAI-compatible endpoint.

    The results are latency, throughput, goodput, and the speed of speculation against plain
    decoding.
    """
    if compare is not None:
        if where is not None:
            raise UsageError(
                "--compare judges saved runs and measures nothing", hint=f"Leave {where!r} out."
            )
        _compare(*compare, tolerance, as_json=as_json)
        return
    if where is None:
        raise UsageError(
            "there is nothing to measure: give a CONFIG, an endpoint or --compare A B",
            hint="See toolkit bench --help.",
        )
    options: dict[str, Any] = {
        "protocol": protocol,
        "model": model,
        "baseline": baseline,
        "max_tokens_from": max_tokens_from,
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
    _check_out(out)
    if _is_config(where):
        config = load(Path(where), overrides)
        if tokenizer is not None:
            raise UsageError(
                "--tokenizer is for an endpoint; a CONFIG has its target's chat template",
                where=where,
                hint="Leave --tokenizer out.",
            )
        if against_plain is None and baseline is not None:
            against_plain = False
        options |= {
            "prompts": prompts or config.validation.prompts,
            "chat": config.target.checkpoint,
            "max_tokens": max_tokens or config.validation.max_tokens,
            "against_plain": config.speculation.is_enabled
            if against_plain is None
            else against_plain,
        }
        _check(None, options)
        with located_plan_errors(Path(where), overrides):
            run = _bench_deployment(config, options, against_plain)
    else:
        _check_endpoint_options(where, prompts, overrides)
        options |= {
            "prompts": prompts,
            "chat": _template_folder(tokenizer),
            "max_tokens": max_tokens or 64,
            "metrics_url": metrics,
            "against_plain": bool(against_plain),
        }
        _check(where, options)
        run = _bench_endpoint(where, options)
    _finish_bench(run, out, as_json=as_json)


def _check_endpoint_options(where: str, prompts: Path | None, overrides: list[str] | None) -> None:
    """Raises UsageError for what is no address, for options that only work with a CONFIG, and for
    missing prompts.
    """
    from toolkit.bench.transports import check_address

    check_address(where)
    if overrides:
        raise UsageError(
            "--set changes a CONFIG, and this is an endpoint", where=where, hint="Leave --set out."
        )
    if prompts is None:
        raise UsageError("no prompts to send", where=where, hint="Give --prompts FILE.")


def _template_folder(tokenizer: Path | None) -> Path | None:
    """The folder, if it has a chat template. Raises UsageError if it has none."""
    from toolkit.checkpoints.chat import has_chat_template

    if tokenizer is not None and not has_chat_template(tokenizer):
        raise UsageError(
            "--tokenizer: there is no chat template",
            where=tokenizer,
            hint="Name a checkpoint's folder with a chat_template.jinja or tokenizer_config.json.",
        )
    return tokenizer


def _is_config(where: str) -> bool:
    """Whether this names a file, even one that does not exist: no address ends as YAML does."""
    is_named_so = Path(where).suffix.lower() in (".yaml", ".yml") and "://" not in where
    return is_named_so or Path(where).exists()


def _check(url: str | None, options: dict[str, Any]) -> None:
    """Raises UsageError for options that cannot work, before anything is started."""
    from toolkit.bench.run import BenchOptions, check

    check(url, BenchOptions(**options))


def _check_out(out: Path | None) -> None:
    """Raises UsageError if the run could not be saved there, before it is measured."""
    if out is None:
        return
    hint = "Name a file, such as --out run.json."
    if out.is_dir():
        raise UsageError("the run cannot be saved: this is a folder", where=out, hint=hint)
    target = (
        out if out.exists() else next(above for above in out.absolute().parents if above.exists())
    )
    if target.is_dir() == out.exists() or not os.access(target, os.W_OK):
        raise UsageError("the run cannot be saved: this cannot be written", where=target, hint=hint)


def _levels(text: str | None) -> tuple[int, ...]:
    """The numbers in --concurrency. Raises UsageError if one of them is not a positive integer."""
    levels = text.split(",") if text is not None else []
    if not all(level.strip().isdecimal() and int(level) > 0 for level in levels):
        raise UsageError(
            f"{text!r} is not a number of requests in flight",
            hint="Write --concurrency 4, or --concurrency 1,2,4,8.",
        )
    return tuple(int(level) for level in levels)


def _api_key(name: str | None) -> str | None:
    """The value of the environment variable. Raises UsageError if it is not set or empty."""
    if name is None:
        return None
    if not os.environ.get(name):
        raise UsageError(
            f"the environment has no {name}", hint="Export it, or leave --api-key-env out."
        )
    return os.environ[name]


def _bench_deployment(
    config: DeploymentConfig, options: dict[str, Any], against_plain: bool | None
) -> BenchRun:
    """Package the deployment if needed, serve it on free ports, and measure it. against_plain None:
    plain decoding too, where it can be served at the same time.
    """
    from toolkit.cli.progress import displayed
    from toolkit.workflows.bench import (
        chat_folder,
        check_measurable,
        plain_for_bench,
        unmeasured_plain,
    )
    from toolkit.workflows.serve import serve

    check_measurable(config, against_plain=against_plain)
    speculates = package_to_serve(config).max_draft_len > 0
    repository = here().repository(config.name)
    plain = plain_for_bench(config, repository, speculates=speculates, against_plain=against_plain)
    if speculates and plain is None and against_plain is None:
        say(unmeasured_plain(config))
    options = {**options, "chat": chat_folder(config)}
    _check(None, {**options, "against_plain": plain is not None})
    say(f"starting {config.capabilities.server} on {repository}")
    with contextlib.ExitStack() as running:
        with displayed() as display:
            starting = serve(
                config,
                repository,
                plain=plain or "by request",
                cache=here().vllm_cache,
                progress=display.started("serve"),
            )
            _, servers = running.enter_context(starting)
        address, beside = servers.address, servers.plain_address
        served = {
            "model": options["model"] or address.model,
            "metrics_url": address.metrics_url,
            "protocol": address.protocol,
            "against_plain": plain == "by request",
            "baseline": options["baseline"] if beside is None else beside.url,
            "alone": {} if beside is None else servers.alone,
        }
        return _bench_endpoint(address.url, {**options, **served})


def _bench_endpoint(url: str, options: dict[str, Any]) -> BenchRun:
    """Measure the endpoint, and show the progress on stderr. options: fields of BenchOptions."""
    from toolkit.bench.run import BenchOptions, bench
    from toolkit.cli.progress import displayed

    with displayed() as display:
        return bench(url, BenchOptions(**options), progress=display.started("bench"))


def _finish_bench(run: BenchRun, out: Path | None, *, as_json: bool) -> None:
    """Save and print the run, and exit with the code of its verdict."""
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
    raise typer.Exit(EXIT_CODES[run.verdict])


def _compare(a: Path, b: Path, tolerance: float, *, as_json: bool) -> None:
    """Compare two saved runs, print the result, and exit with the code of the verdict."""
    from toolkit.bench.compare import compare_runs, read_run
    from toolkit.report.bench import print_comparison

    comparison = compare_runs(read_run(a), read_run(b), tolerance=tolerance)
    if as_json:
        show_json(comparison)
    else:
        print_comparison(comparison, console())
    raise typer.Exit(EXIT_CODES[comparison.verdict])
