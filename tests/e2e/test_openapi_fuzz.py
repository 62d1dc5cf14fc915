"""Whatever a client makes of the OpenAPI document: no 5xx, no hang, and answers as it says."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.router_site import RouterSite
from maskserve_router.listeners.http_app import OPENAPI
from maskserve_serving.worker import WorkerProcess

DOCUMENT = json.loads(OPENAPI.read_bytes())


def modes(methods: dict[str, Any], method: str) -> Iterator[GenerationMode]:
    """Requests that the document allows and, where it forbids any, requests that it forbids."""
    yield GenerationMode.POSITIVE
    bound = any({"enum", "pattern"} & set(p["schema"]) for p in methods.get("parameters", ()))
    if bound or "requestBody" in methods[method]:
        yield GenerationMode.NEGATIVE


OPERATIONS = [
    pytest.param(path, method, mode, id=f"{method} {path} {mode.value}")
    for path, methods in DOCUMENT["paths"].items()
    for method in methods
    if method != "parameters"
    for mode in modes(methods, method)
]
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
HANG_S = 120.0
"""Seconds after which a request counts as hanging, on however busy a machine."""
EXAMPLES, SLOW_EXAMPLES = 8, 300
"""Number of examples of each operation and mode; the second is for slow runs."""


@pytest.fixture(scope="module")
def site(worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterSite]:
    flows = {"workflows": {"folder": str(CHECKOUT / "assets" / "workflows")}}
    with RouterSite([worker.grpc_url], tmp_path_factory.mktemp("openapi"), flows) as router_site:
        yield router_site
        assert requests.get(f"http://{router_site.http_url}/readyz", timeout=10).status_code == 200
        url = f"http://{router_site.http_url}/v1/templates"  # of a worker that other files share
        for template in requests.get(url, timeout=30).json()["data"]:
            assert requests.delete(f"{url}/{template['id']}", timeout=30).status_code == 200


@pytest.fixture
def examples(pytestconfig: pytest.Config) -> int:
    slow = pytestconfig.getoption("--slow") or os.environ.get("MASKSERVE_FULL") == "1"
    return SLOW_EXAMPLES if slow else EXAMPLES


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("path", "method", "mode"), OPERATIONS)
def test_nothing_breaks(
    site: RouterSite, path: str, method: str, mode: GenerationMode, examples: int
) -> None:
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method]
    url = f"http://{site.http_url}"

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def call(case: Any) -> None:
        case.call_and_validate(base_url=url, checks=CHECKS, timeout=HANG_S)

    call()
