"""Rules about the `triton` section: a key that the packaged repository cannot carry is refused.
And about what is measured of it: whether there are streams, and time enough for `validation.load`.

Those of the kind vllm are in `vllm.py`.
"""

from __future__ import annotations

from toolkit.config.hosts import OPEN_LISTENER, is_loopback
from toolkit.config.schema import LatencyGates, LoadGates
from toolkit.plan.rules.findings import Check, Findings, RuleFinding, refuse
from toolkit.plan.subject import Subject

__all__ = ["CHECKS"]

# What a key sets in our model.py, and what stands in its place in the container's.
WITHOUT_EFFECT = {
    "max_queue_size": "the runtime queues requests itself, without a limit",
    "default_max_tokens": "a request without max_tokens gets the default of SamplingParams",
    "request_timeout_s": "the container's model.py ends no request by time",
    "stream_interval_ms": "the container's model.py sends one chunk per step",
}
WITHOUT_GAPS = "an answer has no gaps between chunks, so this is not measured"
# What becomes of a latency if an answer comes in one piece.
OF_WHOLE_ANSWERS = {
    "ttft": "the first token comes with the last, so this is the time of the whole answer",
    "tpot": "all tokens come at once, so this is 0",
    "itl": WITHOUT_GAPS,
    "icl": WITHOUT_GAPS,
}


def _model_py(subject: Subject) -> Findings:
    stated = subject.config.triton
    if stated.model_py == "ours" or subject.vllm is not None:
        return
    if subject.pytorch_flow is None:
        yield refuse(
            "triton.model_py",
            f"kind {subject.config.engine.kind} is served by the toolkit's own models; only"
            " trtllm_pytorch has a model.py in NVIDIA's container",
            "remove this line",
        )
        return
    for key, instead in WITHOUT_EFFECT.items():
        if key in stated.model_fields_set:
            what = f"with model_py container there is no such setting: {instead}"
            yield refuse(f"triton.{key}", what, "remove this line, or set model_py: ours")


def _backend(subject: Subject) -> Findings:
    if "backend" not in subject.config.triton.model_fields_set or subject.vllm is not None:
        return
    if subject.config.engine.kind != "torch":
        why = f"kind {subject.config.engine.kind} is served with the backends of NVIDIA's container"
    elif subject.config.capabilities.layout == "bls":
        why = (
            "the models of layout bls call each other, which only the Python backend can do; its"
            " draft, which calls none, has the toolkit's own where there is a C++ compiler"
        )
    else:
        return
    yield refuse("triton.backend", why, "remove this line")


def _on_draft_failure(subject: Subject) -> Findings:
    is_stated = "on_draft_failure" in subject.config.triton.model_fields_set
    is_judged = subject.vllm is None and subject.config.capabilities.layout != "bls"
    if not is_stated or not is_judged:
        return
    yield refuse(
        "triton.on_draft_failure",
        "in layout llmapi target and draft run in one process, so they fail together",
        "remove this line",
    )


def _host(subject: Subject) -> Findings:
    triton, gateway = subject.config.triton.host, subject.config.gateway.host
    instead = "or remove this line to listen on loopback"
    if not is_loopback(triton):
        hint = f"put a proxy or a firewall before it, {instead}"
        yield RuleFinding("warning", "triton.host", OPEN_LISTENER.format(address=triton), hint)
    if not is_loopback(gateway):
        hint = f"put TLS before it and set TOOLKIT_API_KEYS, {instead}"
        yield RuleFinding("warning", "gateway.host", OPEN_LISTENER.format(address=gateway), hint)


def _load(subject: Subject) -> Findings:
    limits = subject.config.validation.load
    if limits is None or limits.rate == "auto" or not _stated(limits, "p99"):
        return
    from toolkit.bench.load import load_schedule, needed_requests, needed_seconds

    arms = 2 if subject.config.speculation.is_enabled else 1
    judged, needed = load_schedule(limits.rate, arms, limits).judged, needed_requests(limits)
    if judged < needed:
        seconds = needed_seconds(limits.rate, arms, limits)
        yield RuleFinding(
            "warning",
            "validation.load.max_seconds",
            f"at {limits.rate:g} requests/s {limits.max_seconds:g} s of sending give each arm"
            f" {judged:,} answers, and p99 takes {needed:,}: its gates will be INCONCLUSIVE",
            f"raise it to {seconds:,.0f}, or raise validation.load.rate",
        )


def _streams(subject: Subject) -> Findings:
    """Limits of what only a stream has."""
    config = subject.config
    if config.triton.decoupled or subject.vllm is not None:
        return
    latency, load = config.validation.latency, config.validation.load
    keys = [f"latency.{key}" for key in _stated(latency, "p90")]
    keys += [f"latency.max_ratios.{name}" for name in latency.max_ratios]
    if load is not None:
        keys += [f"load.{key}" for key in _stated(load, "p99")]
        keys += [f"load.goodput.{name}" for name in load.goodput]
    for key in keys:
        name = key.rpartition(".")[2].removeprefix("max_").partition("_")[0]
        if name in OF_WHOLE_ANSWERS:
            what = f"with triton.decoupled: false there are no streams: {OF_WHOLE_ANSWERS[name]}"
            hint = "set triton.decoupled: true, or remove this limit"
            yield RuleFinding("warning", f"validation.{key}", what, hint)


def _stated(gates: LatencyGates | LoadGates, percentile: str) -> list[str]:
    """The keys of limits of latencies at this percentile that are gates."""
    keys = [f"max_{name}_{percentile}_ms" for name in ("ttft", "tpot", "itl", "e2e")]
    return [key for key in keys if getattr(gates, key) is not None]


CHECKS: dict[str, Check] = {
    "toolkit-open-listener": _host,
    "toolkit-load-too-short": _load,
    "toolkit-needs-streams": _streams,
    "toolkit-model-py": _model_py,
    "toolkit-backend": _backend,
    "toolkit-draft-failure": _on_draft_failure,
}
