"""What operators look at: Prometheus' own tool accepts the rules, alerts fire when they should and
not otherwise, Grafana's schema accepts the dashboard, and every name is one that a server exports.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from toolkit.engines.vllm.environment import VllmEnvironment
from toolkit.triton.package.monitoring import (
    COMPOSE_FILE,
    FILES,
    PROMETHEUS_FILE,
    RULES_FILE,
    TOKENS_PER_STEP,
    TOOLKIT,
    VLLM,
    VLLM_ACCEPTED_AT,
    Expected,
    Monitored,
    compose,
    dashboard,
    prometheus,
    rules,
    write,
    write_rules,
)
from toolkit.triton.tensors.contract import METRICS, OUTCOMES

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not on PATH (Debian's package prometheus has it)"
)
MEASURED = Expected(acceptance_length=3.0, break_even=1.6, ttft_p99_s=0.5)
SERVED = Monitored("toolkit", 8002, 4)
CASES = {
    "torch": SERVED,
    "plain": Monitored("toolkit", 8002, 0),
    "long-drafts": Monitored("toolkit", 8002, 16),
    "trtllm": Monitored("llama", 8002, 3, counts_positions=False, counts_waits=False),
    "vllm": Monitored("llama", 8000, 3, is_vllm=True),
}
EXPORTED = {name for spec in METRICS for name in spec.samples}
VLLM_NAMES = {*VLLM.names, VLLM_ACCEPTED_AT}


def promtool(*arguments: str, cwd: Path) -> str:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
@pytest.mark.parametrize("expected", [Expected(), MEASURED], ids=["last-day", "measured"])
@pytest.mark.parametrize("case", CASES)
def test_promtool_accepts_the_rules_and_the_configuration(
    tmp_path: Path, case: str, expected: Expected
) -> None:
    write(CASES[case], tmp_path)
    write_rules(CASES[case], expected, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)
    assert "SUCCESS" in promtool("check", "rules", RULES_FILE, cwd=tmp_path)
    assert "1 rule files found" in promtool("check", "config", PROMETHEUS_FILE, cwd=tmp_path)


FAILED_DRAFTS = 'toolkit_draft_len_steps{job="toolkit",model="m",reason="draft failed"}'


def healthy(**others: str) -> dict[str, str]:
    """Series -> its values every 30 s over two hours: 20 requests a minute, 3 tokens a step, a
    first token within 50 ms.
    """
    label = '{job="toolkit",model="m"}'
    series = {
        'up{job="toolkit"}': "1x240",
        f"toolkit_active_requests{label}": "2x240",
        f"toolkit_queued_requests{label}": "0x240",
        'toolkit_requests{job="toolkit",model="m",outcome="stop"}': "0+10x240",
        f"toolkit_verify_steps{label}": "0+100x240",
        f"toolkit_accepted_draft_tokens{label}": "0+200x240",
        'toolkit_ttft_seconds_bucket{job="toolkit",model="m",le="0.05"}': "0+10x240",
        'toolkit_ttft_seconds_bucket{job="toolkit",model="m",le="1"}': "0+10x240",
        'toolkit_ttft_seconds_bucket{job="toolkit",model="m",le="+Inf"}': "0+10x240",
    }
    assert set(others) <= set(series) | {
        'toolkit_requests{job="toolkit",model="m",outcome="error"}',
        FAILED_DRAFTS,
    }
    return {**series, **others}


FAULTS = {
    "ServerNotReady": ('up{job="toolkit"}', "1x120 0x120"),
    "RequestsFail": ('toolkit_requests{job="toolkit",model="m",outcome="error"}', "0+1x240"),
    "FirstTokenLate": (
        'toolkit_ttft_seconds_bucket{job="toolkit",model="m",le="0.05"}', "0x240",
    ),
    "QueueGrows": ('toolkit_queued_requests{job="toolkit",model="m"}', "0x120 1+1x120"),
    "DraftFails": (FAILED_DRAFTS, "0+1x240"),
    # 1.3 tokens a step, of 3 expected: below break-even, too.
    "AcceptanceCollapsed": (
        'toolkit_accepted_draft_tokens{job="toolkit",model="m"}', "0+30x240",
    ),
}  # fmt: skip


def fired(folder: Path, values: dict[str, str], alerts: dict[str, int], at: str = "110m") -> None:
    """Have promtool check how many of each alert fire then."""
    test = {
        "rule_files": [RULES_FILE],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "30s",
                "input_series": [{"series": name, "values": text} for name, text in values.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
                        " or vector(0)",
                        "eval_time": at,
                        "exp_samples": [{"labels": "{}", "value": count}],
                    }
                    for name, count in alerts.items()
                ],
            }
        ],
    }
    (folder / "test.yml").write_text(yaml.safe_dump(test))
    promtool("test", "rules", "test.yml", cwd=folder)


ALERTS = (*FAULTS, "SpeculationDoesNotPay")


@needs_promtool
def test_no_alert_fires_on_a_healthy_server(tmp_path: Path) -> None:
    write_rules(SERVED, MEASURED, tmp_path)
    fired(tmp_path, healthy(), dict.fromkeys(ALERTS, 0))


@needs_promtool
@pytest.mark.parametrize("name", FAULTS)
def test_an_alert_fires_on_its_fault_and_no_other_does(tmp_path: Path, name: str) -> None:
    write_rules(SERVED, MEASURED, tmp_path)
    series, values = FAULTS[name]
    expected = {alert: int(alert == name) for alert in ALERTS}
    if name == "AcceptanceCollapsed":
        expected["SpeculationDoesNotPay"] = 1
    fired(tmp_path, healthy(**{series: values}), expected)


@needs_promtool
def test_acceptance_may_be_worse_than_measured_and_still_pay(tmp_path: Path) -> None:
    """2.2 tokens a step of 3: of the 2 accepted ones beyond the own, 60 % are left."""
    write_rules(SERVED, MEASURED, tmp_path)
    series, _ = FAULTS["AcceptanceCollapsed"]
    fired(
        tmp_path,
        healthy(**{series: "0+120x240"}),
        {"AcceptanceCollapsed": 1, "SpeculationDoesNotPay": 0},
    )
    fired(
        tmp_path,
        healthy(**{series: "0+150x240"}),
        {"AcceptanceCollapsed": 0, "SpeculationDoesNotPay": 0},
    )


@needs_promtool
def test_one_draft_that_fails_is_no_alert(tmp_path: Path) -> None:
    write_rules(SERVED, MEASURED, tmp_path)
    for at in ("70m", "75m", "110m"):
        fired(tmp_path, healthy(**{FAILED_DRAFTS: "0x120 30x120"}), {"DraftFails": 0}, at)


@needs_promtool
def test_without_measurements_the_last_day_is_the_measure(tmp_path: Path) -> None:
    """Acceptance that falls after two hours is noticed; what was always so is not."""
    write_rules(SERVED, Expected(), tmp_path)
    series, _ = FAULTS["AcceptanceCollapsed"]
    falls = "0+200x160 32000+60x80"
    fired(tmp_path, healthy(**{series: falls}), {"AcceptanceCollapsed": 1})
    fired(tmp_path, healthy(**{series: "0+60x240"}), {"AcceptanceCollapsed": 0})


@needs_promtool
def test_a_server_whose_model_is_not_loaded_is_not_ready(tmp_path: Path) -> None:
    write_rules(SERVED, MEASURED, tmp_path)
    only = {'up{job="toolkit"}': "1x240"}
    fired(tmp_path, only, {"ServerNotReady": 1, "RequestsFail": 0})


def expressions(monitored: Monitored) -> list[str]:
    groups = rules(monitored, MEASURED)["groups"] + rules(monitored, Expected())["groups"]
    targets = [target for panel in dashboard(monitored)["panels"] for target in panel["targets"]]
    return [
        *(rule["expr"] for group in groups for rule in group["rules"]),
        *(target["expr"] for target in targets),
    ]


@pytest.mark.parametrize("case", CASES)
def test_every_name_is_exported_by_the_server_or_recorded_by_the_rules(case: str) -> None:
    """What the metrics page has is checked by tests/triton/test_serving.py on a real server."""
    monitored = CASES[case]
    recorded = {
        rule["record"]
        for group in rules(monitored, MEASURED)["groups"]
        for rule in group["rules"]
        if "record" in rule
    }
    used = {
        name for expr in expressions(monitored) for name in re.findall(r"([a-zA-Z_][\w:]*)\{", expr)
    }
    exported = VLLM_NAMES if monitored.is_vllm else EXPORTED
    assert used <= exported | recorded | {"up"}
    assert len(used & exported) >= (8 if monitored.max_draft_len else 6)
    assert recorded <= used | {"toolkit:itl_seconds:p99"}  # for whoever builds on it


def test_the_names_of_our_server_are_of_the_contract() -> None:
    assert set(TOOLKIT.names) <= EXPORTED and f"{TOKENS_PER_STEP}_bucket" in EXPORTED
    failed = re.findall(r"\w+", TOOLKIT.failed)[1:]
    assert failed and set(failed) <= set(OUTCOMES)


@pytest.mark.vllm
def test_the_names_of_vllm_are_in_its_sources(vllm_environment: VllmEnvironment) -> None:
    """prometheus_client adds _total to a counter and _bucket to a histogram."""
    code = "import vllm, pathlib; print(pathlib.Path(vllm.__file__).parent)"
    found = subprocess.run(
        [vllm_environment.python, "-c", code], capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    package = Path(found.stdout.split()[-1])
    sources = "".join(
        path.read_text()
        for folder in ("v1/metrics", "v1/spec_decode")
        for path in sorted((package / folder).glob("*.py"))
    )
    for name in VLLM_NAMES - {"http_requests_total"}:
        assert f'"{re.sub("_(total|bucket)$", "", name)}"' in sources, name
    instrumentator = package / "entrypoints/serve/instrumentator/metrics.py"
    assert "prometheus_fastapi_instrumentator" in instrumentator.read_text()


def unknown(ours: Any, known: Any, place: str = "") -> Iterator[str]:
    """Where `ours` has what is not in `known`; None counts as nothing."""
    if isinstance(ours, dict) and isinstance(known, dict):
        for key, value in ours.items():
            if value is not None:
                yield from unknown(value, known.get(key), f"{place}.{key}")
    elif isinstance(ours, list) and isinstance(known, list) and len(ours) == len(known):
        for number, (one, other) in enumerate(zip(ours, known, strict=True)):
            yield from unknown(one, other, f"{place}[{number}]")
    elif ours != known:
        yield place


def read_by_grafana(data: dict[str, Any]) -> Any:
    """The dashboard through the types that Grafana makes from its schemas, of panels, options and
    Prometheus targets, too. What they do not know is lost.
    """
    plugins.register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(data)))


def check_dashboard(data: dict[str, Any]) -> None:
    """What types do not say of the fields that are used here (grafana/grafana,
    kinds/dashboard/dashboard_kind.cue, schema 0.0, and the classic model of "Dashboard JSON model"
    in its documentation): ranges, and what a panel, a target and a grid position need.
    """
    assert data["id"] is None and isinstance(data["title"], str) and data["title"]
    assert isinstance(data["uid"], str) and 8 <= len(data["uid"]) <= 40
    assert isinstance(data["editable"], bool) and data["graphTooltip"] in (0, 1, 2)
    assert isinstance(data["schemaVersion"], int) and 36 <= data["schemaVersion"] < 2**16
    assert all(isinstance(tag, str) for tag in data["tags"])
    assert data["timezone"] in ("browser", "utc") and re.fullmatch(r"\d+[smhd]", data["refresh"])
    assert {"from", "to"} == set(data["time"])
    assert data["templating"] == data["annotations"] == {"list": []}
    ids, taken = set(), set()
    for panel in data["panels"]:
        assert {"type", "id", "title", "targets", "gridPos", "fieldConfig", "options"} <= set(panel)
        assert panel["type"] == "timeseries" and panel["title"] and isinstance(panel["id"], int)
        ids.add(panel["id"])
        place = panel["gridPos"]
        assert place["h"] > 0 and 0 < place["w"] <= 24 and 0 <= place["x"] < 24 and place["y"] >= 0
        assert place["x"] + place["w"] <= 24
        taken.add((place["x"], place["y"]))
        assert set(panel["fieldConfig"]) == {"defaults", "overrides"}
        assert isinstance(panel["fieldConfig"]["overrides"], list)
        assert set(panel["datasource"]) == {"type", "uid"}
        assert panel["targets"], panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters) and all(
            target["expr"] for target in panel["targets"]
        )
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    assert len(ids) == len(taken) == len(data["panels"])


@pytest.mark.parametrize("case", CASES)
def test_the_dashboard_follows_grafana_s_schema(tmp_path: Path, case: str) -> None:
    write(CASES[case], tmp_path)
    data = json.loads((tmp_path / "grafana-dashboard.json").read_text())
    check_dashboard(data)
    assert [*unknown(data, read_by_grafana(data))] == []
    titles = [panel["title"] for panel in data["panels"]]
    assert ("Tokens per verify step" in titles) == bool(CASES[case].max_draft_len)
    positions = next((p for p in data["panels"] if p["title"] == "Acceptance by position"), None)
    if case == "torch":
        assert positions is not None and len(positions["targets"]) == 4
    assert (positions is None) == (case in ("plain", "trtllm"))
    assert ("Verify steps by reason" in titles) == (case in ("torch", "long-drafts"))


@pytest.mark.parametrize(
    "damage",
    [
        {"uid": "x"},
        {"schemaVersion": "39"},
        {"panels": [{"type": "timeseries"}]},
        {"graphTooltip": 3},
    ],
    ids=["uid", "schema", "panel", "tooltip"],
)
def test_the_check_of_a_dashboard_can_fail(damage: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check_dashboard({**dashboard(SERVED), **damage})


@pytest.mark.parametrize(
    "place",
    [
        ["refreshes"],
        ["panels", 0, "targets", 0, "legendFormatter"],
        ["panels", 0, "options", "legends"],
        ["panels", 0, "gridPos", "z"],
    ],
)
def test_what_grafana_s_types_do_not_know_is_found(place: list[Any]) -> None:
    data = json.loads(json.dumps(dashboard(SERVED)))
    node = data
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = "x"
    (found,) = unknown(data, read_by_grafana(data))
    assert found.endswith(f".{place[-1]}")


def test_compose_starts_both_on_loopback_with_files_that_are_there(tmp_path: Path) -> None:
    write(SERVED, tmp_path)
    data = yaml.safe_load((tmp_path / COMPOSE_FILE).read_text())
    assert data == compose(SERVED)
    assert set(data["services"]) == {"prometheus", "grafana"}
    for service in data["services"].values():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
        assert service["network_mode"] == "host" and "ports" not in service
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (tmp_path / source).is_file() and volume.endswith(":ro")
            else:
                assert source in data["volumes"]
    listens = " ".join(data["services"]["prometheus"]["command"])
    assert "--web.listen-address=127.0.0.1:9090" in listens
    grafana = data["services"]["grafana"]
    assert grafana["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert "GRAFANA_PASSWORD:?" in grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
    assert {each["source"] for each in grafana["configs"]} == set(data["configs"])
    (source,) = yaml.safe_load(data["configs"]["datasource"]["content"])["datasources"]
    assert source["url"] == "http://127.0.0.1:9090"
    panels = dashboard(SERVED)["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    (provider,) = yaml.safe_load(data["configs"]["dashboards"]["content"])["providers"]
    assert any(provider["options"]["path"] in volume for volume in grafana["volumes"])


def test_prometheus_scrapes_the_port_and_names_the_job_that_the_rules_ask_for() -> None:
    for monitored in CASES.values():
        (scraped,) = prometheus(monitored)["scrape_configs"]
        assert scraped["job_name"] == monitored.job
        assert scraped["static_configs"] == [{"targets": [f"127.0.0.1:{monitored.port}"]}]
        for expr in expressions(monitored):
            jobs = set(re.findall(r'job="([^"]+)"', expr))
            assert jobs == {monitored.job} or expr.startswith("vector(")
