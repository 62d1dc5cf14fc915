"""Attacks of one client on the others, each bounded in time and count, on this machine alone.

They run in a separate process at low priority, so that honest edits show the attacks' effect on the
server and not a lack of cores.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import json
import multiprocessing
import os
import random
import socket
import threading
import time
import urllib.request
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio
import numpy as np
from PIL import Image
from tritonclient.grpc import service_pb2 as pb

from maskserve_benchmarks.soak.pictures import draw, png_file
from maskserve_common.contracts import bytes_tensor
from maskserve_common.files.sockets import short_path

_SERVICE = "/inference.GRPCInferenceService"
_MIB = 2**20
_STANDS_STILL_S = 15.0
_PATIENCE_S = 20.0
"""Seconds for which one attack waits for its responses."""


@dataclass(frozen=True, slots=True)
class Target:
    """A router and a worker behind it; all ports are on 127.0.0.1."""

    http: int
    grpc: int
    worker_http: int
    worker_grpc: int
    key: str
    """Key of the attacker."""
    withdrawn: str
    """A key that was valid before a reload."""
    page: int = 0
    """Port of a page that sends edits to the worker."""
    loras: Path = Path()
    """Folder of LoRAs; DAMAGED is one of them."""
    socket: Path = Path()
    """Socket of a ControlNet service."""
    shared: bytes = b""
    """A picture that other clients have registered, too."""
    shared_id: str = ""
    """Template id of that picture."""
    other_keys: tuple[str, ...] = ()
    """Further keys of the attacker, for attacks that need more than one key allows."""


DAMAGED = "damaged"
"""Name of the damaged LoRA."""
Attack: TypeAlias = Callable[[Target], Awaitable[Iterable[str]]]
"""Sends requests and returns how each one ended, in words."""


async def run(target: Target, until: float, report: Path, names: Sequence[str] = ()) -> None:
    """Run the named attacks, or all, again and again until the time `until`. Write the results to a
    file.
    """
    selected = [attack for attack in ATTACKS if not names or attack.__name__ in names]
    counts_by_attack: dict[str, Counter[str]] = {attack.__name__: Counter() for attack in selected}

    async def again(attack: Attack, rng: random.Random) -> None:
        while time.time() < until:
            try:
                ends = await asyncio.wait_for(attack(target), 3 * _PATIENCE_S)
                counts_by_attack[attack.__name__].update(ends)
            except Exception as error:
                counts_by_attack[attack.__name__][type(error).__name__] += 1
            await asyncio.sleep(rng.uniform(1.0, 5.0))

    await asyncio.gather(*(again(attack, random.Random(i)) for i, attack in enumerate(selected)))
    report.write_text(json.dumps(counts_by_attack, indent=2), encoding="utf-8")


def main(
    target: Target, seconds: float, report: Path, names: Sequence[str], ready: Event, go: Event
) -> None:
    """Run `run` as a whole process, after making the inputs that take long. Real attackers use
    their own machines, so this process runs at low priority.
    """
    os.nice(19)
    threading.Thread(target=_end_with_soak, daemon=True).start()
    payloads = (_zipped(159 * _MIB), _huge_mask(), _many_values(), _large_registration(), _noise())
    _corner()
    assert all((*payloads, _many_chunks()))
    ready.set()
    go.wait()
    asyncio.run(run(target, time.time() + seconds, report, names))


def _end_with_soak() -> None:
    """End this process when the soak's ends, even if that is killed."""
    soak = multiprocessing.parent_process()
    assert soak is not None
    soak.join()
    os._exit(1)


# Contents of requests


@cache
def picture() -> tuple[bytes, bytes]:
    small = draw(99, 64, 64)
    return small.image, small.mask


def edit(
    model: str = "edit",
    image: bytes = b"",
    mask: bytes = b"",
    control: bytes = b"",
    **settings: Any,
) -> bytes:
    """Return a request in gRPC's form; the default picture is a small one of the attacker."""
    own_image, own_mask = picture()
    message = pb.ModelInferRequest(model_name=model)
    for name, value in (
        ("IMAGE", image or own_image),
        ("MASK", mask or own_mask),
        ("PROMPT", b"mine"),
        ("SETTINGS", json.dumps({"num_inference_steps": 2, **settings}).encode()),
    ):
        bytes_tensor.add_input(message, name, [value])
    if control:
        bytes_tensor.add_input(message, "CONTROL", [control])
    return bytes(message.SerializeToString())


def operation(op: str, **fields: Any) -> bytes:
    message = pb.ModelInferRequest(model_name="control")
    bytes_tensor.add_input(message, "OP", [json.dumps({"op": op, **fields}).encode()])
    return bytes(message.SerializeToString())


async def calls(
    target: Target, requests: Iterable[bytes], *, port: int = 0, method: str = "ModelInfer"
) -> list[str]:
    """Make unary calls side by side with the attacker's key; return the status of each."""
    address, headers = f"127.0.0.1:{port or target.grpc}", (("x-api-key", target.key),)
    options = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.insecure_channel(address, options) as channel:
        call = channel.unary_unary(f"{_SERVICE}/{method}")

        async def one(request: bytes) -> str:
            try:
                await call(request, metadata=headers, timeout=_PATIENCE_S)
            except grpc.aio.AioRpcError as error:
                return str(error.code().name)
            return "OK"

        return list(await asyncio.gather(*map(one, requests)))


async def http_status(
    port: int, path: str, body: bytes, headers: dict[str, str], method: str = "POST"
) -> str:
    """Send one HTTP request; return the status of its response, or that there was none."""
    head = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
    head += [f"{name}: {value}" for name, value in {**headers, "Connection": "close"}.items()]
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return "refused"
    try:
        writer.write("\r\n".join((*head, "", "")).encode("latin-1") + body)
        line = await asyncio.wait_for(reader.readline(), _PATIENCE_S)
        return str(line.split()[1], "ascii") if line else "closed"
    except (OSError, asyncio.TimeoutError):
        return "none"
    finally:
        writer.close()


def _key(target: Target, **more: str) -> dict[str, str]:
    return {"x-api-key": target.key, **more}


# Keys


async def a_withdrawn_key(target: Target) -> Iterable[str]:
    return [
        await http_status(target.http, "/v1/models", b"", {"x-api-key": target.withdrawn}, "GET")
    ]


# Shares


async def bodies_that_stand_still(target: Target) -> Iterable[str]:
    opened = []
    for _ in range(6):
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", target.http)
            head = f"POST /v2/models/edit/infer HTTP/1.1\r\nHost: x\r\nx-api-key: {target.key}\r\n"
            writer.write(f"{head}Content-Length: {150 * _MIB}\r\n\r\n".encode() + bytes(_MIB))
            opened.append(writer)
    await asyncio.sleep(_STANDS_STILL_S)
    for writer in opened:
        writer.close()
    return [f"{len(opened)} opened"]


async def edits_of_high_priority(target: Target) -> Iterable[str]:
    return await calls(target, [edit(priority=100) for _ in range(20)])


async def registrations(target: Target) -> Iterable[str]:
    image = base64.b64encode(picture()[0]).decode()
    statuses = await calls(target, [operation("register", image=image) for _ in range(30)])
    operations = [operation("evict", template_id="0" * 32), operation("templates")]
    return [*statuses, *await calls(target, operations)]


async def registrations_beside_evictions(target: Target) -> Iterable[str]:
    """Register and evict a picture that other clients edit by its template id."""
    register = operation("register", image=base64.b64encode(target.shared).decode())
    evict = operation("evict", template_id=target.shared_id)
    return await calls(target, [register, evict] * 10)


@cache
def _large_registration() -> bytes:
    """Return a registration whose first bytes look like a picture."""
    return operation(
        "register", image=base64.b64encode(picture()[0][:64] + bytes(30 * _MIB)).decode()
    )


async def large_registrations(target: Target) -> Iterable[str]:
    return await calls(target, [_large_registration()] * 4)


async def kept_results(target: Target) -> Iterable[str]:
    return await calls(target, [edit(keep_result=True, seed=i) for i in range(4)])


WORKFLOW = "two_edits"
"""Name of a workflow that the attacked server must have: edits, and no nodes of other servers."""


async def runs_of_workflows(target: Target) -> Iterable[str]:
    message = pb.ModelInferRequest(model_name=WORKFLOW)
    image, mask = picture()
    settings = json.dumps({"num_inference_steps": 2}).encode()
    for name, value in (("IMAGE", image), ("MASK", mask), ("PROMPT", b"x"), ("SETTINGS", settings)):
        bytes_tensor.add_input(message, name, [value])
    return await calls(target, [message.SerializeToString()] * 8)


async def adapter_checks(target: Target) -> Iterable[str]:
    return await calls(target, [operation("adapter_check", name="any") for _ in range(20)])


# Work


@cache
def _zipped(size: int) -> bytes:
    return gzip.compress(bytes(size), 9)


async def inflating_bodies(target: Target) -> Iterable[str]:
    headers = _key(target, **{"Content-Encoding": "gzip"})
    path, body = "/v2/models/edit/infer", _zipped(159 * _MIB)
    return await asyncio.gather(*(http_status(target.http, path, body, headers) for _ in range(30)))


@cache
def _many_values() -> bytes:
    return b'{"inputs": [], "parameters": {' + b",".join(b'"%d":1' % i for i in range(10**6))


async def json_of_many_values(target: Target) -> Iterable[str]:
    paths = ("/v2/models/edit/infer", "/v2/models/edit/generate", "/v1/images/edits")
    headers = _key(target, **{"Content-Type": "application/json"})
    return [await http_status(target.http, path, _many_values(), headers) for path in paths]


async def messages_of_many_fields(target: Target) -> Iterable[str]:
    return await calls(target, [b"\x32\x00" * 5 * _MIB, b"\x2a\x00" * 5 * _MIB])


@cache
def _huge_mask() -> bytes:
    row = b"\0" + b"\xff" * 438 + b"\0" * 437
    return png_file(7000, 7000, 1, 0, row * 7000)


async def masks_of_many_pixels(target: Target) -> Iterable[str]:
    huge = [edit(mask=_huge_mask(), mask_feather=512 - i) for i in range(8)]
    return await calls(target, huge)


@cache
def _many_chunks() -> bytes:
    text = b"Comment\0\0" + zlib.compress(bytes(_MIB))
    return png_file(8, 8, 8, 0, bytes(9 * 8), ((b"zTXt", text),) * 4000)


async def pictures_of_many_chunks(target: Target) -> Iterable[str]:
    """Send pictures of a kilobyte that expand to a megabyte."""
    return await calls(target, [edit(image=_many_chunks(), seed=i) for i in range(4)])


async def pictures_by_url(target: Target) -> Iterable[str]:
    url = {"image_url": "https://192.88.99.1/a.png"}
    body = json.dumps({"prompt": "x", "images": [url], "mask": url}).encode()
    headers = _key(target, **{"Content-Type": "application/json"})
    return [await http_status(target.http, "/v1/images/edits", body, headers) for _ in range(20)]


async def damaged_loras(target: Target) -> Iterable[str]:
    loras = [{"name": DAMAGED}]
    return await calls(target, [edit(loras=loras), operation("adapter_check", name=DAMAGED)])


def damage_lora(folder: Path, number: int) -> None:
    """Write a LoRA with a name of 64 KB and 40,000 dimensions; it differs for each number."""
    tensor = {"dtype": "F16", "shape": [1] * 40_000, "data_offsets": [0, 2]}
    header = json.dumps({"a." * 32_000 + f"{number}.lora_A.weight": tensor}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(2)
    (folder / f"{DAMAGED}.safetensors").write_bytes(data)


async def loras_that_change(target: Target) -> Iterable[str]:
    damage_lora(target.loras, time.time_ns())
    with suppress(FileExistsError):
        (target.loras / "passwd.safetensors").symlink_to("/etc/passwd")
    listing = operation("adapters")
    return await calls(target, [listing, edit(loras=[{"name": "passwd"}])])


async def control_nets(target: Target) -> Iterable[str]:
    """Send invalid control pictures, unknown ControlNets, and nonsense to the socket."""
    with short_path(target.socket.parent) as folder:
        for nonsense in (b"\xff" * 100, b"{", b"\x81\xa1a", bytes(60_000)):
            with (
                suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door,
            ):
                door.settimeout(1.0)
                door.connect(f"{folder}/{target.socket.name}")
                door.send(nonsense)
                door.send(nonsense)
    none, huge = [{"name": "none"}], [{"name": "outline"}]
    bomb = png_file(60_000, 60_000, 1, 0, b"")
    return await calls(
        target,
        [edit(controls=none, control=picture()[0]), edit(controls=huge, control=bomb)],
    )


# History


async def jobs_and_lists_of_them(target: Target) -> Iterable[str]:
    """Send jobs that end at once, while sixteen connections list them."""
    image, mask = (base64.b64encode(data).decode() for data in picture())
    url = "data:image/png;base64,"
    job_request = {
        "prompt": "mine",
        "images": [{"image_url": url + image}],
        "mask": {"image_url": url + mask},
        "mask_mode": "white",
        "loras": [{"name": "nowhere"}],
    }
    body, kind = (
        json.dumps(job_request).encode(),
        _key(target, **{"Content-Type": "application/json"}),
    )
    statuses = [await http_status(target.http, "/v1/jobs", body, kind) for _ in range(30)]

    async def lists() -> list[str]:
        path = "/v1/jobs?limit=100"
        return [await http_status(target.http, path, b"", _key(target), "GET") for _ in range(10)]

    listed = await asyncio.gather(*(lists() for _ in range(16)))
    return [*statuses, *(end for ends in listed for end in ends)]


# Bytes of responses


_NOISE_SIDE = 2400


@cache
def _noise() -> bytes:
    """Return a picture of one megabyte whose edit answers with 16: noise that JPEG makes small."""
    shape = _NOISE_SIDE, _NOISE_SIDE, 3
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=15)
    return out.getvalue()


@cache
def _corner() -> bytes:
    """Return a mask of that size, transparent in a corner."""
    alpha = Image.new("L", (_NOISE_SIDE, _NOISE_SIDE), 255)
    alpha.paste(0, (0, 0, 200, 200))
    out = io.BytesIO()
    Image.merge("LA", (alpha, alpha)).save(out, "PNG")
    return out.getvalue()


async def large_answers(target: Target) -> Iterable[str]:
    """Request ten pictures in one request, with each of four keys."""
    edge = "edge-of-a-part"
    fields = {"prompt": "x", "n": "10", "num_inference_steps": "2", "crop_to_mask": "on"}
    parts = [
        f'--{edge}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    for name, file in (("image", _noise()), ("mask", _corner())):
        head = f'--{edge}\r\nContent-Disposition: form-data; name="{name}"; filename="a"\r\n\r\n'
        parts += [head.encode(), file, b"\r\n"]
    body = b"".join((*parts, f"--{edge}--\r\n".encode()))

    async def one(key: str) -> str:
        head = (
            f"POST /v1/images/edits HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\n"
            f"Content-Type: multipart/form-data; boundary={edge}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", target.http)
        except OSError:
            return "refused"
        try:
            writer.write(head.encode() + body)
            return await asyncio.wait_for(_read_whole(reader), 2 * _PATIENCE_S)
        except (OSError, asyncio.TimeoutError, IndexError):
            return "none"
        finally:
            writer.close()

    return await asyncio.gather(*map(one, (target.key, *target.other_keys)))


async def _read_whole(reader: asyncio.StreamReader) -> str:
    """Return the status of a response and whether it ended early; its body is discarded."""
    line, last = await reader.readline(), b""
    while part := await reader.read(_MIB):
        last = last[-8:] + part
    whole = last.endswith((b"0\r\n\r\n", b"}"))
    return f"{line.split()[1].decode()}{'' if whole else ' cut short'}"


# Headers, texts and ports


async def offers_of_http_2(target: Target) -> Iterable[str]:
    """Offer HTTP/2 and send a second request behind the offer. A vulnerable server would serve the
    second request; here it is refused for its missing key.
    """
    inner = b"GET /v1/models HTTP/1.1\r\nHost: inner\r\n\r\n"
    head = (
        f"POST /v1/images/edits HTTP/1.1\r\nHost: x\r\nx-api-key: {target.key}\r\n"
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(inner)}\r\n\r\n"
    )
    ends = []
    for _ in range(20):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", target.http)
            writer.write(head.encode())
            await asyncio.sleep(0.05)
            writer.write(inner)
            writer.write_eof()
            reply = await asyncio.wait_for(reader.read(), _PATIENCE_S)
            last = reply.rpartition(b"HTTP/1.1 ")[2][:3].decode()  # skip interim ones
            ends.append("served" if b"HTTP/1.1 200" in reply else last or "closed")
            writer.close()
        except (OSError, asyncio.TimeoutError):
            ends.append("none")
    return ends


async def edits_with_deadlines(target: Target) -> Iterable[str]:
    """Send more edits than there are places, including edits that can never be in time."""
    limits = (None, 1, 200, 2_000, 20_000, 600_000)
    settings_list: list[dict[str, Any]] = [
        {} if ms is None else {"deadline_ms": ms} for ms in limits for _ in range(8)
    ]
    return await calls(target, [edit(seed=i, **more) for i, more in enumerate(settings_list)])


async def headers_for_workers(target: Target) -> Iterable[str]:
    body = json.dumps({"inputs": []}).encode()
    path = "/v2/models/edit/infer"
    header_sets = (
        {"x-own": "a" * 20_000},
        {"x-own": "\xe9"},
        {"x-own-bin": "A"},
        {"traceparent": "x"},
    )
    ends = [
        await http_status(target.http, path, body, _key(target, **more)) for more in header_sets
    ]
    metadata = (("x-api-key", target.key), ("x-own", "a" * 20_000))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{target.grpc}") as channel:
        for _ in range(8):
            with suppress(grpc.aio.AioRpcError):
                await channel.unary_unary(f"{_SERVICE}/ModelInfer")(
                    edit(), metadata=metadata, timeout=_PATIENCE_S
                )
    return ends


async def shared_memory_of_a_worker(target: Target) -> Iterable[str]:
    region = json.dumps({"key": "/x", "offset": 0, "byte_size": 8}).encode()
    path = "/v2/systemsharedmemory/region/x/register"
    return [await http_status(target.worker_http, path, region, {})]


async def wrong_tensors(target: Target) -> Iterable[str]:
    message = pb.ModelInferRequest.FromString(edit())
    del message.inputs[1], message.raw_input_contents[1]
    classified = pb.ModelInferRequest.FromString(edit())
    classified.outputs.add(name="META").parameters["classification"].int64_param = 1
    return await calls(target, [message.SerializeToString(), classified.SerializeToString()])


# The page


async def large_pictures_of_the_page(target: Target) -> Iterable[str]:
    """Send twenty pictures of 49 megapixels, as the page's own script does."""
    port, ask = target.page, f"http://127.0.0.1:{target.page}/config"
    config = json.loads(await asyncio.to_thread(_fetch, ask))
    names = {
        component["props"].get("elem_id"): component["id"] for component in config["components"]
    }
    ends = []
    for number in range(20):
        file = base64.b64encode(_huge_mask() + bytes([number])).decode()
        call = {"session_hash": "x", "component_id": names["editor"], "fn_name": "take"}
        body = json.dumps({**call, "data": file}).encode()
        path, kind = "/gradio_api/component_server", {"Content-Type": "application/json"}
        ends.append(await http_status(port, path, body, kind))
    return ends


async def other_sites_at_the_page(target: Target) -> Iterable[str]:
    port, evil = target.page, {"Origin": "https://evil.example.com"}
    large = {"Content-Type": "application/json"}
    return [
        await http_status(port, "/config", b"", evil, "GET"),
        await http_status(port, "/gradio_api/upload", bytes(_MIB), {}),
        await http_status(port, "/gradio_api/component_server", bytes(100 * _MIB), large),
    ]


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_PATIENCE_S) as answer:
        return bytes(answer.read())


# Connections


async def streams_that_do_not_read(target: Target) -> Iterable[str]:
    headers = (("x-api-key", target.key),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{target.grpc}") as channel:
        stream = channel.stream_stream(f"{_SERVICE}/ModelStreamInfer")(metadata=headers)
        for number in range(6):
            request = edit("edit_stream", progress=True, preview_every=1, seed=number)
            await stream.write(request)
        await asyncio.sleep(_PATIENCE_S)
        stream.cancel()
    return ["left"]


async def silent_calls(target: Target) -> Iterable[str]:
    headers = (("x-api-key", target.key),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{target.grpc}") as channel:
        start = channel.stream_stream(f"{_SERVICE}/ModelStreamInfer")
        opened = [start(metadata=headers) for _ in range(700)]
        await asyncio.sleep(5.0)
        for call in opened:
            call.cancel()
    return [f"{len(opened)} opened"]


async def silent_connections(target: Target) -> Iterable[str]:
    opened = []
    for number in range(1200):
        with suppress(OSError):
            port = target.http if number % 2 else target.grpc
            opened.append(await asyncio.open_connection("127.0.0.1", port))
    await asyncio.sleep(8.0)
    for _, writer in opened:
        writer.close()
    return [f"{len(opened)} opened"]


async def requests_without_a_key(target: Target) -> Iterable[str]:
    requests = (http_status(target.http, "/v2/models/edit/infer", b"{}", {}) for _ in range(50))
    return await asyncio.gather(*requests)


ATTACKS: tuple[Attack, ...] = (
    a_withdrawn_key,
    bodies_that_stand_still,
    edits_of_high_priority,
    registrations,
    registrations_beside_evictions,
    large_registrations,
    kept_results,
    runs_of_workflows,
    adapter_checks,
    inflating_bodies,
    json_of_many_values,
    messages_of_many_fields,
    masks_of_many_pixels,
    pictures_of_many_chunks,
    pictures_by_url,
    damaged_loras,
    loras_that_change,
    control_nets,
    jobs_and_lists_of_them,
    large_answers,
    offers_of_http_2,
    edits_with_deadlines,
    headers_for_workers,
    shared_memory_of_a_worker,
    wrong_tensors,
    large_pictures_of_the_page,
    other_sites_at_the_page,
    streams_that_do_not_read,
    silent_calls,
    silent_connections,
    requests_without_a_key,
)
