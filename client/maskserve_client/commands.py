"""The subcommands of `maskserve`. They raise errors; `cli` turns these into exit codes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
from tqdm import tqdm

from maskserve_client.address import DEFAULTS, grpc_address, http_address
from maskserve_client.client import Client
from maskserve_client.errors import ServerUnavailable
from maskserve_client.events import EditResult, Final, Preview, Progress
from maskserve_client.masks import Masks
from maskserve_client.templates import Templates
from maskserve_common.contracts.memory_table import MemoryTable
from maskserve_common.contracts.meta import STAGES
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import DeadlineExceeded, EngineFailed, InvalidRequest, Overloaded
from maskserve_common.files.store import FileStore
from maskserve_lora.lora_header import BadAdapter
from maskserve_lora.store import describe_file

_FORMATS = {".png": "png", ".webp": "webp", ".jpg": "jpeg", ".jpeg": "jpeg"}
_PREVIEW_EVERY = 4
_POLL_S, _PROGRESS_S = 0.25, 2
_STORAGE_TIMEOUT_S = 80.0
"""Timeout of operations that wait for a slow storage of LoRAs."""


def connected(options: argparse.Namespace) -> Client:
    """Return a client of the server that the options name, with their key.

    Raises:
        InvalidRequest: `--ca` is not a file of certificates.
    """
    credentials = None
    if options.tls or options.ca is not None:
        credentials = grpc.ssl_channel_credentials(_authorities(options.ca))
    headers = {"x-api-key": options.key} if options.key else {}
    url = grpc_address(options.url, tls_context(options))
    return Client(url, credentials=credentials, headers=headers)


def _authorities(path: str | None) -> bytes | None:
    """Return the certificates of a PEM file; None: trust those of the system."""
    if path is None:
        return None
    certificates = Path(path).read_bytes()
    if b"-----BEGIN CERTIFICATE-----" not in certificates:
        raise InvalidRequest("--ca", f"{path} holds no certificate", "a PEM file")
    return certificates


def edit(options: argparse.Namespace) -> None:
    """Run `maskserve edit`, and `maskserve generate`, which has no picture."""
    out = Path(options.out)
    settings = _settings(options, out)
    inputs = (options.image, options.mask, options.prompt)
    terminal = sys.stderr.isatty()
    stream = options.stream if options.stream is not None else terminal
    if options.wait is not None:
        _wait_ready(options)
    with connected(options) as client:
        try:
            if stream or options.previews:
                result = _follow(client, inputs, settings, options, show=terminal)
            else:
                result = client.edit(*inputs, timeout=options.timeout, **settings)
        except (ServerUnavailable, Overloaded) as error:
            if options.wait is None and not _is_ready(options):
                hint = "; use --wait SECONDS to wait for a server that is loading"
                raise type(error)(error.message + hint) from None
            raise
    write_whole(out, result.encoded)
    print(json.dumps(result.meta) if options.json else f"{out}: {_summary(result.meta)}")
    for warning in result.meta.get("warnings", ()):
        print(f"warning: {warning}", file=sys.stderr)


def _wait_ready(options: argparse.Namespace) -> None:
    """Wait until the server is ready, at most `--wait` seconds, and report the wait.

    Raises:
        ServerUnavailable: it is not ready by then.
    """
    began = time.monotonic()
    next_report_s = 0
    while not _is_ready(options):
        waited = time.monotonic() - began
        if waited >= options.wait:
            raise ServerUnavailable(
                f"{options.url or DEFAULTS[0]}: not ready within {options.wait:g} s"
            )
        if int(waited) >= next_report_s:
            print(f"not ready yet, loading for {int(waited)} s", file=sys.stderr)
            next_report_s = int(waited) + _PROGRESS_S
        time.sleep(min(_POLL_S, options.wait))


def _is_ready(options: argparse.Namespace) -> bool:
    """Return True if a worker takes edits there.

    Each call opens a new connection, because gRPC waits longer after each failure before it opens
    a failed one again.
    """
    try:
        with connected(options) as client:
            values = client.control("status")
    except (ServerUnavailable, Overloaded, DeadlineExceeded):
        return False
    workers = values.get("workers", {"": values})
    return any(worker.get("state") == "ready" for worker in workers.values())


def _settings(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Return the settings of an edit, and its control pictures."""
    if out.suffix.lower() not in _FORMATS:
        raise InvalidRequest("--out", f"{out.name} has an unknown suffix", ", ".join(_FORMATS))
    if not out.parent.is_dir():
        raise InvalidRequest("--out", f"there is no folder {out.parent}", "an existing folder")
    settings = {**settings_of(options), "output_format": _FORMATS[out.suffix.lower()]}
    if options.previews:
        settings["preview_every"] = options.preview_every or _PREVIEW_EVERY
    elif options.preview_every is not None:
        raise InvalidRequest("--preview-every", "needs --previews", "both of them")
    return settings


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that an edit's options give, without unset ones.

    `control` has the pictures of its ControlNets, `images` its references.

    Raises:
        InvalidRequest: an option is malformed.
    """
    option_values = {name: getattr(options, name, None) for name in EditSettings.__struct_fields__}
    settings = {name: value for name, value in option_values.items() if value is not None}
    if options.expand is not None:
        settings["expand"] = _margins(options.expand)
    if mask_source := mask_from(options):
        settings["mask_from"] = mask_source
    if options.lora:
        settings["loras"] = [_lora(text) for text in options.lora]
    if options.reference:
        settings["images"] = options.reference
    if options.ip_adapter:
        settings["ip_adapter"], picture = _named_picture("--ip-adapter", options.ip_adapter)
        settings["images"] = [*(options.reference or ()), picture]
    if options.control:
        settings["controls"], settings["control"] = zip(
            *(_named_picture("--control", text) for text in options.control), strict=True
        )
    return settings


def _margins(text: str) -> list[int]:
    try:
        left, top, right, bottom = (int(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest(
            "--expand", f"{text!r} is not four pixel counts", "LEFT,TOP,RIGHT,BOTTOM, as 0,0,256,0"
        ) from None
    return [left, top, right, bottom]


def mask_from(options: argparse.Namespace) -> dict[str, Any]:
    """Return the setting `mask_from` of `--find`, `--click` and `--box`; the server checks it.

    Raises:
        InvalidRequest: numbers are malformed.
    """
    mask_source: dict[str, Any] = {} if options.find is None else {"text": options.find}
    if options.click:
        clicks = [_numbers("--click", text, (2, 3), "X,Y, or X,Y,0") for text in options.click]
        mask_source["points"] = [[*click, 1] if len(click) == 2 else click for click in clicks]
    if options.box is not None:
        mask_source["box"] = _numbers("--box", options.box, (4,), "LEFT,TOP,RIGHT,BOTTOM")
    return mask_source


def _numbers(option: str, text: str, counts: tuple[int, ...], accepted: str) -> list[float]:
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in counts:
        raise InvalidRequest(option, f"is {text!r}", accepted)
    return [int(number) if number == int(number) else number for number in numbers]


def mask(options: argparse.Namespace) -> None:
    """Run `maskserve mask`: write the mask of an object in a picture."""
    context = tls_context(options)
    masks = Masks(http_address(options.url, context), key=options.key, context=context)
    scored_mask = masks.find(Path(options.image), **mask_from(options))
    Path(options.out).write_bytes(scored_mask.mask)
    record = {"out": options.out, "score": scored_mask.score}
    score = "" if scored_mask.score is None else f", score {scored_mask.score:.2f}"
    print(json.dumps(record) if options.json else f"{options.out}{score}")


def _lora(text: str) -> dict[str, Any]:
    """Return the setting for NAME or NAME:SCALE; the server checks the name."""
    name, colon, scale = text.partition(":")
    try:
        return {"name": name, "scale": float(scale)} if colon else {"name": name}
    except ValueError:
        raise InvalidRequest(
            "--lora", f"{scale!r} is not a number", "NAME or NAME:SCALE, as hollow:0.8"
        ) from None


def _named_picture(option: str, text: str) -> tuple[dict[str, Any], str]:
    """Return the setting and the file for NAME=FILE or NAME:SCALE=FILE."""
    scaled_name, equals, file = text.partition("=")
    name, colon, scale = scaled_name.partition(":")
    form = "NAME=FILE or NAME:SCALE=FILE, as outline:0.8=edges.png"
    if not equals or not file:
        raise InvalidRequest(option, f"{text!r} names no file", form)
    try:
        return ({"name": name, "scale": float(scale)} if colon else {"name": name}), file
    except ValueError:
        raise InvalidRequest(option, f"{scale!r} is not a number", form) from None


def _follow(
    client: Client,
    inputs: tuple[Any, Any, str],
    settings: dict[str, Any],
    options: argparse.Namespace,
    *,
    show: bool,
) -> EditResult:
    """Run the edit by its stream, with a progress bar if `show`."""
    events = client.edit_stream(*inputs, timeout=options.timeout, **settings)
    with closing(events), tqdm(unit="step", disable=not show, leave=False) as bar:
        for event in events:
            match event:
                case Progress(step, steps):
                    bar.total = steps
                    bar.update(step - bar.n)
                case Preview(step, _, image):
                    folder = Path(options.previews)
                    folder.mkdir(parents=True, exist_ok=True)
                    image.save(folder / f"step-{step:04}.png", compress_level=1)
                case Final(result):
                    return result
    raise EngineFailed("the server sent no final answer")


def _summary(meta: dict[str, Any]) -> str:
    timings = meta.get("timings_ms", {})
    seconds = sum(timings.get(stage, 0.0) for stage in STAGES) / 1e3
    cache = meta.get("cache", "off")
    parts = [
        f"seed {meta.get('seed')}",
        f"{meta.get('steps')} steps",
        _tokens(meta),
        f"cache {cache.get('state', '?') if isinstance(cache, dict) else cache}",
        f"{seconds:.2f} s on {meta.get('worker')}",
    ]
    if "result_template_id" in meta:
        template_id = meta["result_template_id"]
        parts.append(f"kept as {template_id}" if template_id else "not kept")
    return ", ".join(parts)


def _tokens(meta: dict[str, Any]) -> str:
    """Return the number of masked tokens, and the computed share of the tokens of all steps."""
    active, total = meta.get("active_tokens"), meta.get("total_tokens")
    summary = f"{active} of {total} tokens active"
    computed, whole = meta.get("computed_tokens"), (total or 0) * meta.get("steps", 0)
    if computed is None or not whole:  # a server of an earlier version
        return summary
    return f"{summary}, {computed / whole:.0%} computed"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file as a whole: readers see the previous content or the new one.

    Raises:
        OSError: it cannot be written; the previous file stays.
    """
    FileStore(path.parent, is_shared=True).write(path.name, data, mode=0o666)


def status(options: argparse.Namespace) -> None:
    """Run `maskserve status`.

    Raises:
        ServerUnavailable: no worker is alive; the status is printed before.
    """
    with connected(options) as client:
        values = client.control("status")
    if options.json:
        print(json.dumps(values))
    else:
        _show_status(values)
    if not values.get("alive", True):
        raise ServerUnavailable(f"{values.get('worker')}: no worker is alive")


def _show_status(values: dict[str, Any]) -> None:
    workers = values.get("workers")
    if workers is None:
        _show_worker(str(values.get("worker")), values)
        return
    up = sum(bool(worker.get("up")) for worker in workers.values())
    print(f"{values.get('worker')}: {up} of {len(workers)} workers answer")
    error = values.get("prediction")
    if error is not None:
        print(
            f"predicted times were off by {error['median']:.0%} (median) and {error['p95']:.0%} "
            f"(P95), last {error['edits']} edits"
        )
    target_counts = values.get("wanted", {"workers": {}, "nodes": 0})
    counts = [f"{count} of {model}" for model, count in target_counts["workers"].items()]
    if servers := target_counts["nodes"]:
        counts.append(f"{servers} node server{'s' if servers > 1 else ''}")
    if counts:
        print(f"wanted   {', '.join(counts)}")
    for host_values in values.get("values", []):
        print(
            f"values   {host_values['count']}, {host_values['bytes'] / 2**20:.1f} MiB in files "
            "of a host"
        )
    for address, worker in sorted(workers.items()):
        _show_worker(f"{address} {worker.get('worker', '')}".strip(), worker)
    for address, record in sorted(values.get("nodes", {}).items()):
        _show_nodes(address, record)


def _show_nodes(address: str, record: dict[str, Any] | None) -> None:
    """Print a node server: its models, their state, waiting calls and seconds per call."""
    if record is None:
        print(f"{address}: a node server, NOT ALIVE")
        return
    loaded_bytes = sum(model["bytes"] for model in record["models"] if model["state"] == "ready")
    room = record["device_bytes"] / 2**20
    print(f"{address}: a node server, {loaded_bytes / 2**20:.1f} of {room:.0f} MiB")
    for model in record["models"]:
        print(
            f"{model['name']:8} {model['state']}, {model['bytes'] / 2**20:.1f} MiB, "
            f"{model['queue']} "
            f"calls wait or run, {model['ended']} ended, {model['seconds']:.2f} s each"
        )


def _show_worker(name: str, values: dict[str, Any]) -> None:
    running, waiting = values.get("running", []), values.get("waiting", [])
    marks = ["" if values.get("alive", values.get("up", True)) else ", NOT ALIVE"]
    marks += [f", {mark}" for mark in ("ejected", "draining") if values.get(mark)]
    state = values.get("state")
    marks += [f", {n['name']} {n['state']}" for n in values.get("nodes", []) if n["state"] != state]
    print(f"{name}: {values.get('model', '?')}, {state}{''.join(marks)}")
    if "max_rows" not in values:  # a worker that does not answer
        return
    print(f"running  {len(running)} of {values['max_rows']}")
    for row in running:
        print(
            f"         {row['request_id']}: {row['kind']}, {row['steps_left']} steps left, "
            f"{row['active_tokens']} of {row['total_tokens']} tokens"
        )
    print(f"waiting  {len(waiting)} of {values.get('max_waiting', '?')}")
    for tier, ids in sorted(values.get("templates", {}).items()):
        tier_bytes = values.get("tier_bytes", {}).get(tier, 0)
        print(f"{tier:8} {len(ids)} templates, {tier_bytes / 2**20:.1f} MiB")
    if values.get("memory"):
        print(msgspec.convert(values["memory"], MemoryTable).text())


def web(options: argparse.Namespace) -> None:
    """Run `maskserve web`."""
    from maskserve_page.web import serve_page  # Gradio is an extra

    masks = None
    if options.router is not None:
        context = tls_context(options)
        masks = Masks(http_address(options.router, context), key=options.key, context=context)
    serve_page(options, lambda: connected(options), masks)


def demo(options: argparse.Namespace) -> int:
    """Run `maskserve demo`: the checkout's demonstration, whose model no wheel holds.

    Raises:
        InvalidRequest: this is no checkout.
    """
    benchmarks = importlib.util.find_spec("maskserve_benchmarks")
    if benchmarks is None or benchmarks.origin is None:
        raise InvalidRequest(
            "demo",
            "the demo model is in maskserve's sources (assets/models/demo), not in this package",
            "`make demo` in the sources, or `maskserve serve --model FOLDER` with another model",
        )
    return subprocess.call(
        [sys.executable, Path(benchmarks.origin).parents[2] / "scripts/bench", "demo"]
    )


def cancel(options: argparse.Namespace) -> None:
    """Run `maskserve cancel`."""
    with connected(options) as client:
        withdrawn = {name: client.cancel(name) for name in options.ids}
    if options.json:
        print(json.dumps(withdrawn))
    else:
        for name in (name for name, is_cancelled in withdrawn.items() if is_cancelled):
            print(f"cancelled {name}")
    unknown = [name for name, is_cancelled in withdrawn.items() if not is_cancelled]
    if unknown:
        raise InvalidRequest("ID", f"no edit in flight has this id: {', '.join(unknown)}")


def drain(options: argparse.Namespace) -> None:
    """Run `maskserve drain`."""
    with connected(options) as client:
        values = client.control("drain")
    in_flight = values["in_flight"]
    print(json.dumps(values) if options.json else f"takes no new edits; {in_flight} in flight")


class _GrpcTemplates:
    """Templates of a worker or router, over gRPC."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def add(self, image: str, *, shared: bool) -> str:
        return self._client.register(image, shared=shared)

    def all(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self._client.control("templates")["templates"]
        return listed

    def do(self, op: str, name: str) -> dict[str, Any]:
        return self._client.control(op, template_id=name)


class _HttpTemplates:
    """Templates of a router, over its HTTP API."""

    def __init__(self, templates: Templates) -> None:
        self._templates = templates

    def add(self, image: str, *, shared: bool) -> str:
        return str(self._templates.register(image, shared=shared)["id"])

    def all(self) -> list[dict[str, Any]]:
        return self._templates.list()

    def do(self, op: str, name: str) -> dict[str, Any]:
        return {
            "pin": self._templates.pin,
            "unpin": self._templates.unpin,
            "evict": self._templates.delete,
        }[op](name)


def tls_context(options: argparse.Namespace) -> ssl.SSLContext | None:
    """Return the TLS context for `--tls` or `--ca`; None: plain text."""
    if options.ca is None:
        return ssl.create_default_context() if options.tls else None
    trusted = _authorities(options.ca)
    assert trusted is not None
    return ssl.create_default_context(cadata=trusted.decode())


@contextmanager
def _templates(options: argparse.Namespace) -> Iterator[_GrpcTemplates | _HttpTemplates]:
    """Yield the server's templates; `--url http://…` is a router's HTTP port."""
    if options.url.startswith(("http://", "https://")):
        yield _HttpTemplates(Templates(options.url, key=options.key, context=tls_context(options)))
        return
    with connected(options) as client:
        yield _GrpcTemplates(client)


def templates_add(options: argparse.Namespace) -> None:
    """Run `maskserve templates add`."""
    template_ids = {}
    with _templates(options) as templates:
        for name in options.images:
            template_ids[name] = templates.add(name, shared=options.shared)
            if not options.json:
                print(f"{template_ids[name]}  {name}")
    if options.json:
        print(json.dumps(template_ids))


def templates_list(options: argparse.Namespace) -> None:
    """Run `maskserve templates ls`."""
    with _templates(options) as templates:
        values = {"templates": templates.all()}
    if options.json:
        print(json.dumps(values))
        return
    for template in values["templates"]:
        print(f"{template['template_id']}  {_lifetime(template)}")
    entries = [entry for template in values["templates"] for entry in template["entries"]]
    if entries:
        print(f"{len(values['templates'])} templates, {_entries_text(entries)}")


def _lifetime(template: dict[str, Any]) -> str:
    """Return in words whether a template is registered, and where its entries lie."""
    entries = template["entries"]
    cached = _entries_text(entries) if entries else "not cached"
    if template["registered"]:
        return f"registered, {cached}"
    return f"{cached} only: register the image to edit it by this id"


def _entries_text(entries: list[dict[str, Any]]) -> str:
    """Return in words the entries' bytes by tier."""
    by_tier: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        by_tier.setdefault(entry.get("tier", "?"), []).append(entry)
    tiers = [
        f"{tier} {sum(entry.get('bytes', 0) for entry in tier_entries) / 2**20:.1f} MiB"
        + ("" if all(entry.get("whole", True) for entry in tier_entries) else " (in part)")
        + (", pinned" if any(entry.get("pinned") for entry in tier_entries) else "")
        for tier, tier_entries in by_tier.items()
    ]
    return f"cached on {', '.join(tiers)}"


def templates_change(options: argparse.Namespace) -> None:
    """Run `maskserve templates rm`, `pin` and `unpin`: one operation on each id."""
    results = []
    with _templates(options) as templates:
        for name in options.ids:
            results.append(templates.do(options.op, name))
            if not options.json:
                print(f"{options.op} {name}")
    if options.json:
        print(json.dumps(results))


def adapters_list(options: argparse.Namespace) -> None:
    """Run `maskserve adapters ls`."""
    with connected(options) as client:
        values = client.control("adapters", timeout=_STORAGE_TIMEOUT_S)
    if options.json:
        print(json.dumps(values))
        return
    for adapter in values["adapters"]:
        print(f"{adapter['name']:32} {_adapter_text(adapter)}")
    for net in values.get("controlnets", ()):
        print(f"{net['name']:32} {_controlnet_text(net)}")
    if values["problem"]:
        print(f"the storage does not answer: {values['problem']}", file=sys.stderr)


def _adapter_text(record: dict[str, Any]) -> str:
    """Return in words an adapter's rank, size and parts, and where it lies."""
    if record["problem"]:
        return f"not served: it {record['problem']}"
    location = " and ".join(_tiers(record)) or "in the storage only"
    size = f"rank {record['rank']}, {record['bytes'] / 2**20:.1f} MiB, {', '.join(record['parts'])}"
    notes = "".join(f"; {note}" for note in record.get("notes", ()))
    return f"{size}; {location}{', pinned' if record['pinned'] else ''}{notes}"


def _controlnet_text(record: dict[str, Any]) -> str:
    """Return in words a ControlNet's size, and where it lies."""
    if record["problem"]:
        return f"not served: it {record['problem']}"
    location = " and ".join(_tiers(record)) or "in the folder only"
    return f"ControlNet, {record['bytes'] / 2**20:.1f} MiB; {location}"


def _tiers(record: dict[str, Any]) -> list[str]:
    tiers = record["tiers"]
    if isinstance(tiers, dict):  # a router's answer has tiers by worker
        return sorted({tier for worker_tiers in tiers.values() for tier in worker_tiers})
    return list(tiers)


def adapters_check(options: argparse.Namespace) -> None:
    """Run `maskserve adapters check`: check files here, and other names at the server."""
    files = [
        name
        for name in options.names
        if name.lower().endswith(".safetensors") or Path(name).is_dir()
    ]
    if options.gguf and not options.model:
        raise InvalidRequest("--gguf", "needs --model, the folder whose transformer it replaces")
    checked = [_checked_file(name, options.model, options.gguf) for name in files]
    names = [name for name in options.names if name not in files]
    if names:
        with connected(options) as client:
            for name in names:
                checked.append(
                    client.control("adapter_check", name=name, timeout=_STORAGE_TIMEOUT_S)
                )
    if options.json:
        print(json.dumps(checked))
        return
    for record in checked:
        digest = record["digest"][:16]
        print(
            f"{record['name']}: rank {record['rank']}, {record['bytes'] / 2**20:.1f} MiB, "
            f"{', '.join(record['parts'])}, sha256 {digest}…"
        )
        for note in record.get("notes", ()):
            print(f"{record['name']}: {note}")


def _checked_file(name: str, model: str | None, gguf: str) -> dict[str, Any]:
    """Return the description of a file. Raises InvalidRequest: it could not be served."""
    try:
        return describe_file(Path(name), model, gguf)
    except BadAdapter as error:
        raise InvalidRequest(name, str(error)) from error


def adapters_change(options: argparse.Namespace) -> None:
    """Run `maskserve adapters load`, `pin`, `unpin` and `evict`: one operation on each name."""
    results = []
    with connected(options) as client:
        for name in options.names:
            results.append(client.control(options.op, name=name, timeout=_STORAGE_TIMEOUT_S))
            if not options.json:
                print(f"{options.op.removeprefix('adapter_')} {name}")
    if options.json:
        print(json.dumps(results))
