"""`toolkit generate`: stream the completion of one prompt, in this process or from an endpoint."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.common import (
    Debug,
    Json,
    Overrides,
    app,
    here,
    load,
    located_plan_errors,
    package_to_serve,
    run_stages,
    say,
    show,
)
from toolkit.cli.serve import URL
from toolkit.errors import UsageError
from toolkit.pipeline.rows import is_unicode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from toolkit.client import Chunk
    from toolkit.config.schema import DeploymentConfig


@app.command()
def generate(
    where: Annotated[
        str,
        typer.Argument(
            help="A deployment's YAML file, or host:port of a gRPC endpoint.", metavar="CONFIG|URL"
        ),
    ],
    prompt: Annotated[str, typer.Argument(help="The text to complete.", show_default=False)],
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of output tokens.",
            min=1,
            show_default="128, or the YAML's value",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0.0)
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of the sampling. The same seed gives the same text.",
            min=0,
            max=2**64 - 1,
            show_default=False,
        ),
    ] = None,
    draft_len: Annotated[
        int | None,
        typer.Option(
            help="Draft tokens per step; 0 decodes without speculation.",
            min=0,
            show_default="the YAML's value",
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Stream one completion, with its tokens/s and acceptance."""
    if not is_unicode(prompt):
        raise UsageError(
            "the prompt has bytes that are not UTF-8, or half of a surrogate pair",
            hint="Write it in UTF-8, and a character beyond U+FFFF as it is.",
        )
    if not prompt:
        raise UsageError("the prompt is empty", hint="Write at least one character.")
    options = {"temperature": temperature, "seed": seed, "draft_len": draft_len}
    address = _endpoint(where)
    if address is not None:
        if overrides:
            raise UsageError(
                "--set changes a CONFIG, and this is a running endpoint", hint="Leave --set out."
            )
        _from_endpoint(address, prompt, max_tokens or 128, options, as_json=as_json)
    else:
        with located_plan_errors(Path(where), overrides):
            config = load(Path(where), overrides)
            if config.vllm_engine is not None:
                _by_vllm(config, prompt, max_tokens, options, as_json=as_json)
            else:
                _in_process(config, prompt, max_tokens, options, as_json=as_json)


def _endpoint(where: str) -> str | None:
    """The endpoint as host:port, or None if `where` names a file.

    Raises UsageError if `where` looks like a URL and is not one of a gRPC endpoint.
    """
    if Path(where).exists():
        return None
    url = URL.match(where)
    if url is None and "://" in where:
        raise UsageError(
            f"{where} is not host:port of a gRPC endpoint",
            hint="`toolkit serve` prints the address, for instance 127.0.0.1:8001.",
        )
    if url is None:
        return None
    from toolkit.client import MAX_PORT

    if int(url["address"].rpartition(":")[2]) > MAX_PORT:
        raise UsageError(f"{where}: a port is at most {MAX_PORT}", hint="Check the address.")
    return url["address"]


def _in_process(
    config: DeploymentConfig,
    prompt: str,
    max_tokens: int | None,
    options: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Build the engines if needed, load them into this process, and stream one request."""
    import time

    from toolkit.inprocess import load_runtime
    from toolkit.interfaces import GenerationRequest, Sampling
    from toolkit.workflows.deployment import embedded, speculation_of

    if not config.capabilities.in_process:
        raise UsageError(
            f"engine.kind {config.engine.kind} runs only in its server",
            hint=(
                "Start it with toolkit serve CONFIG, and pass the grpc address that it prints to"
                " toolkit generate."
            ),
        )
    built = run_stages(config, "tune" if config.speculation.max_draft_len == "auto" else "compile")
    engines, speculation = here().engines(config.name), speculation_of(config, built.stages)
    runtime = load_runtime(
        engines / "target",
        engines / "draft" if speculation.has_draft_model else None,
        threads=embedded(config).threads,
        max_draft_len=speculation.longest_draft,
        acceptance=speculation.acceptance,
        max_queue_size=1,
        ngram_size=speculation.max_matching_ngram_size if speculation.has_ngram else None,
        max_prompt_tokens=speculation.max_prompt_tokens,
        # Not `adaptive`: timing the engines takes longer than one text, and changes none.
    )
    with contextlib.closing(runtime):
        request = GenerationRequest(
            request_id="generate",
            prompt_ids=tuple(runtime.codec.encode(prompt)),
            max_tokens=max_tokens or config.triton.default_max_tokens,
            sampling=Sampling(temperature=options["temperature"], seed=options["seed"]),
            draft_len=options["draft_len"],
        )
        text, began = "", time.monotonic()
        for event in runtime.generate(request):
            text += event.text
            if not as_json:
                _stream(event.text)
            if event.finish_reason is not None:
                seconds = time.monotonic() - began
                if event.error is not None:
                    raise UsageError(f"the request ended with an error: {event.error}")
                tokens = rate = length = failure = None
                if event.stats is not None:
                    failure = event.stats.draft_failure
                    tokens = event.stats.output_tokens
                    rate = event.stats.acceptance_rate
                    length = event.stats.acceptance_length
                _print_figures(
                    text,
                    event.finish_reason,
                    tokens,
                    seconds,
                    rate,
                    length,
                    failure,
                    as_json=as_json,
                )


def _by_vllm(
    config: DeploymentConfig,
    prompt: str,
    max_tokens: int | None,
    options: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Package the deployment if needed, start vLLM's own server, and stream one request from it.

    With the draft length 0, the server is started without speculation.
    """
    from toolkit.cli.progress import displayed
    from toolkit.client import ClientError, Options, ServerUnavailable
    from toolkit.errors import StageError
    from toolkit.workflows.serve_vllm import PLAIN, SERVED, VllmServers

    packaged = package_to_serve(config)
    draft_len, fixed = options["draft_len"], packaged.max_draft_len
    if draft_len not in (None, 0, fixed):
        raise UsageError(
            f"vLLM's draft length is fixed when it starts: this deployment has {fixed}, and"
            f" --draft-len is {draft_len}",
            hint=f"Leave --draft-len out, or --set speculation.max_draft_len={draft_len}.",
        )
    request_options = Options(
        max_tokens=max_tokens or config.triton.default_max_tokens,
        temperature=options["temperature"],
        seed=options["seed"],
    )
    repository = here().repository(config.name)
    say(f"starting {config.capabilities.server} on {repository}")
    with contextlib.ExitStack() as running:
        with displayed() as display:
            servers = VllmServers(
                config,
                repository,
                config.triton.on_free_ports,
                here().vllm_cache,
                progress=display.started("serve"),
            )
            client = running.enter_context(servers).start(PLAIN if draft_len == 0 else SERVED)
        try:
            _show_stream(client.stream(prompt, request_options), as_json=as_json)
        except ServerUnavailable as error:  # if the server has ended, `running` says why instead
            hint = "vLLM itself has not failed. Try again, or ask for fewer tokens: --max-tokens."
            raise StageError("generate", str(error), hint=hint) from error
        except ClientError as error:
            raise UsageError(str(error)) from error


def _show_stream(chunks: Iterator[Chunk], *, as_json: bool) -> None:
    """Print the chunks as they come, and the figures after the last one."""
    import time

    text, began = "", time.monotonic()
    for chunk in chunks:
        text += chunk.text
        if not as_json:
            _stream(chunk.text)
        if chunk.finish_reason is None:
            continue
        rate = length = failure = None
        if chunk.statistics is not None:
            failure = chunk.statistics.draft_failure
            rate = chunk.statistics.acceptance_rate
            length = chunk.statistics.acceptance_length
        seconds = time.monotonic() - began
        _print_figures(
            text,
            chunk.finish_reason,
            chunk.output_tokens,
            seconds,
            rate,
            length,
            failure,
            as_json=as_json,
        )


def _from_endpoint(
    address: str, prompt: str, max_tokens: int, options: dict[str, Any], *, as_json: bool
) -> None:
    """Stream one request from a running endpoint over gRPC."""
    from toolkit.client import Client, ClientError, Options, ServerUnavailable
    from toolkit.errors import StageError

    request_options = Options(
        max_tokens=max_tokens,
        temperature=options["temperature"],
        seed=options["seed"],
        num_draft_tokens=options["draft_len"],
    )
    try:
        with Client(address) as client:
            _show_stream(client.answer(prompt, request_options), as_json=as_json)
    except ServerUnavailable as error:
        hint = (
            "If the server has ended, start it again. Else give host:port of tritonserver's gRPC"
            " endpoint, which `toolkit serve` prints; for vLLM, give the CONFIG."
        )
        raise StageError("generate", str(error), hint=hint) from error
    except ClientError as error:
        raise UsageError(str(error)) from error


def _stream(text: str) -> None:
    """Write a piece of the completion; characters that UTF-8 cannot encode are replaced."""
    sys.stdout.write(text.encode("utf-8", "replace").decode("utf-8"))
    sys.stdout.flush()


def _print_figures(
    text: str,
    finish_reason: str,
    tokens: int | None,
    seconds: float,
    rate: float | None,
    length: float | None,
    draft_failure: str | None,
    *,
    as_json: bool,
) -> None:
    """Print what is said after a completion; with as_json, the completion is part of it.

    seconds: of the whole request, prefill included; tokens per second are tokens / seconds. rate:
    the acceptance rate; length: the acceptance length; both None without speculation.
    draft_failure: why it went on without its draft; None if it did not.
    """
    per_second = None if tokens is None or seconds <= 0 else tokens / seconds
    if as_json:
        figures = {"tokens_per_s": per_second, "acceptance_rate": rate, "acceptance_length": length}
        show(
            json.dumps(
                {
                    "text": text,
                    "finish_reason": finish_reason,
                    "output_tokens": tokens,
                    "seconds": seconds,
                    **figures,
                    "draft_failure": draft_failure,
                }
            )
        )
        return
    facts = [f"{tokens} tokens in {seconds:.2f} s"]
    if per_second is not None:
        facts.append(f"{per_second:.1f} tokens/s")
    facts.append("no speculation" if rate is None else f"acceptance {rate:.2f}")
    if rate is not None and length is not None:
        facts.append(f"{length:.2f} tokens per step")
    sys.stdout.write("\n")
    sys.stdout.flush()
    say(", ".join([*facts, f"ended by {finish_reason}"]))
    if draft_failure is not None:
        say(f"the draft failed, and the rest was decoded without it: {draft_failure}")
