"""`toolkit gateway`: OpenAI's protocol in front of a served deployment."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.common import Config, Debug, Overrides, app, load, say, show
from toolkit.cli.foreground import Signal, interrupted_by_signals
from toolkit.config.hosts import OPEN_LISTENER, is_loopback

if TYPE_CHECKING:
    from toolkit.config.schema import DeploymentConfig
    from toolkit.gateway.app import Gateway


@app.command()
def gateway(
    config: Config,
    url: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS",
            help="The served deployment: host:port of Triton's gRPC, or of vLLM's HTTP.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Put OpenAI's protocol in front of a served deployment.

    It runs until Ctrl-C, and has /v1/chat/completions (with the target's chat template),
    /v1/completions, /v1/models, /health, /metrics, and a page at / to try it. API keys come
    from the environment variable TOOLKIT_API_KEYS, separated by commas; without it no key is
    needed. toolkit serve --gateway starts server and gateway together.
    """
    from toolkit.workflows.gateway import gateway_of, one_arm, server_address

    loaded = load(config, overrides, texts=False)
    url = server_address(loaded, url)
    try:
        with interrupted_by_signals():
            run_gateway(loaded, gateway_of(loaded, one_arm(loaded, url)))
    except Signal:
        show("stopped")


def run_gateway(
    config: DeploymentConfig,
    make_gateway: Callable[[], Gateway],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal, which is raised at the end. check: as for `toolkit.gateway.program`."""
    from toolkit.gateway.program import run

    host = config.gateway.host
    if not is_loopback(host):
        say(f"warning: {OPEN_LISTENER.format(address=host)}; put TLS before it, and set API keys")

    def ready(address: str) -> None:
        body = {
            "model": config.name,
            "prompt": "def read_config(path):",
            "max_tokens": 32,
            "temperature": 0,
        }
        show(f"gateway  {address}  (a page to try it)")
        show(f"openai   {address}/v1")
        show(f"metrics  {address}/metrics")
        show(
            f"curl -s {address}/v1/completions -H 'Content-Type: application/json' -d"
            f" '{json.dumps(body)}'"
        )
        show("ready; Ctrl-C stops it")

    run(config.gateway, make_gateway, ready=ready, check=check)
