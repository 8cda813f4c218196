"""Writes what operators look at, beside the launch files: alerts and recorded figures for
Prometheus, a dashboard for Grafana, and a compose file with both.

    prometheus.yml                 scrapes the server on this machine, and loads the rules
    prometheus-rules.yml           recorded figures, and alerts that say what to do
    grafana-dashboard.json         the figures over time
    docker-compose.monitoring.yml  Prometheus and Grafana, on loopback

An alert compares a recorded figure with a recorded limit of its own (`...:expected`, `...:limit`,
`...:break_even`), so a limit is changed in one place. Where the build has measured or stated it,
the limit is that number; elsewhere it is the deployment's own last day. The rules that a validation
writes beside its report have its measurements.

The two kinds of server differ in the names of their metrics alone: `Series` has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.triton.tensors.contract import TOKENS_PER_STEP_BUCKETS

__all__ = [
    "EMBEDDED_JOB",
    "FILES",
    "RULES_FILE",
    "Expected",
    "Monitored",
    "compose",
    "dashboard",
    "prometheus",
    "rules",
    "write",
    "write_rules",
]

EMBEDDED_JOB = "toolkit"  # an embedded engine's repository does not hold the deployment's name
RULES_FILE = "prometheus-rules.yml"
DASHBOARD_FILE = "grafana-dashboard.json"
PROMETHEUS_FILE = "prometheus.yml"
COMPOSE_FILE = "docker-compose.monitoring.yml"
FILES = (PROMETHEUS_FILE, RULES_FILE, DASHBOARD_FILE, COMPOSE_FILE)

PROMETHEUS_IMAGE = "prom/prometheus:v3.5.0"
GRAFANA_IMAGE = "grafana/grafana:12.1.0"
PROMETHEUS_ADDRESS = "127.0.0.1:9090"
GRAFANA_PORT = 3000
DATASOURCE = {"type": "prometheus", "uid": "toolkit-prometheus"}
# The version of its dashboards' JSON that Grafana 10 wrote; later ones migrate it on loading.
DASHBOARD_SCHEMA = 39

WINDOW = "10m"  # over which rates and percentiles are recorded
INTERVAL = "30s"
# Of the tokens accepted beyond the one that every step gives. Acceptance differs from text to text.
KEPT_SHARE = 0.7
SLOWER_THAN_LAST_DAY = 3.0
# Tokens per step below which drafting costs more than it saves, where the build did not measure it:
# a step also drafts, and verifies several tokens.
BREAK_EVEN = 1.1
MAX_ERROR_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Series:
    """The names of a server's metrics. ttft, itl and queue are histograms of seconds. failed:
    matches the requests that failed. outcome: the label that says how a request ended.
    """

    requests: str
    failed: str
    outcome: str
    ttft: str
    itl: str
    queue: str
    waiting: str
    running: str
    output_tokens: str
    steps: str
    accepted: str
    drafted: str
    reasons: str | None = None  # verify steps by the reason of their draft length

    @property
    def names(self) -> tuple[str, ...]:
        """Every name as it stands on the metrics page."""
        histograms = (f"{name}_bucket" for name in (self.ttft, self.itl, self.queue))
        return (
            self.requests,
            *histograms,
            self.waiting,
            self.running,
            self.output_tokens,
            self.steps,
            self.accepted,
            self.drafted,
            *([self.reasons] if self.reasons else []),
        )


TOOLKIT = Series(
    requests="toolkit_requests",
    failed='outcome=~"error|deadline|overloaded"',
    outcome="outcome",
    ttft="toolkit_ttft_seconds",
    itl="toolkit_itl_seconds",
    queue="toolkit_queue_seconds",
    waiting="toolkit_queued_requests",
    running="toolkit_active_requests",
    output_tokens="toolkit_output_tokens",
    steps="toolkit_verify_steps",
    accepted="toolkit_accepted_draft_tokens",
    drafted="toolkit_draft_tokens",
    reasons="toolkit_draft_len_steps",
)
# vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py of 0.32.0. A failed request has no
# `vllm:request_success`, so requests are those of its HTTP server
# (vllm/entrypoints/serve/instrumentator/metrics.py).
VLLM = Series(
    requests="http_requests_total",
    failed='status="5xx"',
    outcome="status",
    ttft="vllm:time_to_first_token_seconds",
    itl="vllm:inter_token_latency_seconds",
    queue="vllm:request_queue_time_seconds",
    waiting="vllm:num_requests_waiting",
    running="vllm:num_requests_running",
    output_tokens="vllm:generation_tokens_total",
    steps="vllm:spec_decode_num_drafts_total",
    accepted="vllm:spec_decode_num_accepted_tokens_total",
    drafted="vllm:spec_decode_num_draft_tokens_total",
)
TOKENS_PER_STEP = "toolkit_tokens_per_step"
VLLM_ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True, slots=True)
class Monitored:
    """What is looked at. job: the label that tells it from other deployments. port: of its metrics
    page on this machine. max_draft_len 0: it does not speculate. is_vllm: vLLM's own server.
    counts_positions, counts_waits: whether the server tells accepted tokens by position, and how
    long requests waited; TensorRT-LLM tells neither.
    """

    job: str
    port: int
    max_draft_len: int
    is_vllm: bool = False
    counts_positions: bool = True
    counts_waits: bool = True

    @property
    def series(self) -> Series:
        return VLLM if self.is_vllm else TOOLKIT

    @property
    def reasons(self) -> str | None:
        """The series of verify steps by reason, where the loop that speculates is the toolkit's."""
        return self.series.reasons if self.counts_positions else None


@dataclass(frozen=True, slots=True)
class Expected:
    """What the build has measured or stated; None: compare with the last day.

    acceptance_length: tokens per verify step. break_even: tokens per step at which speculation
    costs as much as it saves. ttft_p99_s: the limit of the YAML.
    """

    acceptance_length: float | None = None
    break_even: float | None = None
    ttft_p99_s: float | None = None


def write(monitored: Monitored, folder: Path) -> None:
    """Write all files into `folder`."""
    write_rules(monitored, Expected(), folder)
    texts = {
        PROMETHEUS_FILE: _yaml(prometheus(monitored)),
        DASHBOARD_FILE: json.dumps(dashboard(monitored), indent=1) + "\n",
        COMPOSE_FILE: _yaml(compose(monitored)),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def write_rules(monitored: Monitored, expected: Expected, folder: Path) -> None:
    """Write the rule file alone."""
    (folder / RULES_FILE).write_text(_yaml(rules(monitored, expected)), encoding="utf-8")


def rules(monitored: Monitored, expected: Expected) -> dict[str, Any]:
    """The content of the rule file."""
    return {
        "groups": [
            {
                "name": f"{monitored.job} figures",
                "interval": INTERVAL,
                "rules": [
                    {"record": name, "expr": expr, "labels": {"job": monitored.job}}
                    for name, expr in _recorded(monitored, expected).items()
                ],
            },
            {"name": f"{monitored.job} alerts", "rules": _alerts(monitored)},
        ]
    }


def _recorded(monitored: Monitored, expected: Expected) -> dict[str, str]:
    """Name -> expression. A limit that no build gave is a figure of the last day."""
    series = monitored.series
    recorded = {
        "toolkit:errors:share": (
            f"{_rate(monitored, series.requests, series.failed)}"
            f" / {_rate(monitored, series.requests)}"
        ),
        "toolkit:ttft_seconds:p99": _quantile(monitored, 0.99, series.ttft),
        "toolkit:itl_seconds:p99": _quantile(monitored, 0.99, series.itl),
    }
    recorded["toolkit:ttft_seconds:p99_limit"] = _limit(
        monitored,
        expected.ttft_p99_s,
        f"{SLOWER_THAN_LAST_DAY:g} * {_last_day(monitored, 'toolkit:ttft_seconds:p99')}",
    )
    if monitored.max_draft_len:
        recorded["toolkit:acceptance_length:mean"] = (
            f"1 + {_rate(monitored, series.accepted)} / {_rate(monitored, series.steps)}"
        )
        recorded["toolkit:acceptance_length:expected"] = _limit(
            monitored,
            expected.acceptance_length,
            _last_day(monitored, "toolkit:acceptance_length:mean"),
        )
        recorded["toolkit:acceptance_length:break_even"] = f"vector({_break_even(expected):.3f})"
    return recorded


def _break_even(expected: Expected) -> float:
    return BREAK_EVEN if expected.break_even is None else expected.break_even


def _limit(monitored: Monitored, stated: float | None, otherwise: str) -> str:
    return otherwise if stated is None else f"vector({stated:.4g})"


def _last_day(monitored: Monitored, name: str) -> str:
    return f"avg_over_time({_of(monitored, name)}[1d] offset 1h)"


def _of(monitored: Monitored, name: str, matcher: str = "") -> str:
    matchers = ",".join([f'job="{monitored.job}"', *([matcher] if matcher else [])])
    return f"{name}{{{matchers}}}"


def _rate(monitored: Monitored, name: str, matcher: str = "", by: str = "job") -> str:
    return f"sum by ({by}) (rate({_of(monitored, name, matcher)}[{WINDOW}]))"


def _quantile(monitored: Monitored, share: float, histogram: str) -> str:
    return f"histogram_quantile({share:g}, {_rate(monitored, f'{histogram}_bucket', by='job, le')})"


def _alerts(monitored: Monitored) -> list[dict[str, Any]]:
    series = monitored.series

    def figure(name: str) -> str:
        return _of(monitored, name)

    waiting = f"sum by (job) ({figure(series.waiting)})"
    alerts = [
        _alert(
            "ServerNotReady",
            f"{figure('up')} == 0 or absent({figure(series.running)})",
            "2m",
            "critical",
            "no server answers, or its model is not loaded",
            "Look at the end of the server's log; launch.sh starts it again.",
        ),
        _alert(
            "RequestsFail",
            f"{figure('toolkit:errors:share')} > {MAX_ERROR_SHARE:g}",
            "5m",
            "critical",
            "{{ $value | humanizePercentage }} of the requests fail",
            f"The label {series.outcome} of {series.requests} says how. Overloaded: add servers or"
            " raise triton.max_queue_size. Errors: the server's log has the reason.",
        ),
        _alert(
            "FirstTokenLate",
            f"{figure('toolkit:ttft_seconds:p99')} > {figure('toolkit:ttft_seconds:p99_limit')}",
            "10m",
            "warning",
            "p99 of the time to first token is {{ $value | humanizeDuration }}, above its limit",
            "If the queue grows too, there are more requests than this deployment serves: add"
            " servers. If not, prompts have become longer, or the machine is busy.",
        ),
        _alert(
            "QueueGrows",
            f"min_over_time(({waiting})[10m:1m]) > 0 and deriv(({waiting})[10m:1m]) > 0",
            "5m",
            "warning",
            "requests wait, and ever more of them",
            "More requests come than this deployment serves. Add servers, or let clients retry"
            " later.",
        ),
    ]
    if not monitored.max_draft_len:
        return alerts
    if monitored.reasons is not None:
        failed = _rate(monitored, monitored.reasons, 'reason="draft failed"')
        alerts.append(
            _alert(
                "DraftFails",
                f"{failed} > 0",
                WINDOW,
                "warning",
                "drafts fail again and again, and the rest of their requests is decoded plainly",
                "No request fails by it, but they are slower. The server's log has the draft's"
                " error after 'since the draft failed'; the gateway's log has it as draft_failure.",
            )
        )
    length = figure("toolkit:acceptance_length:mean")
    wanted = figure("toolkit:acceptance_length:expected")
    return [
        *alerts,
        _alert(
            "AcceptanceCollapsed",
            f"{length} - 1 < {KEPT_SHARE:g} * ({wanted} - 1)",
            "15m",
            "warning",
            "a verify step gives {{ $value | humanize }} tokens beyond its own, and the build more",
            "The traffic is unlike what the draft was chosen on, or the draft is not the one that"
            " was built: toolkit validate says which. toolkit tune on prompts of today finds the"
            " best draft length for them.",
        ),
        _alert(
            "SpeculationDoesNotPay",
            f"{length} < {figure('toolkit:acceptance_length:break_even')}",
            "30m",
            "warning",
            "a verify step gives {{ $value | humanize }} tokens, fewer than it costs",
            "Plain decoding is faster on this traffic: set speculation.kind: none, or a shorter"
            " max_draft_len (toolkit tune).",
        ),
    ]


def _alert(
    name: str, expr: str, lasting: str, severity: str, summary: str, step: str
) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expr,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {"summary": f"{{{{ $labels.job }}}}: {summary}", "description": step},
    }


def prometheus(monitored: Monitored) -> dict[str, Any]:
    """The content of prometheus.yml: one target on this machine."""
    return {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": [RULES_FILE],
        "scrape_configs": [
            {
                "job_name": monitored.job,
                "static_configs": [{"targets": [f"127.0.0.1:{monitored.port}"]}],
            }
        ],
    }


def compose(monitored: Monitored) -> dict[str, Any]:
    """The content of the compose file. Both programs use this machine's network, since the server's
    metrics page is on its loopback; they listen on loopback, too.
    """
    folder = "/etc/grafana/provisioning"
    return {
        "services": {
            "prometheus": {
                "image": PROMETHEUS_IMAGE,
                "network_mode": "host",
                "command": [
                    f"--config.file=/etc/prometheus/{PROMETHEUS_FILE}",
                    f"--web.listen-address={PROMETHEUS_ADDRESS}",
                    "--storage.tsdb.path=/prometheus",
                    "--storage.tsdb.retention.time=30d",
                ],
                "volumes": [
                    f"./{PROMETHEUS_FILE}:/etc/prometheus/{PROMETHEUS_FILE}:ro",
                    f"./{RULES_FILE}:/etc/prometheus/{RULES_FILE}:ro",
                    "prometheus:/prometheus",
                ],
                "restart": "unless-stopped",
            },
            "grafana": {
                "image": GRAFANA_IMAGE,
                "network_mode": "host",
                "environment": {
                    "GF_SERVER_HTTP_ADDR": "127.0.0.1",
                    "GF_SERVER_HTTP_PORT": str(GRAFANA_PORT),
                    "GF_SECURITY_ADMIN_PASSWORD": "${GRAFANA_PASSWORD:?choose a password}",
                },
                "configs": [
                    {"source": "datasource", "target": f"{folder}/datasources/toolkit.yml"},
                    {"source": "dashboards", "target": f"{folder}/dashboards/toolkit.yml"},
                ],
                "volumes": [
                    f"./{DASHBOARD_FILE}:/var/lib/grafana/dashboards/{DASHBOARD_FILE}:ro",
                    "grafana:/var/lib/grafana",
                ],
                "depends_on": ["prometheus"],
                "restart": "unless-stopped",
            },
        },
        "configs": {
            "datasource": {"content": _yaml(_datasource())},
            "dashboards": {"content": _yaml(_provider())},
        },
        "volumes": {"prometheus": {}, "grafana": {}},
    }


def _datasource() -> dict[str, Any]:
    return {
        "apiVersion": 1,
        "datasources": [
            {
                "name": "Prometheus",
                **DATASOURCE,
                "access": "proxy",
                "url": f"http://{PROMETHEUS_ADDRESS}",
                "isDefault": True,
            }
        ],
    }


def _provider() -> dict[str, Any]:
    return {
        "apiVersion": 1,
        "providers": [
            {
                "name": "toolkit",
                "type": "file",
                "options": {"path": "/var/lib/grafana/dashboards"},
            }
        ],
    }


def dashboard(monitored: Monitored) -> dict[str, Any]:
    """The dashboard as Grafana's classic JSON. Panels stand in two columns, in reading order."""
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "description": description,
            "datasource": DATASOURCE,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
            "targets": [
                {
                    "refId": chr(ord("A") + index),
                    "datasource": DATASOURCE,
                    "expr": expr,
                    "legendFormat": legend,
                    "range": True,
                }
                for index, (legend, expr) in enumerate(queries.items())
            ],
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "options": {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            },
        }
        for number, (title, unit, description, queries) in enumerate(_panels(monitored))
    ]
    return {
        "id": None,
        "uid": f"toolkit-{monitored.job}"[:40],
        "title": f"{monitored.job}: serving and speculation",
        "tags": ["toolkit"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": DASHBOARD_SCHEMA,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": []},
        "annotations": {"list": []},
        "panels": panels,
    }


def _panels(monitored: Monitored) -> list[tuple[str, str, str, Mapping[str, str]]]:
    """(title, unit, description, legend -> query) of each panel."""
    series = monitored.series

    def figure(name: str) -> str:
        return _of(monitored, name)

    def spread(histogram: str) -> dict[str, str]:
        return {
            f"p{100 * share:g}": _quantile(monitored, share, histogram)
            for share in (0.5, 0.9, 0.99)
        }

    waits = spread(series.queue) if monitored.counts_waits else {}
    panels: list[tuple[str, str, str, Mapping[str, str]]] = [
        (
            "Time to first token",
            "s",
            "On the server: with its queue, without the network.",
            {**spread(series.ttft), "limit of p99": figure("toolkit:ttft_seconds:p99_limit")},
        ),
        (
            "Gap between tokens",
            "s",
            "A chunk of several tokens counts as several short gaps.",
            spread(series.itl),
        ),
        (
            "Requests at once",
            "short",
            "Running requests hold a slot; waiting ones have none yet.",
            {
                "running": f"sum by (job) ({figure(series.running)})",
                "waiting": f"sum by (job) ({figure(series.waiting)})",
            },
        ),
        (
            "Requests by outcome",
            "reqps",
            "How requests ended.",
            {
                f"{{{{{series.outcome}}}}}": _rate(
                    monitored, series.requests, by=f"job, {series.outcome}"
                ),
            },
        ),
        (
            "Output tokens",
            "short",
            "Tokens per second of all requests.",
            {"tokens/s": _rate(monitored, series.output_tokens)},
        ),
    ]
    if waits:
        panels.append(("Wait for a slot", "s", "From arrival until the prompt was begun.", waits))
    if monitored.max_draft_len:
        panels += _speculation_panels(monitored)
    return panels


def _speculation_panels(monitored: Monitored) -> list[tuple[str, str, str, Mapping[str, str]]]:
    series = monitored.series

    def figure(name: str) -> str:
        return _of(monitored, name)

    panels: list[tuple[str, str, str, Mapping[str, str]]] = [
        (
            "Tokens per verify step",
            "short",
            "Accepted draft tokens and one more. Below break-even, plain decoding is faster.",
            {
                "measured": figure("toolkit:acceptance_length:mean"),
                "expected": figure("toolkit:acceptance_length:expected"),
                "break-even": figure("toolkit:acceptance_length:break_even"),
            },
        ),
        (
            "Draft tokens",
            "short",
            "Tokens per second: the distance between the two is work that was thrown away.",
            {
                "drafted": _rate(monitored, series.drafted),
                "accepted": _rate(monitored, series.accepted),
            },
        ),
    ]
    if monitored.counts_positions:
        panels.append(
            (
                "Acceptance by position",
                "percentunit",
                "Share of the verify steps that accepted the draft token at this position. If only"
                " the later ones fall, a shorter draft pays.",
                _by_position(monitored),
            )
        )
    if monitored.reasons is not None:
        panels.append(
            (
                "Verify steps by reason",
                "short",
                "Steps per second, by why they drafted as many tokens as they did. 'draft failed':"
                " the draft raised an error, gave no answer, or numbers that are not finite.",
                {"{{reason}}": _rate(monitored, monitored.reasons, by="job, reason")},
            )
        )
    return panels


def _by_position(monitored: Monitored) -> dict[str, str]:
    """A step that accepts the token at position i, from 1, gives more than i tokens."""
    if monitored.is_vllm:
        accepted = _rate(monitored, VLLM_ACCEPTED_AT, by="job, position")
        steps = _rate(monitored, VLLM.steps)
        return {"{{position}}, from 0": f"{accepted} / on (job) group_left {steps}"}
    steps = _rate(monitored, f"{TOKENS_PER_STEP}_count")
    return {
        f"position {position}": "1 - "
        + _rate(monitored, f"{TOKENS_PER_STEP}_bucket", f'le="{position}"')
        + f" / {steps}"
        for position in range(1, monitored.max_draft_len + 1)
        if float(position) in TOKENS_PER_STEP_BUCKETS
    }


def _yaml(data: Mapping[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(dict(data), sort_keys=False, width=100, allow_unicode=False)
    return text
