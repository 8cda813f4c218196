"""Checks of Kubernetes manifests: by the API server's own schemas, and that every name refers to
something.
"""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate

# Names of a Service, and of the Service that a LeaderWorkerSet makes: RFC 1035.
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")

# The API server's own published schemas. They are strict: unknown fields are refused.
KUBERNETES_VERSIONS = ("1.29", "1.37")


# LeaderWorkerSet is a custom resource. This is its v1: field -> schema; `!` marks a required field.
# Source: kubernetes-sigs/lws, config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml
# (103a98aa, an early version with v1) and api/leaderworkerset/v1/leaderworkerset_types.go
# (024af084, a late one). Only what both accept is listed here: the early version has the restart
# policy Default, which the late one calls None. Pods are plain Kubernetes pods.
def is_positive_int32(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def is_pod(value: Any) -> bool:
    conforms(
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": value}
    )
    return True


LEADER_WORKER_SET: dict[str, Any] = {
    "replicas": is_positive_int32,
    "startupPolicy": lambda value: value in ("LeaderCreated", "LeaderReady"),
    "networkConfig": {"subdomainPolicy!": lambda value: value in ("Shared", "UniquePerReplica")},
    "rolloutStrategy": {"type!": lambda value: value == "RollingUpdate"},
    "leaderWorkerTemplate!": {
        "size": is_positive_int32,
        # It has to be stated, since the defaults of the two versions differ.
        "restartPolicy!": lambda value: value == "RecreateGroupOnPodRestart",
        "leaderTemplate": is_pod,
        "workerTemplate!": is_pod,
    },
}


def conforms(manifest: dict[str, Any]) -> None:
    for version in KUBERNETES_VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


def check(value: Any, schema: Any, where: str) -> None:
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        fields = {
            key.rstrip("!"): (field_schema, key.endswith("!"))
            for key, field_schema in schema.items()
        }
        assert set(value) <= set(fields), f"{where}: {set(value) - set(fields)}"
        for key, (field_schema, is_required) in fields.items():
            assert key in value or not is_required, f"{where}.{key} is missing"
            if key in value:
                check(value[key], field_schema, f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        assert value, where
        for index, item in enumerate(value):
            check(item, schema[0], f"{where}[{index}]")
    else:
        assert schema(value), f"{where}: {value!r}"


def check_manifests(manifests: list[dict[str, Any]]) -> None:
    for manifest in manifests:
        assert DNS_LABEL.fullmatch(manifest["metadata"]["name"])
        if manifest["kind"] == "LeaderWorkerSet":
            assert manifest["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
            check(manifest["spec"], LEADER_WORKER_SET, "spec")
        else:
            conforms(manifest)


def pods(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    templates = []
    for manifest in manifests:
        spec = manifest["spec"]
        templates += [spec["template"]] if "template" in spec else []
        group = spec.get("leaderWorkerTemplate", {})
        templates += [group[key] for key in ("leaderTemplate", "workerTemplate") if key in group]
    return templates


def check_references(manifests: list[dict[str, Any]]) -> None:
    """Every name refers to something that exists: volumes, ports of probes and services, pods of
    selectors.
    """
    templates = pods(manifests)
    for template in templates:
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        for container in template["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            ports = {port["name"] for port in container.get("ports", [])}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                target = container.get(probe, {}).get("httpGet")
                assert target is None or target["port"] in ports
    for manifest in manifests:
        spec = manifest["spec"]
        if manifest["kind"] == "Service":
            chosen = [
                pod
                for pod in templates
                if spec["selector"].items() <= pod["metadata"]["labels"].items()
            ]
            assert len(chosen) == 1
            ports = {
                port["name"]
                for container in chosen[0]["spec"]["containers"]
                for port in container["ports"]
            }
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        if manifest["kind"] == "Deployment":
            assert (
                spec["selector"]["matchLabels"].items()
                <= spec["template"]["metadata"]["labels"].items()
            )
