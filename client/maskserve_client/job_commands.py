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
        help="edits that nobody waits for",
        description="Edits that a router makes while nobody waits. --url is its HTTP port.",
    )
    actions = jobs.add_subparsers(required=True, metavar="ACTION")
    add = actions.add_parser(
        "add",
        help="have an edit made; prints the job's id",
        epilog="example: maskserve jobs add --url http://localhost:8080 --image a.png "
        '--mask m.png --prompt "a red star"',
    )
    add_edit_options(add)
    add.add_argument(
        "--format", dest="output_format", choices=("png", "webp", "jpeg"), help="of the answer"
    )
    add.add_argument("--webhook", metavar="URL", help="https URL that is told of its end")
    add.add_argument("--output-url", metavar="URL", help="where the picture is to be put")
    add.add_argument(
        "--idempotency-key", default="", metavar="KEY", help="added again, it is the same job"
    )
    listing = actions.add_parser("ls", help="list the last hundred")
    get = actions.add_parser("get", help="what has become of one")
    get.add_argument("id", metavar="ID", help="as jobs add prints it")
    get.add_argument("--wait", action="store_true", help="until it has ended")
    get.add_argument("--timeout", type=float, metavar="S", help="wait for so long at most")
    get.add_argument("--out", type=Path, metavar="FILE", help="for its picture")
    remove = actions.add_parser("rm", help="cancel jobs; of those that have ended nothing is left")
    remove.add_argument("ids", nargs="+", metavar="ID", help="as jobs add prints it")
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
    listed = _jobs(options).list()
    print(json.dumps({"jobs": listed}) if options.json else "\n".join(map(_line, listed)))


def _get(options: argparse.Namespace) -> None:
    jobs = _jobs(options)
    job = jobs.wait(options.id, options.timeout) if options.wait else jobs.get(options.id)
    if job["status"] == "failed":
        raise error_of(job["error"])
    if options.out is not None:
        files = pictures(job) if "result" in job else []
        if len(files) != 1:
            message = f"{options.id} is {job['status']}, with {len(files)} pictures"
            raise InvalidRequest("--out", message, "a job that has made one")
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
