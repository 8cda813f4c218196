"""`toolkit serve`: start the server of a deployment, wait until it is ready, stop it cleanly."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from typing import Any

from toolkit.cli.common import (
    Config,
    Debug,
    Overrides,
    Rehash,
    app,
    as_typed,
    here,
    load,
    packaged_here,
    placed,
    say,
    show,
)

URL = re.compile(r"^(?:(?:grpc|http)://)?(?P<address>\[[0-9a-fA-F:]+\]:\d+|[\w.-]+:\d+)/?$")


@app.command()
def serve(
    config: Config, overrides: Overrides = None, rehash: Rehash = False, debug: Debug = False
) -> None:
    """Start tritonserver on the packaged repository, until Ctrl-C.

    It takes free ports on loopback; --set triton.http_port=8000 (grpc_port, metrics_port, host)
    fixes them.
    """
    import threading

    from toolkit.workflows.serve import serve as serve_repository

    loaded = load(config, overrides)
    with placed(config, overrides):
        packaged = packaged_here(loaded, rehash=rehash)
    repository = here().repository(loaded.name)
    stop = threading.Event()
    with _signals(stop.set):
        say(f"starting tritonserver on {repository}")
        with serve_repository(loaded, repository, triton=loaded.triton) as (_, servers):
            server = servers.server
            bls_words, llmapi_words = (
                ("stream", "max_tokens"),
                ("streaming", "sampling_param_max_tokens"),
            )
            stream, tokens = bls_words if packaged.layout == "bls" else llmapi_words
            model = packaged.model
            body = json.dumps({"text_input": "def read_config(path):", stream: False, tokens: 32})
            show(f"http     http://{server.http_url}")
            show(f"grpc     {server.grpc_url}")
            show(f"metrics  {server.metrics_url}")
            if loaded.triton.decoupled:
                show(f"curl -s http://{server.http_url}/v2/models/{model}/generate -d '{body}'")
                show(f'toolkit generate {server.grpc_url} "def read_config(path):"')
                prompts, which = (
                    as_typed(loaded.validation.prompts),
                    "" if model == "tensorrt_llm" else f" --model {model}",
                )
                show(
                    f"toolkit bench {server.grpc_url} --prompts {prompts} --metrics"
                    f" {server.metrics_url}{which}"
                )
            show("ready; Ctrl-C stops it")
            while not stop.wait(0.5):
                server.check()
            say("stopping")
    show("stopped")


@contextlib.contextmanager
def _signals(stop: Any) -> Iterator[None]:
    """Ctrl-C and SIGTERM call `stop` inside the block."""
    before = {
        number: signal.signal(number, lambda *_: stop())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
