"""The models that services beside the workers host: ControlNets, stages, nodes of workflows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from maskserve_common.config import ConfigError
from maskserve_serving.errors import ServeError
from maskserve_serving.files import checked, with_values
from maskserve_serving.options import MODELS, SERVICES, ServeOptions, hosted_models
from maskserve_serving.ports import Ports
from maskserve_serving.source import node_tables, with_node_folders
from maskserve_serving.spec import Spec, with_services
from maskserve_workflows.node_folders import check_names, check_worker_names, node_folders
from maskserve_workflows.nodes import NODE_FILES


@dataclass(frozen=True, slots=True)
class Hosted:
    """Models that one Triton hosts."""

    name: str
    """Name of the service."""
    ports: Ports
    models: tuple[str, ...]
    """The Triton models to load."""
    repositories: tuple[Path, ...]
    """Folders that have them."""
    tables: Callable[[Spec], dict[str, Any]]
    """Returns their configuration by the spec of a worker that they serve; raises ServeError if
    there is nothing to serve."""
    is_local: bool
    """Whether only processes of this host call them."""
    device: str = ""
    """Device of the models; empty: the configuration's."""


def hosted_by(options: ServeOptions) -> list[Hosted]:
    """Return what a supervisor's services host; without workers or a router, for other hosts."""
    base, has_workers, services = options.base_port, bool(options.workers), list[Hosted]()
    for index, service in enumerate(options.services):
        models, device = hosted_models(service), service.partition("@")[2]
        name = f"{'-'.join(models)}-{index}"
        ports = Ports.of_service(base, index, steps="controlnet" in models)
        folders = dict.fromkeys(SERVICES if model == "controlnet" else MODELS for model in models)
        tables = partial(_models_of_workers, models, ports)
        services.append(Hosted(name, ports, models, tuple(folders), tables, has_workers, device))
    if options.nodes is not None:
        ports = Ports.of_nodes(base)
        services.append(Hosted("nodes", ports, ("nodes",), (SERVICES,), _nodes, options.router))
    return services


def check_node_names(tables: dict[str, Any]) -> None:
    """Raise ServeError if `[nodes]` of the workers' configuration has a key that is no model's."""
    try:
        check_worker_names(checked(tables).nodes)
    except ConfigError as error:
        raise ServeError(str(error)) from None


def _models_of_workers(models: tuple[str, ...], ports: Ports, spec: Spec) -> dict[str, Any]:
    options = spec.options
    tables = with_services(options, spec.with_adapters(spec.with_model(spec.tables)))
    if "controlnet" in models:
        try:
            _ = checked(tables).controls.addresses
        except ConfigError as error:
            raise ServeError(str(error)) from None
        if not checked(tables).controls.folder:
            raise ServeError("--service: there are no ControlNets to serve; give --controlnets DIR")
    listen = f"{options.host}:{ports.link}" if ports.link and not options.workers else ""
    tables = with_values(tables, "controls", service="", listen=listen)
    tables = with_values(tables, "model", encoder_device="", decoder_device="")
    tables = with_values(tables, "safety", repository="")
    if options.router:
        tables = with_values(tables, "values", folder=str(spec.files.values))
    return with_values(tables, "stages", service="", decoder_service="")


def _nodes(spec: Spec) -> dict[str, Any]:
    file = spec.options.nodes
    assert file is not None, "only --nodes has a node server"
    tables = node_tables(file)
    path = [*spec.options.node_folders, *tables["nodes"]["path"]]
    tables = with_values(tables, "nodes", path=path)
    for problem in NODE_FILES.read(path):
        spec.options.report(problem)
    nodes = checked(tables).nodes
    try:
        check_names(nodes)
    except ConfigError as error:
        raise ServeError(f"{file}: {error}") from None
    tables = with_node_folders(tables, nodes.folders(), file)
    if spec.options.router:
        tables = with_values(tables, "values", folder=str(spec.files.values))
    try:
        node_folders(checked(tables).nodes)
    except ConfigError as error:
        raise ServeError(f"{file}: {error}") from None
    return tables
