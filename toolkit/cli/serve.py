"""`toolkit serve`: start the server of a deployment, and stop it cleanly on Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.common import (
    Config,
    Debug,
    Overrides,
    Rehash,
    app,
    here,
    load,
    located_plan_errors,
    package_to_serve,
    say,
    shell_path,
    show,
)
from toolkit.cli.foreground import Signal, interrupted_by_signals
from toolkit.config.hosts import OPEN_LISTENER, is_loopback

if TYPE_CHECKING:
    from toolkit.config.schema import DeploymentConfig
    from toolkit.records.build import TritonRepository
    from toolkit.triton.process.server import TritonServer
    from toolkit.workflows.serve_vllm import Address

CHECK_INTERVAL_S = 0.5
URL = re.compile(r"^(?:(?:grpc|http)://)?(?P<address>\[[0-9a-fA-F:]+\]:\d+|[\w.-]+:\d+)/?$")


@app.command()
def serve(
    config: Config,
    overrides: Overrides = None,
    gateway: Annotated[
        bool,
        typer.Option(
            "--gateway", help="Also start the gateway, on a free port or --set gateway.port=N."
        ),
    ] = False,
    rehash: Rehash = False,
    debug: Debug = False,
) -> None:
    """Serve the packaged repository until Ctrl-C.

    The server is tritonserver, and for engine.kind vllm vLLM's own server. It listens on free
    ports on loopback. --set triton.http_port=8000 (also grpc_port, metrics_port and host)
    chooses them.
    """
    import time

    from toolkit.cli.progress import displayed
    from toolkit.workflows.serve import serve as serve_repository
    from toolkit.workflows.serve_vllm import VllmServers

    loaded = load(config, overrides)
    with located_plan_errors(config, overrides):
        packaged = package_to_serve(loaded, rehash=rehash)
    repository = here().repository(loaded.name)
    host = loaded.triton.host
    if not is_loopback(host):
        say(f"warning: {OPEN_LISTENER.format(address=host)}; put a proxy or a firewall before it")
    is_ready = False
    try:
        with interrupted_by_signals(), contextlib.ExitStack() as running:
            say(f"starting {loaded.capabilities.server} on {repository}")
            with displayed() as display:
                starting = serve_repository(
                    loaded,
                    repository,
                    triton=loaded.triton,
                    cache=here().vllm_cache,
                    progress=display.started("serve"),
                )
                _, servers = running.enter_context(starting)
            if isinstance(servers, VllmServers):
                _print_vllm(servers.address, loaded.validation.prompts)
            else:
                _print_triton(servers.server, packaged, loaded)
            is_ready = True
            try:
                if gateway:
                    from toolkit.cli.gateway import run_gateway
                    from toolkit.workflows.gateway import gateway_of, one_arm

                    served = one_arm(loaded, servers.address.url)
                    run_gateway(loaded, gateway_of(loaded, served), servers.check)
                    return
                show("ready; Ctrl-C stops it")
                while True:
                    time.sleep(CHECK_INTERVAL_S)
                    servers.check()
            except Signal:
                say("stopping")
                raise
    except Signal as signalled:
        show("stopped")
        if not is_ready:  # whoever waited for the server has to know that there was none
            raise SystemExit(128 + signalled.number) from signalled


def _print_triton(
    server: TritonServer, packaged: TritonRepository, config: DeploymentConfig
) -> None:
    show(f"http     http://{server.http_url}")
    show(f"grpc     {server.grpc_url}")
    show(f"metrics  {server.metrics_url}")
    _print_examples(server, packaged, config)


def _print_vllm(address: Address, prompts: Path) -> None:
    """Print where the server is, a command that sends a request to it, and one that measures it."""
    show(f"openai   {address.url}")
    show(f"metrics  {address.metrics_url}")
    prompt = "def read_config(path):"
    body = {"model": address.model, "prompt": prompt, "max_tokens": 32, "temperature": 0}
    show(
        f"curl -s {address.url}/completions -H 'Content-Type: application/json'"
        f" -d '{json.dumps(body)}'"
    )
    show(
        f"toolkit bench {address.url} --protocol {address.protocol} --model"
        f" {address.model} --prompts {shell_path(prompts)} --metrics {address.metrics_url}"
    )


def _print_examples(
    server: TritonServer, packaged: TritonRepository, config: DeploymentConfig
) -> None:
    """Print commands that send a request to the server, and one that measures it if it streams."""
    model = packaged.model
    # The two layouts name these inputs differently.
    stream, max_tokens = "streaming", "sampling_param_max_tokens"
    if packaged.layout == "bls":
        stream, max_tokens = "stream", "max_tokens"
    body = json.dumps({"text_input": "def read_config(path):", stream: False, max_tokens: 32})
    show(f"curl -s http://{server.http_url}/v2/models/{model}/generate -d '{body}'")
    show(f'toolkit generate {server.grpc_url} "def read_config(path):"')
    if config.triton.decoupled:
        show(
            f"toolkit bench {server.grpc_url} --prompts {shell_path(config.validation.prompts)}"
            f" --metrics {server.metrics_url}"
        )
