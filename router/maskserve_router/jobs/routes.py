"""Routes of `/v1/jobs`: submit an edit as a job, read its state, end it."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from maskserve_common.errors import InvalidRequest
from maskserve_router.api.front import Front
from maskserve_router.api.openai.answers import error_boundary, json_answer
from maskserve_router.api.openai.form_reader import FormReader
from maskserve_router.jobs.jobs import Jobs
from maskserve_router.jobs.runner import description
from maskserve_router.messages.job_states import MOST_LISTED

_NAME = re.compile(r"[!-~]{1,255}")
"""Form of an idempotency key in a header."""


def job_routes(front: Front, reader: FormReader, jobs: Jobs) -> list[Route]:
    """Return the routes of jobs."""

    async def add(request: Request, request_id: str) -> Response:
        client = front.client(request.headers)
        idempotency_key = request.headers.get("idempotency-key")
        if idempotency_key is not None and _NAME.fullmatch(idempotency_key) is None:
            raise InvalidRequest(
                "Idempotency-Key", "has another form", "up to 255 characters of ASCII, no blanks"
            )
        with ExitStack() as exit_stack:
            form, _ = await reader.read(request, client, exit_stack)
            job, new = await jobs.add(form, client, idempotency_key)
        headers = {"location": f"/v1/jobs/{job.id}"}
        if not new:
            headers["idempotent-replayed"] = "true"
        return json_answer(description(job), request_id, 202, headers)

    async def listed(request: Request, request_id: str) -> Response:
        client = front.client(request.headers)
        query = request.query_params
        limit = query.get("limit", str(MOST_LISTED))
        if not re.fullmatch(r"[0-9]{1,3}", limit) or not 1 <= int(limit) <= MOST_LISTED:
            raise InvalidRequest("limit", f"is {limit[:20]!r}", f"1 to {MOST_LISTED}")
        page = await jobs.listed(client, int(limit), query.get("after"))
        return json_answer(msgspec.Raw(page), request_id)

    async def one(request: Request, request_id: str) -> Response:
        client = front.client(request.headers)
        job = await jobs.get(request.path_params["id"], client)
        body: dict[str, Any] = description(job)
        if job.state == "succeeded" and (result := await jobs.result(job, client)) is not None:
            body["result"] = msgspec.Raw(result)
        return json_answer(body, request_id)

    async def end(request: Request, request_id: str) -> Response:
        name = request.path_params["id"]
        job = await jobs.end(name, front.client(request.headers))
        if job is not None:
            return json_answer(description(job), request_id)
        return json_answer({"id": name, "object": "job.deleted", "deleted": True}, request_id)

    path = "/v1/jobs/{id}"
    return [
        Route("/v1/jobs", error_boundary(add), methods=["POST"]),
        Route("/v1/jobs", error_boundary(listed), methods=["GET"]),
        Route(path, error_boundary(one), methods=["GET"]),
        Route(path, error_boundary(end), methods=["DELETE"]),
    ]
