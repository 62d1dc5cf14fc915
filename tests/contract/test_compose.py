"""docker-compose.yml and Dockerfile against the project: what they name must be there.

The profile gpu cannot run on a machine without GPUs; these checks are all that holds it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from maskserve_common.config_file import load_config
from maskserve_router.cli import parser as router_parser
from maskserve_router.config import RouterConfig
from maskserve_serving.cli import add_arguments
from maskserve_serving.options import DEFAULT_BASE_PORT, ServeOptions
from maskserve_serving.ports import Ports

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ROUTERS = ("router", "router-cpu", "router-hosts")
WORKERS = (*(name for name in SERVICES if name.startswith(("cpu-", "gpu-"))), "edits")
LISTEN = RouterConfig().listen
OURS = [name for name, service in SERVICES.items() if service["image"].startswith("maskserve:")]
"""Services whose image the Dockerfile makes."""


def plain(text: str) -> str:
    """The value that compose puts in where nothing is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def aliases(service: dict[str, Any]) -> list[str]:
    return [
        alias for network in service["networks"].values() for alias in network.get("aliases", ())
    ]


def test_workers_are_reached_by_the_router_and_prometheus_alone() -> None:
    def networks(name: str) -> set[str]:
        return set(SERVICES[name].get("networks", ("default",)))

    assert len(WORKERS) == 11
    assert all(networks(name) - {"stages", "controls"} == {"workers"} for name in WORKERS)
    client_services = {name for name in SERVICES if "workers" in networks(name)} - set(WORKERS)
    assert client_services == {*ROUTERS, "prometheus"}
    assert {name for name in SERVICES if "nodes" in networks(name)} == {"nodes", "router-hosts"}
    for service in ("stages", "controls"):
        assert {name for name in SERVICES if service in networks(name)} == {service, "edits"}
    assert not any(SERVICES[name].get("ports") for name in (*WORKERS, "stages", "nodes"))


def test_each_image_has_labels() -> None:
    stages = re.split(r"^FROM .* AS (\w+)$", DOCKERFILE, flags=re.MULTILINE)[1:]
    images = dict(zip(stages[::2], stages[1::2], strict=True))
    del images["source"]
    for name, body in images.items():
        assert f'org.opencontainers.image.title="maskserve {name}"' in body
        assert 'org.opencontainers.image.version="$VERSION"' in body


@pytest.mark.parametrize("name", OURS)
def test_each_image_is_a_target_of_the_dockerfile(name: str) -> None:
    target = SERVICES[name]["image"].removeprefix("maskserve:")
    assert f" AS {target}\n" in DOCKERFILE
    build = SERVICES[name].get("build")
    assert name in ROUTERS or build["target"] == target


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    allowed = [
        line.removeprefix("!").rstrip("/")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    ]
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, flags=re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    assert len(sources) > 10
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == a or source.startswith(f"{a}/") for a in allowed), source


def served(name: str) -> ServeOptions:
    """The options of `maskserve serve` in a container's command."""
    program, command, *arguments = [plain(word) for word in SERVICES[name]["command"]]
    assert (program, command) == ("maskserve", "serve")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = ServeOptions.of_flags(parser.parse_args(arguments))
    options.check_flags()
    return options


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_s_command_is_one_that_serve_takes(name: str) -> None:
    service, options = SERVICES[name], served(name)
    assert options.host == "0.0.0.0"
    assert options.base_port == DEFAULT_BASE_PORT
    assert f":{DEFAULT_BASE_PORT}/v2/health/ready" in service["healthcheck"]["test"][-1]
    mounts = dict(volume.rsplit(":ro", 1)[0].rsplit(":", 1)[::-1] for volume in service["volumes"])
    file = "edits" if name == "edits" else "worker"
    assert mounts["/etc/maskserve.toml"] == f"./deploy/{file}.toml"
    assert str(options.config) == "/etc/maskserve.toml"
    assert aliases(service) == ["workers"]
    assert service["environment"] == {"MASKSERVE_NAME": name}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_finds_the_workers_and_is_found(name: str) -> None:
    program, *arguments = SERVICES[name]["command"]
    assert program == "maskserve-router"
    options = router_parser().parse_args(arguments)
    workers = served("edits").workers if name == "router-hosts" else 1
    ports = [Ports.of_worker(DEFAULT_BASE_PORT, index) for index in range(workers)]
    assert options.worker == [f"dns:workers:{worker_ports.grpc}" for worker_ports in ports]
    published = [plain(port).rsplit(":", 1)[1] for port in SERVICES[name]["ports"]]
    assert published == [str(LISTEN.http_port), str(LISTEN.grpc_port)]
    assert f":{LISTEN.http_port}/healthz" in SERVICES[name]["healthcheck"]["test"][-1]
    assert aliases(SERVICES[name]) == ["routers"]


def test_hosts_are_workers_two_stage_services_a_node_server_and_controlnets() -> None:
    edits, nodes = served("edits"), served("nodes")
    assert (edits.workers, edits.services, edits.nodes) == (2, (), None)
    assert (nodes.workers, nodes.host) == (0, "0.0.0.0")
    assert SERVICES["nodes"]["volumes"] == [f"./deploy/nodes.toml:{nodes.nodes}:ro"]
    ports = Ports.of_nodes(DEFAULT_BASE_PORT)
    assert f":{ports.http}/v2/health/ready" in SERVICES["nodes"]["healthcheck"]["test"][-1]
    router = router_parser().parse_args(SERVICES["router-hosts"]["command"][1:])
    assert router.node == [f"dns:nodes:{ports.grpc}"]
    assert aliases(SERVICES["nodes"]) == ["nodes"]
    stages = served("stages")
    assert (stages.workers, stages.host, stages.model) == (0, "0.0.0.0", edits.model)
    assert SERVICES["stages"]["deploy"] == {"replicas": 2}
    assert aliases(SERVICES["stages"]) == ["stages"]
    stage_ports = Ports.of_service(DEFAULT_BASE_PORT)
    assert f":{stage_ports.http}/v2/health/ready" in SERVICES["stages"]["healthcheck"]["test"][-1]
    controls = served("controls")
    assert (controls.workers, controls.host, controls.model) == (0, "0.0.0.0", edits.model)
    ports = Ports.of_service(DEFAULT_BASE_PORT)
    assert f":{ports.http}/v2/health/ready" in SERVICES["controls"]["healthcheck"]["test"][-1]
    assert SERVICES["controls"]["deploy"] == {"replicas": 2}
    assert aliases(SERVICES["controls"]) == ["controls"]
    tables = [load_config(ROOT / "deploy" / name) for name in ("edits.toml", "worker.toml")]
    assert tables[0].controls.service == f"dns:controls:{ports.grpc}"
    assert tables[0].stages.service == f"dns:stages:{stage_ports.grpc}"
    as_others = replace(tables[0], stages=tables[1].stages, controls=tables[1].controls)
    assert as_others == tables[1]
    of_image = dict(re.findall(r"^COPY (assets/\S+) (\S+)$", DOCKERFILE, flags=re.MULTILINE))
    assert of_image["assets/workflows"] == router.workflows
    assert of_image["assets/controlnets"] == edits.controlnets == controls.controlnets
    folders = load_config(ROOT / "deploy" / "nodes.toml").nodes.folders().values()
    assert {folder.rpartition("/")[0] for folder in folders} == {of_image["assets/nodes"]}
    assert all(
        (ROOT / "assets" / "nodes" / folder.rpartition("/")[2]).is_dir() for folder in folders
    )


def test_prometheus_scrapes_what_there_is() -> None:
    text = (ROOT / "deploy" / "prometheus.yml").read_text(encoding="utf-8")
    jobs = {
        target["names"][0]: target["port"]
        for job in yaml.safe_load(text)["scrape_configs"]
        for target in job["dns_sd_configs"]
    }
    assert jobs == {"workers": DEFAULT_BASE_PORT + 2, "routers": LISTEN.admin_port}


def test_prometheus_reads_what_is_copied_and_keeps_what_is_mounted() -> None:
    image = DOCKERFILE.split(" AS prometheus\n")[1].split("\nFROM ")[0]
    _, copied, to = re.findall(r"^(COPY) (\S+) (\S+)$", image, re.M)[0]
    assert (ROOT / copied).exists()
    options = dict(o.split("=") for o in json.loads(re.findall(r"^CMD (.+)$", image, re.M)[0])[1:])
    assert options["--config.file"] == to
    (mounted,) = SERVICES["prometheus"]["volumes"]
    assert mounted.split(":")[1] == options["--storage.tsdb.path"]
    assert f"install -d -o prometheus {options['--storage.tsdb.path']}\n" in image
    (port,) = SERVICES["prometheus"]["ports"]
    assert plain(port).endswith(":9090")
    assert ":9090/-/ready" in SERVICES["prometheus"]["healthcheck"]["test"][-1]


def test_the_workers_configuration_is_valid_and_its_folders_are_mounted() -> None:
    config = load_config(ROOT / "deploy" / "worker.toml")
    tiers = [config.cache.host_dir, config.cache.disk_dir]
    mounted = [volume.split(":")[-1] for volume in SERVICES["gpu-0"]["volumes"]]
    assert all(any(tier.startswith(m) for m in mounted) for tier in tiers), (tiers, mounted)


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_an_image_runs_what_there_is_as_a_user_who_may_write(target: str) -> None:
    """Its folders are there, its own and mounted; its command and its extras are the project's."""
    image = re.search(rf"^FROM \S+ AS {target}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
    assert image is not None
    text = image[1].replace("\\\n", " ")
    created_folders = re.findall(r"install -d -o maskserve ([^&\n]+)", text)[0].split()
    service = SERVICES[f"{target}-0"]
    mounted = [plain(volume).split(":")[1] for volume in service["volumes"]]
    assert set(created_folders) == {*mounted, "/var/log/maskserve"} - {"/etc/maskserve.toml"}
    (uid,) = re.findall(r"useradd --uid (\d+) --create-home maskserve", text)
    host_tier = COMPOSE["volumes"]["host-tier"]["driver_opts"]["o"]
    assert f"uid={uid}," in host_tier
    assert int(uid) > 1000  # NVIDIA's image has a user 1000
    assert "USER maskserve" in text
    program, command, *arguments = json.loads(re.findall(r"^CMD (.+)$", text, re.M)[0])
    assert (program, command) == ("maskserve", "serve")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert str(parser.parse_args(arguments).log_dir) in created_folders
    extras = re.findall(r"requirements\.py ([\w ]+) >", text)[0].split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras) <= set(project["optional-dependencies"])
    assert ("server" in extras) is (target == "cpu")  # NVIDIA's image brings its own Triton


def test_programs_that_containers_run_are_installed() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "scripts"
    ]
    for name in (*WORKERS, *ROUTERS):
        assert SERVICES[name]["command"][0] in scripts
    for name in OURS:
        service = SERVICES[name]
        assert service["healthcheck"]["test"][1] == "curl"
        target = service["image"].removeprefix("maskserve:")
        image = DOCKERFILE.split(f" AS {target}\n")[1].split("\nFROM ")[0]
        assert re.search(r"apt-get install .*\bcurl\b", image), name


def test_each_gpu_has_a_worker_of_its_own() -> None:
    gpus = {
        name: service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name, service in SERVICES.items()
        if name.startswith("gpu-")
    }
    assert gpus == {f"gpu-{i}": [str(i)] for i in range(8)}
    for count in (1, 2, 4, 8):
        profile = "gpu" if count == 1 else f"gpu-{count}"
        started = [name for name in gpus if profile in SERVICES[name]["profiles"]]
        assert started == [f"gpu-{i}" for i in range(count)]


def test_variables_have_defaults_or_stand_in_the_env_file() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    env = (ROOT / ".env").read_text(encoding="utf-8")
    declared_names = re.findall(r"^(\w+)=", env, flags=re.MULTILINE)
    assert "COMPOSE_PROFILES" in declared_names
    bare = re.findall(r"\$\{(\w+)\}", text)
    assert [name for name in bare if name not in declared_names] == []
    used = re.findall(r"\$\{(\w+)", text)
    assert [n for n in declared_names if n not in used and n != "COMPOSE_PROFILES"] == []


def test_grafana_shows_what_is_mounted_and_asks_prometheus() -> None:
    grafana = SERVICES["grafana"]
    mounts = dict(volume.removesuffix(":ro").split(":")[::-1] for volume in grafana["volumes"])
    provisioning = ROOT / mounts["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "${PROMETHEUS_URL}"
    assert grafana["environment"]["PROMETHEUS_URL"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards/maskserve.yml").read_text())[
        "providers"
    ]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    folder = provider["options"]["path"]
    assert home.startswith(f"{folder}/")
    dashboard = json.loads((ROOT / mounts[folder] / home.rpartition("/")[2]).read_text())
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"] if "targets" in panel} == {
        source["uid"]
    }
