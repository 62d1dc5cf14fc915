"""The OpenAPI document: of the right form, and about the paths that there are."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_common.contracts.settings import EditSettings
from maskserve_router.api.openai.form import EXTENSIONS, Fields
from maskserve_router.listeners.http_app import OPENAPI

DOCUMENT = json.loads(OPENAPI.read_bytes())
OPERATORS = re.compile(r"/v2/(trace|logging|repository/models|\w*sharedmemory|.*/trace)|/versions/")
"""Paths of Triton that are refused, and the same once more with a version."""


def schemas(node: Any) -> list[Any]:
    """Every schema of the document."""
    collected = []
    if isinstance(node, dict):
        collected += [node["schema"]] if "schema" in node else []
        for value in node.values():
            collected += schemas(value)
    elif isinstance(node, list):
        for value in node:
            collected += schemas(value)
    return collected


def test_every_schema_is_one() -> None:
    all_schemas = [*schemas(DOCUMENT["paths"]), *DOCUMENT["components"]["schemas"].values()]
    assert len(all_schemas) > 30
    for schema in all_schemas:
        Draft202012Validator.check_schema(schema)


def test_a_bound_is_written_in_one_way() -> None:
    """Whether a process has 0 or 0.0 as a bound depends on the order of its imports."""

    def parsed(number: str) -> float:
        assert not float(number).is_integer(), number
        return float(number)

    json.loads(OPENAPI.read_bytes(), parse_float=parsed)


def test_every_reference_leads_somewhere() -> None:
    named = set(re.findall(r"#/components/schemas/(\w+)", str(DOCUMENT)))
    assert named <= set(DOCUMENT["components"]["schemas"])


def test_every_path_is_served_and_every_route_is_told(routes: set[tuple[str, str]]) -> None:
    documented_routes = {
        (path, method.upper())
        for path, methods in DOCUMENT["paths"].items()
        for method in methods
        if method != "parameters"
    }
    served = {(path, method) for path, method in routes if not OPERATORS.search(path)}
    assert documented_routes == served - {("/v2/", "GET"), ("/v2/models/stats", "GET")}


@pytest.fixture
async def app(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A router's application, of a router that is not started."""
    from maskserve_router import router
    from maskserve_router.config import router_config_of

    apps: list[Any] = []

    class RecordingApp(router.HttpApp):
        def app(self) -> Any:
            apps.append(super().app())
            return apps[-1]

    monkeypatch.setattr(router, "HttpApp", RecordingApp)
    flows = {"folder": str(CHECKOUT / "assets" / "workflows")}
    config_tables = {
        "listen": {"http_port": 0, "grpc_port": 0, "admin_port": 0},
        "workers": {"addresses": ["127.0.0.1:1"]},
        "workflows": flows,
    }
    router.Router(router_config_of(config_tables))
    return apps[0]


@pytest.fixture
def routes(app: Any) -> set[tuple[str, str]]:
    """Paths and methods of a router's application."""
    return {
        (re.sub(r":path\}", "}", route.path), method)
        for route in app.routes
        for method in (route.methods or set()) - {"HEAD"}
    }


async def test_workflows_are_listed_as_the_document_says(app: Any) -> None:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://any") as client:
        answer = (await client.get("/v1/workflows")).json()
    response = DOCUMENT["paths"]["/v1/workflows"]["get"]["responses"]["200"]
    Draft202012Validator(response["content"]["application/json"]["schema"]).validate(answer)
    assert {"detail", "outline", "replace", "variants"} <= {
        workflow["name"] for workflow in answer["data"]
    }


def test_the_form_of_an_edit_has_every_field_with_a_sentence() -> None:
    edit = DOCUMENT["paths"]["/v1/images/edits"]["post"]["requestBody"]
    form = edit["content"]["multipart/form-data"]["schema"]["properties"]
    all_fields = {"image", "mask", *Fields.__struct_fields__, *EXTENSIONS}
    assert set(form) == all_fields - {"webhook"}
    job = DOCUMENT["paths"]["/v1/jobs"]["post"]["requestBody"]
    form_of_job = job["content"]["multipart/form-data"]["schema"]["properties"]
    assert set(form_of_job) == all_fields - {"stream", "partial_images"}
    assert set(EditSettings.__struct_fields__) > EXTENSIONS
    assert all("description" in form[name] for name in EXTENSIONS)
    assert form["mask_feather"]["maximum"] == 512
