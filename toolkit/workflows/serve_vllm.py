"""Serve a packaged repository of the kind vllm by vLLM's own server, and its plain arm by another.

No request turns vLLM's speculation off, so plain decoding has a server of its own. Both run at the
same time where the machine has the memory. Requests go one at a time, and the other server is
paused meanwhile, so each request meets a machine that is its own. Elsewhere the servers take turns,
as for TensorRT-LLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import DeploymentConfig, TritonConfig
from toolkit.errors import UsageError
from toolkit.interfaces import Progress
from toolkit.pipeline.machine import available_memory_bytes, gpus
from toolkit.words import WireProtocol

if TYPE_CHECKING:
    from toolkit.client import RequestTiming
    from toolkit.engines.vllm.server import VllmServer
    from toolkit.openai_client import OpenAiClient

__all__ = [
    "PLAIN",
    "SERVED",
    "Address",
    "Routed",
    "VllmServers",
    "check_vllm",
    "has_room_for_two",
    "vllm_server",
]

SERVED, PLAIN = "served", "plain"  # arms: the deployment as it is, or without speculation
GIB = 1 << 30
# Of one server beside weights and KV cache: three processes with their libraries, activations and
# compiled graphs. 1.9 GiB were seen with a model of 10 MB.
OVERHEAD_BYTES = 3 * GIB
# The first start compiles: 160 s were seen on two busy cores, for a model of 10 MB.
START_TIMEOUT_S = 900.0
FREE = 0.9  # share of the available memory that two servers may take


def check_vllm(config: DeploymentConfig) -> None:
    """Raises BackendUnavailable if this machine has no vLLM of the right version, UsageError if the
    deployment needs more than this machine.
    """
    from toolkit.engines.spec import engine_spec
    from toolkit.engines.vllm.environment import find_environment

    engine = config.vllm_engine
    assert engine is not None, "only for the kind vllm"
    nodes = -(-engine.world_size // engine.gpus_per_node)
    if nodes > 1:
        raise UsageError(
            f"engine.kind vllm over {nodes} nodes is not served by this command",
            hint=(
                "Use toolkit package, start it with the launch files of the repository, and judge"
                " it with toolkit bench."
            ),
        )
    environment = find_environment(engine.python, version=engine.vllm)
    device, hint = engine_spec(config, "target").device, "Use --until package here."
    if environment.platform not in (None, device):
        raise UsageError(
            f"the deployment is for {device}, and vLLM in {environment.python} is built for"
            f" {environment.platform}",
            hint=f"{hint} Else name another Python in engine.python, or set engine.device.",
        )
    gpu_count = len(gpus()) if device == "cuda" else 0
    if device == "cuda" and gpu_count < engine.world_size:
        plural = "s" if engine.world_size > 1 else ""
        raise UsageError(
            f"engine.kind vllm needs {engine.world_size} NVIDIA GPU{plural} (here:"
            f" {gpu_count or 'none'})",
            hint=f"{hint} Run the whole build on the machine with the GPUs.",
        )


def has_room_for_two(config: DeploymentConfig, repository: Path) -> bool:
    """Whether the servers of both arms fit into this machine at the same time.

    On GPUs each takes `gpu_memory_utilization` of the memory, whatever the model's size.
    """
    engine = config.vllm_engine
    assert engine is not None, "only for the kind vllm"
    if engine.device != "cpu" and gpus():
        return 2 * engine.gpu_memory_utilization <= 1.0
    weights = sum(file.stat().st_size for file in repository.rglob("*.safetensors"))
    one = weights + engine.world_size * (engine.kv_cache_gib * GIB) + OVERHEAD_BYTES
    return 2 * one <= FREE * available_memory_bytes()


@dataclass(frozen=True, slots=True)
class Address:
    """Where a running server is called. url: host:port for gRPC, else a whole URL. model: its name
    for clients. metrics_url: the whole URL of its counters.
    """

    url: str
    model: str
    metrics_url: str
    protocol: WireProtocol


@dataclass(frozen=True, slots=True)
class Routed:
    """Both arms as one endpoint: num_draft_tokens 0 goes to the plain server, None or the length
    that is served to the other. plain and speculative: clients of the two servers. alone: pauses
    all servers but that of an arm.
    """

    plain: OpenAiClient
    speculative: OpenAiClient
    max_draft_len: int
    alone: Callable[[str], AbstractContextManager[None]]

    def measure(self, prompts: Iterable[str], **overrides: Any) -> list[RequestTiming]:
        """As `Client.measure`. Raises RequestRefused for another draft length."""
        from toolkit.client import RequestRefused

        draft_len = overrides.pop("num_draft_tokens", None)
        if draft_len == 0:
            with self.alone(PLAIN):
                return self.plain.measure(prompts, **overrides)
        if draft_len not in (None, self.max_draft_len):
            raise RequestRefused(
                f"the draft length is fixed at {self.max_draft_len} when the server starts, and the"
                f" request states {draft_len}"
            )
        with self.alone(SERVED):
            return self.speculative.measure(prompts, **overrides)


@dataclass
class VllmServers:
    """Runs the servers of a deployment. They end with the block.

    log_path: the log of the deployment as it is; the plain arm's is kept beside it, and those of
    earlier starts with numbers. cache: as `VllmServer`.
    """

    config: DeploymentConfig
    repository: Path
    triton: TritonConfig
    cache: Path | None = None
    log_path: Path | None = None
    progress: Progress | None = None
    starts: int = 0
    running: dict[str, VllmServer] = field(default_factory=dict)  # by arm
    _open: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> VllmServers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the servers. If one of them ended by itself, that is why the block failed: raises
        ServerError with the end of its log.
        """
        from toolkit.client import ServerUnavailable
        from toolkit.engines.vllm.server import GONE_S

        try:
            is_lost = isinstance(error, ServerUnavailable) or isinstance(
                getattr(error, "__cause__", None), ServerUnavailable
            )
            if is_lost:
                self._wait_for_an_end(GONE_S)
        finally:
            self._open.close()

    def _wait_for_an_end(self, wait_s: float) -> None:
        """Raise ServerError as soon as one of the servers has ended; return if none does."""
        deadline = time.monotonic() + wait_s
        self.check()
        while time.monotonic() < deadline:
            time.sleep(0.1)
            self.check()

    @property
    def server(self) -> VllmServer:
        """The server that was started last: with speculation, if both run."""
        assert self.running, "start an arm first"
        return list(self.running.values())[-1]

    def start(self, arm: str) -> OpenAiClient:
        """Stop what runs, serve this arm, and return its client. Raises ServerError."""
        self._open.close()
        self.running.clear()
        if self.starts and self.log_path is not None and self.log_path.exists():
            self.log_path.rename(self.log_path.with_suffix(f".{self.starts}.log"))
        self.starts += 1
        return self._start(arm, self.log_path, self.triton)

    def start_both(self) -> Routed:
        """Serve both arms, the plain one on another free port. Raises ServerError."""
        plain_log = None
        if self.log_path is not None:
            plain_log = self.log_path.with_suffix(f".{PLAIN}.log")
        plain = self._start(PLAIN, plain_log, self.triton.on_free_ports)
        speculative = self._start(SERVED, self.log_path, self.triton)
        draft_len = self.config.speculation.longest_draft
        return Routed(plain, speculative, draft_len, self._alone)

    @property
    def alone(self) -> Mapping[str, Callable[[], AbstractContextManager[None]]]:
        """For `toolkit.bench`: pauses the server that an arm of a run does not measure."""
        return {"baseline": partial(self._alone, PLAIN), "served": partial(self._alone, SERVED)}

    @contextmanager
    def _alone(self, arm: str) -> Iterator[None]:
        with ExitStack() as others:
            for name, server in self.running.items():
                if name != arm:
                    others.enter_context(server.paused())
            yield

    @property
    def address(self) -> Address:
        """Where the server that was started last is called."""
        return _address(self.server)

    @property
    def plain_address(self) -> Address | None:
        """Where the server of the plain arm is called, if it runs beside the other."""
        plain = self.running.get(PLAIN)
        return None if plain is None or plain is self.server else _address(plain)

    def counters(self) -> Mapping[str, float]:
        """The counters of all servers that run, added."""
        from toolkit.bench.counters import read_counters

        totals: dict[str, float] = {}
        for server in self.running.values():
            for name, value in read_counters(server.metrics_url).items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def check(self) -> None:
        """Raise ServerError, with the end of the log, if a server is no longer running."""
        for server in self.running.values():
            server.check()

    def _start(self, arm: str, log_path: Path | None, triton: TritonConfig) -> OpenAiClient:
        from toolkit.triton.process.localize import local_args

        server = vllm_server(
            self.config,
            local_args(self.repository, speculates=arm != PLAIN),
            triton,
            cache=self.cache,
            log_path=log_path,
            progress=self.progress,
        )
        self._open.enter_context(server)
        self.running[arm] = server
        return self._open.enter_context(server.client())


def vllm_server(
    config: DeploymentConfig,
    args: Mapping[str, Any],
    triton: TritonConfig,
    *,
    cache: Path | None = None,
    log_path: Path | None = None,
    progress: Progress | None = None,
) -> VllmServer:
    """A server of the deployment with these arguments, which hold this machine's paths. It is not
    started yet. cache, log_path: as `VllmServer`; a CPU has no cache.

    Raises BackendUnavailable without vLLM, UsageError for a draft's path that vLLM misreads.
    """
    from toolkit.engines.spec import engine_spec
    from toolkit.engines.vllm.arguments import check_draft_path, environment_of
    from toolkit.engines.vllm.environment import find_environment
    from toolkit.engines.vllm.server import VllmServer
    from toolkit.triton.package.serve_vllm import thread_binding

    engine, spec = config.vllm_engine, engine_spec(config, "target")
    assert engine is not None and spec.vllm is not None, "only for the kind vllm"
    check_draft_path(args)
    return VllmServer(
        find_environment(engine.python, version=engine.vllm).python,
        args,
        config.name,
        variables={**environment_of(spec, spec.vllm), **thread_binding(args)},
        config=_with_start_timeout(triton),
        # On CPUs vLLM 0.32.0 cannot load what it saved (docs/vllm.md).
        cache=cache if spec.device == "cuda" else None,
        log_path=log_path,
        progress=progress,
        encode=_encoder(Path(args["model"])),
    )


def _with_start_timeout(triton: TritonConfig) -> TritonConfig:
    """The settings with enough time to compile, unless the YAML states a time."""
    if "start_timeout_s" in triton.model_fields_set:
        return triton
    return triton.model_copy(update={"start_timeout_s": START_TIMEOUT_S})


def _address(server: VllmServer) -> Address:
    return Address(f"http://{server.url}/v1", server.name, server.metrics_url, "openai-completions")


def _encoder(model: Path) -> Callable[[str], Sequence[int]]:
    """The tokenizer that the engine's folder holds, opened at its first use."""
    codecs: list[Any] = []

    def encode(prompt: str) -> Sequence[int]:
        from toolkit.speculative.text import TextCodec

        if not codecs:
            codecs.append(TextCodec.from_file(model / "tokenizer.json"))
        ids: list[int] = codecs[0].encode(prompt)
        return ids

    return encode
