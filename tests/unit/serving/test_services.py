"""Services beside workers: what they and their workers are told, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from maskserve_common.config import cores, sharing_the_device
from maskserve_common.files.stages import STAGES
from maskserve_serving.errors import ServeError
from maskserve_serving.files import WorkerFiles, checked
from maskserve_serving.hosted import check_node_names, hosted_by
from maskserve_serving.options import MODELS, SERVICES, ServeOptions
from maskserve_serving.ports import Ports, check_distinct, free_base_port
from maskserve_serving.service import ServiceProcess
from maskserve_serving.spec import Spec, with_services


def spec(folder: Path, **fields: Any) -> Spec:
    options = ServeOptions(
        "m", base_port=free_base_port(), log_dir=folder, report=lambda line: None, **fields
    )
    files = WorkerFiles(folder / "memory" / "worker-0", folder / "disk" / "worker-0")
    return Spec(0, options, cast(Any, None), {}, files)


def service_of(service_spec: Spec) -> ServiceProcess:
    """The only one."""
    (hosted,) = hosted_by(service_spec.options)
    return ServiceProcess(service_spec, hosted)


def test_keys_of_nodes_beside_a_model_are_checked() -> None:
    check_node_names({"nodes": {"find": "a folder"}})
    with pytest.raises(ServeError, match=r"\[nodes\] finds: .* \(did you mean find\?\)"):
        check_node_names({"nodes": {"finds": "a folder"}})


def test_workers_are_told_where_the_service_is(tmp_path: Path) -> None:
    nets = str(tmp_path / "nets")
    service_spec = spec(tmp_path, controlnets=nets, services=("controlnet@cuda:1",))
    controls = checked(with_services(service_spec.options, {})).controls
    ports = Ports.of_service(service_spec.options.base_port)
    assert controls.service == f"127.0.0.1:{ports.grpc}"
    assert controls.folder == nets
    worker = Ports.of_worker(service_spec.options.base_port, 0)
    assert not set(ports.all().values()) & set(worker.all().values())
    assert with_services(spec(tmp_path).options, {}) == {}


def test_each_service_hosts_its_models_at_ports_of_its_own(tmp_path: Path) -> None:
    """ControlNets on two devices, and beside encoder and decoder, which another has alone."""
    nets = tmp_path / "nets"
    nets.mkdir()
    services = ("controlnet@cpu", "encoder,decoder,controlnet@cuda:1", "controlnet@cuda:1")
    options: dict[str, Any] = {"controlnets": str(nets), "workers": 4}
    service_spec = spec(tmp_path, **options, services=(*services, "encoder,decoder@cpu"))
    base, hosted = service_spec.options.base_port, hosted_by(service_spec.options)
    names = ["controlnet-0", "encoder-decoder-controlnet-1", "controlnet-2", "encoder-decoder-3"]
    assert [item.name for item in hosted] == names
    assert [item.device for item in hosted] == ["cpu", "cuda:1", "cuda:1", "cpu"]
    assert [item.repositories for item in hosted[1:]] == [
        (MODELS, SERVICES),
        (SERVICES,),
        (MODELS,),
    ]
    config = checked(with_services(service_spec.options, {}))
    grpc_urls = [f"127.0.0.1:{item.ports.grpc}" for item in hosted]
    assert config.controls.addresses == tuple(grpc_urls[:3])
    assert config.stages.addresses("encoder") == (grpc_urls[1], grpc_urls[3])
    assert config.stages.addresses("decoder") == (grpc_urls[1], grpc_urls[3])
    workers = [Ports.of_worker(base, index) for index in range(4)]
    servers = [*workers, Ports.of_nodes(base), *(item.ports for item in hosted)]
    ports = [port for server in servers for port in server.all().values()]
    assert len(ports) == len(set(ports))
    assert service_spec.threads(checked({})) == max(1, cores() // (4 + 4))
    alone = spec(tmp_path, **{**options, "workers": 0, "host": "0.0.0.0"}, services=services)
    base = alone.options.base_port
    listens = [checked(item.tables(alone)).controls.listen for item in hosted_by(alone.options)]
    assert listens == [f"0.0.0.0:{base + port}" for port in (3, 13, 23)]


def test_controlnet_services_do_not_go_with_shallowest_depths(tmp_path: Path) -> None:
    tables = {"controls": {"folder": str(tmp_path), "unequal_depths": "shallowest"}}
    refused = replace(spec(tmp_path, services=("controlnet@cpu",) * 2), tables=tables)
    for item in hosted_by(refused.options):
        with pytest.raises(ServeError, match="unequal_depths"):
            item.tables(refused)
    [one] = hosted_by(spec(tmp_path, services=("controlnet@cpu",)).options)
    assert one.tables(replace(spec(tmp_path, services=("controlnet@cpu",)), tables=tables))


def test_cores_are_shared_with_the_service(tmp_path: Path) -> None:
    plain_spec, shared = spec(tmp_path), spec(tmp_path, services=("controlnet@cpu",))
    assert plain_spec.threads(checked({})) == cores()
    assert shared.threads(checked({})) == max(1, cores() // 2)
    assert shared.threads(checked({"model": {"torch_threads": 5}})) == 5
    two_services_spec = spec(tmp_path, services=("controlnet@cpu", "encoder,decoder@cpu"))
    assert two_services_spec.threads(checked({})) == max(1, cores() // 3)


def test_workers_are_told_where_encoder_and_decoder_are(tmp_path: Path) -> None:
    service_spec = spec(tmp_path, services=("encoder,decoder@cuda:1",))
    ports = Ports.of_service(service_spec.options.base_port)
    config = checked(with_services(service_spec.options, {}))
    assert (config.stages.service, config.controls.service) == (f"127.0.0.1:{ports.grpc}", "")


def test_the_decoder_alone_may_have_more_servers(tmp_path: Path) -> None:
    services = ("encoder@cpu", "decoder@cpu", "decoder@cpu")
    options = spec(tmp_path, services=services).options
    options.check_flags()
    hosted = hosted_by(options)
    assert [item.name for item in hosted] == ["encoder-0", "decoder-1", "decoder-2"]
    grpc_urls = [f"127.0.0.1:{item.ports.grpc}" for item in hosted]
    stages = checked(with_services(options, {})).stages
    assert stages.addresses("encoder") == tuple(grpc_urls[:1])
    assert stages.addresses("decoder") == tuple(grpc_urls[1:])
    with pytest.raises(ServeError, match="no server has the encoder; accepted: servers for both"):
        replace(options, services=services[1:]).check_flags()
    replace(options, services=services[1:], workers=0).check_flags()  # the encoder is elsewhere
    tables = {"stages": {"decoder_service": "a:1"}}
    with pytest.raises(ServeError, match=r"\[stages\] decoder_service: stands alone; accepted"):
        options.check_tables(tables)


def test_the_stage_service_has_the_workers_own_configuration_but_for_where_it_runs(
    tmp_path: Path,
) -> None:
    tables = {
        "model": {"path": "m", "decoder_device": "cpu", "t5_weights": "int8"},
        "stages": {"encode_halo": 3, "service": "elsewhere:1"},
    }
    service_spec = replace(
        spec(tmp_path, services=("encoder,decoder@cuda:1",), adapters="loras"), tables=tables
    )
    process = service_of(service_spec)
    config = checked(process.tables())
    assert process.hosted.models == ("encoder", "decoder")
    assert {sharing_the_device(config, stage).model.device for stage in STAGES} == {"cuda:1"}
    assert (config.stages.service, config.stages.encode_halo) == ("", 3)
    assert config.model.t5_weights == "int8"
    worker = checked(service_spec.with_adapters(tables))
    assert config.adapters == worker.adapters  # the front has brought the edit's LoRAs there


def test_a_service_without_controlnets_is_refused_before_anything_runs(tmp_path: Path) -> None:
    process = service_of(spec(tmp_path, services=("controlnet@cpu",)))
    with pytest.raises(ServeError, match="--controlnets DIR"):
        process.start()
    assert process.pid is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "--workers: 0 is not at least 1"),
        ({"workers": -1, "services": ("encoder,decoder@cpu",)}, "--workers: -1 is not at least 1"),
        (
            {"workers": 0, "services": ("encoder,decoder@cpu",), "router": True},
            "--workers: 0 runs only services",
        ),
        ({"model": "", "workers": 0, "services": ("controlnet@cpu",)}, "--model: is missing"),
        ({"model": ""}, "--model: is missing"),
        ({"model": "", "workers": 0, "services": ("encoder,decoder@cpu",)}, "--model: is missing"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ServeError, match=message):
        ServeOptions(**{"model": "m", **options}).check()


def test_services_alone_are_for_other_hosts(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.toml"
    nodes.touch()
    ServeOptions(workers=0, nodes=nodes).check()
    for workers, host in ((0, "0.0.0.0"), (2, "127.0.0.1")):
        service_spec = spec(
            tmp_path, workers=workers, host="0.0.0.0", services=("encoder,decoder@cpu",)
        )
        service = service_of(service_spec)
        assert service._options.host == host
        assert service.grpc_url == f"127.0.0.1:{service.ports.grpc}"
        assert service_spec.threads(checked({})) == max(1, cores() // (workers + 1))


def test_a_controlnet_service_listens_to_other_hosts_where_it_is_alone(tmp_path: Path) -> None:
    nets = tmp_path / "nets"
    nets.mkdir()
    for workers, listens in ((0, True), (2, False)):
        service_spec = spec(
            tmp_path,
            workers=workers,
            host="0.0.0.0",
            controlnets=str(nets),
            services=("controlnet@cpu",),
        )
        service_spec.options.check()
        service = service_of(service_spec)
        address = f"0.0.0.0:{service_spec.options.base_port + 3}" if listens else ""
        assert checked(service.tables()).controls.listen == address
        assert service._options.host == ("0.0.0.0" if listens else "127.0.0.1")
        assert service_spec.threads(checked({})) == max(1, cores() // (workers + 1))


def test_a_node_server_has_the_folder_of_values_of_its_router(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.toml"
    nodes.write_text('[values]\nfolder = "/mine"\n')
    router_spec, plain_spec = spec(tmp_path, nodes=nodes, router=True), spec(tmp_path, nodes=nodes)
    folder = checked(service_of(router_spec).tables()).values.folder
    assert folder == str(router_spec.files.values)
    assert checked(service_of(plain_spec).tables()).values.folder == "/mine"


def test_ports_of_all_servers_differ(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.toml"
    nodes.touch()
    services = ("encoder,decoder@cuda:1", "encoder,decoder@cpu", "controlnet@cpu")
    several_spec = spec(tmp_path, services=services, nodes=nodes, workers=4)
    options = several_spec.options
    options.check_flags()
    processes = [ServiceProcess(several_spec, hosted) for hosted in hosted_by(options)]
    names = ["encoder-decoder-0", "encoder-decoder-1", "controlnet-2", "nodes"]
    assert [process.name for process in processes] == names
    devices = [checked(process.tables()).model.device for process in processes[:2]]
    assert devices == ["cuda:1", "cpu"]
    assert several_spec.threads(checked({})) == max(1, cores() // (4 + 3))
    ports = {process.name: process.ports for process in processes}
    ports |= {f"worker-{i}": Ports.of_worker(options.base_port, i) for i in range(4)}
    check_distinct(ports)
    router = Ports(processes[1].ports.grpc, 1, 2)
    with pytest.raises(
        ServeError, match=rf"port {router.http} \(HTTP\) of router is a port of enc"
    ):
        check_distinct({**ports, "router": router})


@pytest.mark.parametrize("table", ["stages", "controls"])
def test_an_address_that_is_listed_twice_is_refused(table: str) -> None:
    tables = {table: {"service": "a:1,b:1, a:1"}}
    with pytest.raises(ServeError, match=rf"\[{table}\] service: a:1 is listed twice"):
        ServeOptions("m").check_tables(tables)
    ServeOptions("m").check_tables({table: {"service": "a:1,b:1"}})
    with pytest.raises(ServeError, match=r"service: 'a:1,,b:1' has another form; accepted: HOST:P"):
        checked({table: {"service": "a:1,,b:1"}})
