"""`maskserve jobs`: edits that a router runs without an open connection."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maskserve_client.address import http_address
from maskserve_client.commands import settings_of, tls_context, write_whole
from maskserve_client.jobs import EditJobs, pictures
from maskserve_client.router_http import error_of
from maskserve_common.errors import InvalidRequest


def add_jobs(
    subcommands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_common: Callable[[argparse.ArgumentParser], None],
    add_edit_options: Callable[[argparse.ArgumentParser], Any],
) -> None:
    """Add the parser of `maskserve jobs`.

    `add_common` adds the options for a server, `add_edit_options` those of an edit.
    """
    jobs = subcommands.add_parser(
        "jobs",
        help="run edits in the background of a router",
        description="Run edits in the background of a router, and fetch their results later. --url "
        "is the router's HTTP port.",
    )
    actions = jobs.add_subparsers(required=True, metavar="ACTION")
    add = actions.add_parser(
        "add",
        help="add a job for an edit and print its id",
        description="Add a job for an edit and print its id. Without --image and --template-id it "
        "makes an image from the prompt alone.",
        epilog="example: maskserve jobs add --url http://localhost:8080 --image a.png "
        '--mask m.png --prompt "a red star"',
    )
    add_edit_options(add)
    add.add_argument(
        "--format", dest="output_format", choices=("png", "webp", "jpeg"), help="picture format"
    )
    add.add_argument("--webhook", metavar="URL", help="https URL to call when the job has ended")
    add.add_argument(
        "--output-url", metavar="URL", help="URL to which the router writes the picture"
    )
    add.add_argument(
        "--idempotency-key",
        default="",
        metavar="KEY",
        help="the router adds no second job for an equal request with the same key",
    )
    listing = actions.add_parser("ls", help="list the last hundred jobs")
    get = actions.add_parser("get", help="show a job")
    get.add_argument("id", metavar="ID", help="job id, as printed by jobs add")
    get.add_argument("--wait", action="store_true", help="wait until the job has ended")
    get.add_argument("--timeout", type=float, metavar="S", help="with --wait: most seconds to wait")
    get.add_argument("--out", type=Path, metavar="FILE", help="file for the job's picture")
    remove = actions.add_parser("rm", help="cancel jobs, and delete jobs that have ended")
    remove.add_argument("ids", nargs="+", metavar="ID", help="job id, as printed by jobs add")
    for command, run in ((add, _add), (listing, _list), (get, _get), (remove, _remove)):
        add_common(command)
        command.set_defaults(run=run)


def _jobs(options: argparse.Namespace) -> EditJobs:
    context = tls_context(options)
    return EditJobs(http_address(options.url, context), key=options.key, context=context)


def _add(options: argparse.Namespace) -> None:
    settings = settings_of(options)
    if (quality := settings.pop("output_quality", None)) is not None:
        settings["output_compression"] = quality
    for name in ("webhook", "output_url"):
        if (value := getattr(options, name)) is not None:
            settings[name] = value
    key = options.idempotency_key
    inputs = (options.image, options.mask, options.prompt)
    job = _jobs(options).add(*inputs, idempotency_key=key, **settings)
    print(json.dumps(job) if options.json else job["id"])


def _list(options: argparse.Namespace) -> None:
    jobs = _jobs(options).list()
    print(json.dumps({"jobs": jobs}) if options.json else "\n".join(map(_line, jobs)))


def _get(options: argparse.Namespace) -> None:
    jobs = _jobs(options)
    job = jobs.wait(options.id, options.timeout) if options.wait else jobs.get(options.id)
    if job["status"] == "failed":
        raise error_of(job["error"])
    if options.out is not None:
        files = pictures(job) if "result" in job else []
        if len(files) != 1:
            message = f"{options.id} is {job['status']}, with {len(files)} pictures"
            raise InvalidRequest("--out", message, "a job that has made one picture")
        write_whole(options.out, files[0])
    print(json.dumps(job) if options.json else _line(job))


def _remove(options: argparse.Namespace) -> None:
    jobs = _jobs(options)
    deleted_jobs = {name: jobs.delete(name) for name in options.ids}
    states = {
        name: "deleted" if "deleted" in job else job["status"] for name, job in deleted_jobs.items()
    }
    text = "\n".join(f"{name}  {state}" for name, state in states.items())
    print(json.dumps(states) if options.json else text)


def _line(job: dict[str, Any]) -> str:
    progress = job.get("progress") or {}
    steps = f", step {progress['step']} of {progress['steps']}" if "steps" in progress else ""
    return f"{job['id']}  {job['status']}{steps}"
