"""`toolkit generate`: one prompt, streamed to the terminal, in this process or from an endpoint."""

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
    placed,
    run_stages,
    say,
    show,
)
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.config.schema import DeploymentConfig
from toolkit.cli.serve import URL


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
        typer.Option(help="Output tokens at most.", min=1, show_default="128, or the YAML's"),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed gives the same text.", min=0, max=2**64 - 1, show_default=False
        ),
    ] = None,
    draft_len: Annotated[
        int | None,
        typer.Option(
            help="Draft tokens per step; 0 decodes plainly.", min=0, show_default="the YAML's"
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Stream one completion to the terminal, with tokens/s and acceptance."""
    asked = {"temperature": temperature, "seed": seed, "draft_len": draft_len}
    address = _endpoint(where)
    if address is not None:
        if overrides:
            raise UsageError(
                "--set belongs to a CONFIG, not to a running endpoint", hint="Leave it out."
            )
        _from_endpoint(address, prompt, max_tokens or 128, asked, as_json=as_json)
    else:
        with placed(Path(where), overrides):
            _in_process(load(Path(where), overrides), prompt, max_tokens, asked, as_json=as_json)


def _endpoint(where: str) -> str | None:
    """host:port, or None where `where` is to be a file. Raises UsageError for what is neither."""
    if Path(where).exists():
        return None
    url = URL.match(where)
    if url is None and "://" in where:
        raise UsageError(
            f"{where} is not host:port of a gRPC endpoint",
            hint="`toolkit serve` prints it: 127.0.0.1:8001",
        )
    return None if url is None else url["address"]


def _in_process(
    config: DeploymentConfig,
    prompt: str,
    max_tokens: int | None,
    asked: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Build what is missing, load both engines into this process, stream one request."""
    import time

    from toolkit.inprocess import load_runtime
    from toolkit.interfaces import GenerationRequest, Sampling
    from toolkit.workflows.deployment import embedded, speculation_of

    if not config.capabilities.in_process:
        what = f"engine.kind {config.engine.kind} runs in its server alone"
        raise UsageError(
            what,
            hint=(
                "Start it with toolkit serve CONFIG, and give generate the grpc address that it"
                " prints."
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
    )
    with contextlib.closing(runtime):
        request = GenerationRequest(
            request_id="generate",
            prompt_ids=tuple(runtime.codec.encode(prompt)),
            max_tokens=max_tokens or config.triton.default_max_tokens,
            sampling=Sampling(temperature=asked["temperature"], seed=asked["seed"]),
            draft_len=asked["draft_len"],
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
                stats = event.stats
                _close(
                    text,
                    event.finish_reason,
                    None if stats is None else stats.output_tokens,
                    seconds,
                    None if stats is None else stats.acceptance_rate,
                    None if stats is None else stats.acceptance_length,
                    as_json=as_json,
                )


def _from_endpoint(
    address: str, prompt: str, max_tokens: int, asked: dict[str, Any], *, as_json: bool
) -> None:
    """Stream one request from a running endpoint over gRPC."""
    import time

    from toolkit.client import Client, ClientError, Options, ServerUnavailable
    from toolkit.errors import StageError

    options = Options(
        max_tokens=max_tokens,
        temperature=asked["temperature"],
        seed=asked["seed"],
        num_draft_tokens=asked["draft_len"],
    )
    try:
        with Client(address) as client:
            text, began = "", time.monotonic()
            for chunk in client.stream(prompt, options):
                text += chunk.text
                if not as_json:
                    _stream(chunk.text)
                if chunk.finish_reason is not None:
                    figures = chunk.statistics
                    _close(
                        text,
                        chunk.finish_reason,
                        chunk.output_tokens,
                        time.monotonic() - began,
                        None if figures is None else figures.acceptance_rate,
                        None if figures is None else figures.acceptance_length,
                        as_json=as_json,
                    )
    except ServerUnavailable as error:
        hint = "host:port is that of the gRPC endpoint; `toolkit serve` prints it"
        raise StageError("generate", str(error), hint=hint) from error
    except ClientError as error:
        raise UsageError(str(error)) from error


def _stream(text: str) -> None:
    sys.stdout.write(text.encode("utf-8", "replace").decode("utf-8"))
    sys.stdout.flush()


def _close(
    text: str,
    finish_reason: str,
    tokens: int | None,
    seconds: float,
    rate: float | None,
    length: float | None,
    *,
    as_json: bool,
) -> None:
    """The line after a completion: tokens per second of the whole request, prefill included."""
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
                }
            )
        )
        return
    facts = [f"{tokens} tokens in {seconds:.2f} s"]
    facts += [] if per_second is None else [f"{per_second:.1f} tokens/s"]
    facts += ["no speculation"] if rate is None else [f"acceptance {rate:.2f}"]
    facts += [] if length is None or rate is None else [f"{length:.2f} tokens per step"]
    sys.stdout.write("\n")
    sys.stdout.flush()
    say(", ".join([*facts, f"ended by {finish_reason}"]))
