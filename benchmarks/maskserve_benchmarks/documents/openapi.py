"""Write the OpenAPI document of the router's HTTP interface from the types that handlers use.

scripts/bench openapi            # after a change
scripts/bench openapi --check    # exit code 1 if the file is stale
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from maskserve_benchmarks.documents.check_flag import check_only
from maskserve_common.contracts.keys import TEMPLATE_ID
from maskserve_common.contracts.settings import EditSettings, MaskFrom
from maskserve_common.contracts.tensors import CONTRACTS, INPUT_KINDS
from maskserve_common.reading import sentences, without_point
from maskserve_router.api.openai.form import EXTENSIONS, NOT_VARIED, Fields, ImageUrl
from maskserve_router.listeners.http_app import OPENAPI
from maskserve_router.messages.job_states import MOST_LISTED

Json = dict[str, Any]
_PICTURE = {"type": "string", "contentMediaType": "application/octet-stream", "format": "binary"}
_FORM, _JSON = "multipart/form-data", "application/json"
_ERROR_STATUSES = (400, 401, 404, 413, 429, 503, 504)
"""Error statuses that any call may have (docs/api.md#errors)."""
_MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
_FILE = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_TEMPLATE = {
    "name": "template_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": f"^{TEMPLATE_ID.pattern}$"},
}


def main() -> int:
    is_stale = not OPENAPI.is_file() or OPENAPI.read_text(encoding="utf-8") != text()
    if check_only(__doc__):
        if is_stale:
            print(f"{OPENAPI} is not what scripts/bench openapi writes", file=sys.stderr)
        return int(is_stale)
    OPENAPI.write_text(text(), encoding="utf-8")
    return 0


def text() -> str:
    """Return the document as JSON with a line for each path."""
    return json.dumps(without_point(document())).replace('}, "/', '},\n"/') + "\n"


def document() -> Json:
    """Return the document at `/openapi.json`."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "maskserve",
            "version": importlib.metadata.version("maskserve"),
            "description": "Masked image edits: OpenAI's API, templates, and KServe v2.",
        },
        "security": [{}, {"key": []}],
        "paths": {
            **_openai(),
            **_jobs(),
            **_masks(),
            **_workflows(),
            **_templates(),
            **_kserve(),
            **_health(),
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "Error": _object(error=_object(message=_TEXT, type=_TEXT, param={}, code=_TEXT)),
                "KServeError": _object(error=_TEXT),
                "Template": _object(id=_TEXT, object=_TEXT),
                "Job": _job(),
                "Model": _object(id=_TEXT, object=_TEXT, created=_INTEGER, owned_by=_TEXT),
                "Images": _object(
                    created=_INTEGER,
                    size=_TEXT,
                    output_format=_TEXT,
                    data=_list(_picture()),
                    usage=_object(
                        input_tokens=_INTEGER, output_tokens=_INTEGER, total_tokens=_INTEGER
                    ),
                    maskserve=_list({"type": "object"}),
                ),
                **_reachable((Fields, EditSettings)),
                "ImageUrl": _strict(_properties(ImageUrl), *_properties(ImageUrl)),
            },
        },
    }


_TEXT: Json = {"type": "string"}
_INTEGER: Json = {"type": "integer"}
_KEY_PATTERN = "^[!-~]{1,255}$"
_DELETED: Json = {"type": "object", "properties": {"id": _TEXT, "object": _TEXT}}


def _openai() -> Json:
    edit = _pictures("Repaint the masked part of an image, or all of it", _edit_body("webhook"))
    urls, not_generated = (
        {"images": _list(_ref("ImageUrl"))},
        ("webhook", "anchor", "input_fidelity"),
    )
    generation = _pictures("Make a picture from a text", _body({_JSON: _edit(urls, not_generated)}))
    not_varied = ("webhook", *NOT_VARIED)
    variation = _pictures(
        "Vary an image, with a base model",
        _body({_FORM: _edit({"image": _PICTURE}, not_varied), _JSON: _edit(urls, not_varied)}),
    )
    models = _object(object=_TEXT, data=_list(_ref("Model")))
    return {
        "/v1/images/edits": {"post": edit},
        "/v1/images/generations": {"post": generation},
        "/v1/images/variations": {"post": variation},
        "/v1/images/files/{name}": {"parameters": [_FILE], "get": _file()},
        "/v1/models": {"get": _operation("List the models that workers serve now", models)},
        "/v1/models/{model}": {
            "parameters": [_MODEL],
            "get": _operation("Get a model", _ref("Model")),
        },
    }


def _pictures(summary: str, body: Json) -> Json:
    """Return an operation that answers with pictures, or with events."""
    description = "The pictures, or server-sent events with `stream`"
    schemas = {_JSON: _ref("Images"), "text/event-stream": _TEXT}
    responses = {"200": {"description": description, "content": _content(schemas)}}
    return {"summary": summary, **body, "responses": {**responses, **_error_responses("Error")}}


def _file() -> Json:
    types = ("image/png", "image/jpeg", "image/webp")
    content = _content(dict.fromkeys(types, _PICTURE))
    responses = {"200": {"description": "The picture", "content": content}}
    return {
        "summary": "Get a picture that an answer with `response_format: url` names",
        "responses": {**responses, "404": {"description": "It is no longer kept"}},
        "security": [{}],
    }


def _jobs() -> Json:
    add = {
        "summary": "Start a job that runs an edit or a workflow",
        "parameters": [
            {
                "name": "Idempotency-Key",
                "in": "header",
                "schema": {**_TEXT, "pattern": _KEY_PATTERN},
            }
        ],
        **_edit_body("stream", "partial_images"),
        "responses": {
            "202": {"description": "The new job", "content": _content({_JSON: _ref("Job")})},
            **_error_responses("Error"),
            "501": {"description": "This router runs no jobs"},
        },
    }
    optional_id = {"type": ["string", "null"]}
    listed = _object(
        object=_TEXT,
        data=_list(_ref("Job")),
        first_id=optional_id,
        last_id=optional_id,
        has_more={"type": "boolean"},
        today={"type": "object"},
    )
    pages = [
        {
            "name": "limit",
            "in": "query",
            "schema": {"type": "integer", "minimum": 1, "maximum": MOST_LISTED},
        },
        {"name": "after", "in": "query", "schema": _TEXT},
    ]
    listing = {**_operation("List the jobs of the API key", listed), "parameters": pages}
    id_parameter = {"name": "id", "in": "path", "required": True, "schema": _TEXT}
    return {
        "/v1/jobs": {"post": add, "get": listing},
        "/v1/jobs/{id}": {
            "parameters": [id_parameter],
            "get": _operation("Get the state, progress and result of a job", _ref("Job")),
            "delete": _operation("Cancel a job, or delete a job that has ended", _DELETED),
        },
    }


def _masks() -> Json:
    mask_schema = _object(b64_json=_TEXT, score={"type": ["number", "null"]})
    answer = _operation(
        "Find the mask of an object", _object(object=_TEXT, data=_list(mask_schema)), "Error"
    )
    form = _strict({"image": _PICTURE, **_properties(MaskFrom)}, "image")
    return {"/v1/masks": {"post": answer | _body({_FORM: form})}}


def _workflows() -> Json:
    workflow_schema = _object(
        name=_TEXT,
        about=_TEXT,
        version=_INTEGER,
        digest=_TEXT,
        inputs=_list(_object(name=_TEXT, kind={"enum": list(INPUT_KINDS)})),
        steps=_list({"type": "object"}),
        outputs={"type": "object", "additionalProperties": _TEXT},
        notes=_list(_TEXT),
        early=_list(_TEXT),
        hosts={"type": "object", "additionalProperties": _list(_TEXT)},
    )
    listed = _object(object={"const": "list"}, data=_list(workflow_schema))
    summary = "List the workflows and the servers that run their nodes"
    return {"/v1/workflows": {"get": _operation(summary, listed)}}


def _job() -> Json:
    states = {"enum": ["queued", "running", "succeeded", "failed", "cancelled"]}
    job = _object(id=_TEXT, object={"const": "job"}, status=states, created_at=_INTEGER)
    job["properties"]["result"] = _ref("Images")
    return job


def _edit_body(*without: str) -> Json:
    """Return the request body of an edit, a form with files or JSON with URLs.

    Args:
        without: fields to leave out.
    """
    files = {"image": _PICTURE, "mask": _PICTURE}
    urls = {"images": _list(_ref("ImageUrl")), "mask": _ref("ImageUrl")}
    return _body({_FORM: _edit(files, without), _JSON: _edit(urls, without)})


def _edit(pictures: Json, without: Collection[str]) -> Json:
    """Return the fields of an edit: its pictures, OpenAI's fields, then settings."""
    settings = _properties(EditSettings)
    fields = {**_properties(Fields), **{name: settings[name] for name in sorted(EXTENSIONS)}}
    kept_fields = {name: schema for name, schema in fields.items() if name not in without}
    return _strict(
        {**pictures, **kept_fields}, *(name for name in ("prompt",) if name in kept_fields)
    )


def _picture() -> Json:
    """Return the schema of a picture in a response: its bytes or its URL; with `keep_result` also
    the id of the kept result, or null.
    """
    schema = _object(b64_json=_TEXT, url=_TEXT)
    schema["required"] = []
    schema["properties"]["template_id"] = {"type": ["string", "null"]}
    return schema


def _templates() -> Json:
    flags = {
        "prime": {"type": "boolean", "default": True},
        "shared": {"type": "boolean", "default": False},
    }
    form = _strict({"image": _PICTURE, **flags}, "image")
    register = _operation("Register a source image", _ref("Template")) | _body({_FORM: form})
    listed = _object(object=_TEXT, data=_list(_ref("Template")))
    template_path = "/v1/templates/{template_id}"
    paths: Json = {
        "/v1/templates": {
            "post": register,
            "get": _operation("List the templates of the API key", listed),
        },
        template_path: {
            "parameters": [_TEMPLATE],
            "get": _operation("Get a template", _ref("Template")),
            "delete": _operation("Delete a template and its entries", _ref("Template")),
        },
    }
    for operation, summary in (
        ("prime", "Compute the entries of a template"),
        ("pin", "Protect the entries of a template from eviction"),
        ("unpin", "Allow the eviction of a template's entries again"),
    ):
        answer = _operation(summary, _ref("Template"))
        paths[f"{template_path}/{operation}"] = {"parameters": [_TEMPLATE], "post": answer}
    return paths


def _kserve() -> Json:
    """Return KServe v2 and Triton's extensions; each model's tensors are in docs/design.md."""
    model_parameter = {**_MODEL, "schema": {"type": "string", "enum": sorted(CONTRACTS)}}
    base = "/v2/models/{model}"
    paths: Json = {
        "/v2": {"get": _operation("Get the server's metadata", {"type": "object"}, "KServeError")},
        "/v2/repository/index": {
            "post": _operation("List the models", _list({"type": "object"}), "KServeError")
            | _body({_JSON: _object(ready={"type": "boolean"})}, required=False)
        },
    }
    for path, summary in (
        ("", "Get the inputs and outputs of a model"),
        ("/config", "Get Triton's configuration of a model"),
        ("/stats", "Get the inference statistics of a model"),
    ):
        answer = _operation(summary, {"type": "object"}, "KServeError")
        paths[base + path] = {"parameters": [model_parameter], "get": answer}
    tensor = {
        "type": "object",
        "properties": {
            "name": _TEXT,
            "shape": _list(_INTEGER),
            "datatype": _TEXT,
            "data": {"type": "array"},
        },
        "required": ["name", "shape", "datatype"],
    }
    infer = _object(inputs=_list(tensor), id=_TEXT)
    infer["required"] = ["inputs"]
    generate = {"type": "object", "additionalProperties": _TEXT}
    stream = "Run a model and stream its responses"
    for path, schema, answer in (
        ("/infer", infer, _operation("Run a model", {"type": "object"}, "KServeError")),
        (
            "/generate",
            generate,
            _operation("Run a model with inputs given by name", {"type": "object"}, "KServeError"),
        ),
        (
            "/generate_stream",
            generate,
            _operation(stream, _TEXT, "KServeError", "text/event-stream"),
        ),
    ):
        paths[base + path] = {
            "parameters": [model_parameter],
            "post": answer | _body({_JSON: schema}),
        }
    return paths


def _health() -> Json:
    def probe(description: str, *no_codes: int) -> Json:
        no_responses = {str(code): {"description": "no"} for code in no_codes}
        responses = {"200": {"description": "yes"}, **no_responses}
        return {"get": {"summary": description, "responses": responses}}

    model_parameter = {**_MODEL, "schema": {"type": "string", "enum": sorted(CONTRACTS)}}
    return {
        "/healthz": probe("Whether the router is alive"),
        "/readyz": probe("Whether a worker takes edits", 503),
        "/v2/health/live": probe("Same as /healthz"),
        "/v2/health/ready": probe("Same as /readyz", 503),
        "/v2/models/{model}/ready": {
            "parameters": [model_parameter],
            **probe("Whether the model is served", 400),
        },
        "/openapi.json": probe("This document"),
    }


def _operation(description: str, schema: Json, error: str = "Error", media: str = _JSON) -> Json:
    success = {"description": description, "content": _content({media: schema})}
    return {"summary": description, "responses": {"200": success, **_error_responses(error)}}


def _error_responses(error: str) -> Json:
    content = _content({_JSON: _ref(error)})
    return {str(code): {"description": "The error", "content": content} for code in _ERROR_STATUSES}


def _body(schemas: Json, *, required: bool = True) -> Json:
    """Return the request body with these schemas by media type."""
    return {"requestBody": {"required": required, "content": _content(schemas)}}


def _content(schemas: Json) -> Json:
    return {media: {"schema": schema} for media, schema in schemas.items()}


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _reachable(tables: tuple[type, ...]) -> Json:
    """Return the schemas of the types in the fields of tables, without those of the tables."""
    _, schemas = msgspec.json.schema_components(tables, ref_template="#/components/schemas/{name}")
    return {name: schema for name, schema in schemas.items() if name not in _names(tables)}


def _strict(properties: Mapping[str, Json], *required: str) -> Json:
    """Return the schema of an object that allows no further keys."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _names(tables: tuple[type, ...]) -> set[str]:
    return {table.__name__ for table in tables}


def _properties(table: type[msgspec.Struct]) -> Mapping[str, Json]:
    """Return the schemas of a table's keys, each with its description."""
    _, schemas = msgspec.json.schema_components(
        (table,), ref_template="#/components/schemas/{name}"
    )
    descriptions = sentences(table)
    return {
        name: {**schema, "description": descriptions[name]} if name in descriptions else schema
        for name, schema in schemas[table.__name__]["properties"].items()
    }
