"""Masks found by node servers: for `/v1/masks`, and for edits with `mask_from`."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from functools import partial
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.config import LimitsConfig
from maskserve_common.contracts import bytes_tensor
from maskserve_common.contracts.settings import MaskFrom
from maskserve_common.errors import EngineFailed, InvalidRequest
from maskserve_common.imaging.images import decode_mask
from maskserve_common.imaging.masks import selected_pixels
from maskserve_common.servers.failure import Failure
from maskserve_router.api.openai.masks import _text_of_mask
from maskserve_router.config import WorkflowFiles
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.nodes import node_server
from maskserve_router.nodes.node_messages import NodeAnswer
from maskserve_router.nodes.node_pool import NodePool
from maskserve_router.nodes.node_server import NodeServer
from maskserve_router.nodes.segmenter import segment
from maskserve_router.scheduling.mask_finder import MaskFinder
from maskserve_workflows.run import Task
from maskserve_workflows.values import Judgement
from tests.fakes.pictures import encode, scene
from tests.support.router import cluster

CLIENT = KeyHolder("anybody", 64, admin=True)
PLACES = {"points": [[3, 4, 1]], "box": [0, 0, 9, 9]}


class Pool:
    """Node servers that run these models."""

    def __init__(self, *models: str, fails: str = "") -> None:
        self.models, self.fails = models, fails
        self.tasks: list[Task] = []

    async def serves(self, model: str) -> bool:
        return model in self.models

    async def call(self, task: Task, client: KeyHolder) -> NodeAnswer:
        self.tasks.append(task)
        if self.fails:
            raise Failure(grpc.StatusCode.INVALID_ARGUMENT, self.fails)
        verdict = {} if task.call.node == "find" else {"verdict": Judgement(0.75, passed=True)}
        return NodeAnswer({"mask": b"a mask", **verdict}, "there", 0.1, 1)


def finder(pool: Pool) -> MaskFinder:
    return MaskFinder(partial(segment, pool), FairShare(1))  # type: ignore[arg-type]


def request(mask: bytes = b"", image: bytes = b"picture", **settings: Any) -> Any:
    message = ModelRequest(pb.ModelInferRequest(model_name="edit"))
    values = {"IMAGE": image, "MASK": mask, "PROMPT": b"a star"}
    for name, value in {**values, "SETTINGS": json.dumps(settings).encode()}.items():
        message.add(name, [value])
    return message


def inputs(message: ModelRequest) -> dict[str, bytes]:
    return {tensor.name: message.read(tensor.name) for tensor in message.head.inputs}


async def test_words_are_found_and_clicks_segmented() -> None:
    pool = Pool("find", "segment")
    mask_result = await finder(pool).find(b"picture", MaskFrom(text="the car"), CLIENT)
    assert (mask_result.mask, mask_result.score) == (b"a mask", None)
    clicked = MaskFrom(points=((3.0, 4.0, 1),), box=(0.0, 0.0, 9.0, 9.0))
    mask_result = await finder(pool).find(b"picture", clicked, CLIENT)
    assert (mask_result.mask, mask_result.score) == (b"a mask", 0.75)
    words, places = pool.tasks
    assert words.inputs == {"picture": b"picture", "name": "the car"}
    assert places.call.node == "segment"
    assert json.loads(json.dumps(places.call.settings)) == PLACES


@pytest.mark.parametrize(
    ("mask_source", "reason"),
    [
        ({}, "names nothing"),
        ({"text": "a", "box": [0, 0, 9, 9]}, "names a thing in two ways"),
        ({"box": [0, 0, 9]}, r"\.box: has 3 numbers"),
        ({"text": "a car"}, "no segmenter that takes a thing's name is served"),
        ({"points": [[3, 4, 2]]}, r"points\[0\]\[2\]: 2 is not one of them; accepted: 0, 1"),
        ({"points": [[3, 4]]}, r"points\[0\]: has 2 entries; accepted: \[x, y, 1\] on"),
        ({"points": [["a", 4, 1]]}, r"points\[0\]\[0\]: 'a' is not a number; accepted: a number"),
        ({"points": [[3, 4, 1]] * 65}, r"points: has 65 entries; accepted: up to 64 clicks"),
        ({"box": ["a", 0, 9, 9]}, r"box\[0\]: 'a' is not a number; accepted: a number"),
        ({"box": "all"}, r"box: 'all' is not a list; accepted: \[left, top, right, bottom\]"),
    ],
)
async def test_what_names_nothing_is_refused(mask_source: dict[str, Any], reason: str) -> None:
    message = request(mask_from=mask_source)
    with pytest.raises(InvalidRequest, match=rf"SETTINGS\.mask_from.*{reason}"):
        await finder(Pool("segment")).fill_in_mask(message, CLIENT)
    assert inputs(message)["MASK"] == b""


@pytest.mark.parametrize(
    ("fields", "files", "message"),
    [
        ({}, ["image"], "text: names nothing"),
        ({"box": "[0, 0, 9]"}, ["image"], "box: has 3 numbers"),
        ({"box": '["a", 0, 9, 9]'}, ["image"], "box[0]: 'a' is not a number"),
        ({"text": "a car"}, ["image"], "text: no segmenter that takes a thing's name"),
        ({"points": "[[1, 1, 1]]"}, ["image"], "points: no segmenter that takes clicks"),
        (
            {"text": "a car"},
            ["image", "mask"],
            "mask: is not a file field of this form; accepted: image",
        ),
        ({"text": "a car"}, ["image", "image"], "image: is given 2 times"),
    ],
)
async def test_the_door_of_masks_names_its_own_fields(
    fields: dict[str, str], files: list[str], message: str
) -> None:
    """A box of text was an internal error, and names of others' fields were told."""
    async with cluster() as (router, _), aiohttp.ClientSession() as session:
        form = aiohttp.FormData(fields)
        for name in files:
            form.add_field(name, encode(scene(8, 9)), filename="a.png")
        url = f"http://127.0.0.1:{router.http.port}/v1/masks"
        async with session.post(url, data=form) as refused:
            error = (await refused.json())["error"]
        assert refused.status == 400
        assert error["message"].startswith(message)
        assert error["param"] == message.partition(":")[0]


async def test_a_node_s_refusal_names_the_setting() -> None:
    error_text = "[INVALID_REQUEST] name: 'a car' is not found in the picture"
    with pytest.raises(InvalidRequest, match=r"SETTINGS\.mask_from: name: 'a car' is not found"):
        await finder(Pool("find", fails=error_text)).find(b"", MaskFrom(text="a car"), CLIENT)
    with pytest.raises(Failure):
        await finder(Pool("find", fails="[OVERLOADED] no")).find(b"", MaskFrom(text="a"), CLIENT)


async def test_a_silent_server_costs_no_mask_a_wait() -> None:
    """Each request waited 5 s for the record of a server that had frozen."""
    models, silent = {"quiet:1": {"segment", "find"}, "there:1": {"find"}}, asyncio.Event()

    class Servers(NodePool):
        async def _ask(self, server: NodeServer, settings: Any = None) -> str:
            if server.address == "quiet:1":
                await silent.wait()
                raise Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "")
            server.take_record({"models": [{"name": name} for name in models[server.address]]})
            return ""

        async def _sent(self, server: NodeServer, request: bytes, kind: Any) -> bytes:
            answer = pb.ModelInferResponse()
            result = {"outputs": [{"name": "mask", "kind": "mask"}], "seconds": 0.1}
            bytes_tensor.add_output(answer, "RESULT", [json.dumps(result).encode()])
            bytes_tensor.add_output(answer, "MADE", [server.address.encode()])
            return answer.SerializeToString()

    pool = Servers(WorkflowFiles(nodes=tuple(models), kept_bytes=0), FairShare(1))
    masks = MaskFinder(partial(segment, pool), FairShare(1))
    async with asyncio.timeout(30):
        found_mask = await masks.find(
            b"b", MaskFrom(text="a"), CLIENT
        )  # it has not been polled yet
        assert found_mask.mask == b"there:1"
        silent.set()
        found_mask = await masks.find(b"picture", MaskFrom(text="the car"), CLIENT)
        assert found_mask.mask == b"there:1"
        with pytest.raises(EngineFailed, match="segment: its node server does not answer"):
            await masks.find(b"picture", MaskFrom(box=(0.0, 0.0, 9.0, 9.0)), CLIENT)
    await pool.close()


async def test_a_server_without_a_record_is_polled_but_not_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_server, "_STATUS_S", 0.2)
    with socket.socket() as mute:  # takes connections and never says a word
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        pool = NodePool(WorkflowFiles(nodes=(address,)), FairShare(1))
        await pool.all_polled()
        server = pool.servers[address]
        assert not server.up
        assert server.polled
        await pool.close()


async def test_an_edit_is_given_its_mask() -> None:
    message = request(mask_from=PLACES, seed=3)
    await finder(Pool("segment")).fill_in_mask(message, CLIENT)
    filled = inputs(message)
    assert filled["MASK"] == b"a mask"
    assert json.loads(filled["SETTINGS"]) == {"mask_mode": "white", "seed": 3}


async def test_other_edits_stay_as_they_are() -> None:
    for message in (request(b"m", seed=3), request(b"m", mask_from=None, prompt="mask_from")):
        encoded_before = message.encoded()
        if "mask_from" in inputs(message)["SETTINGS"].decode() and b"prompt" in encoded_before:
            with pytest.raises(InvalidRequest):  # as of any edit
                await finder(Pool()).fill_in_mask(message, CLIENT)
        else:
            await finder(Pool()).fill_in_mask(message, CLIENT)
        assert message.encoded() == encoded_before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": b"m"}, "combined with MASK"),
        ({"image": b""}, "without IMAGE"),
        ({"mask_mode": "alpha"}, "is alpha, which cannot be combined with mask_from"),
    ],
)
async def test_what_does_not_go_with_it_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await finder(Pool("segment")).fill_in_mask(request(**options, mask_from=PLACES), CLIENT)


async def test_a_client_that_leaves_ends_the_call() -> None:
    class Never(Pool):
        async def call(self, task: Task, client: KeyHolder) -> NodeAnswer:
            await asyncio.Event().wait()
            raise AssertionError

    work = asyncio.create_task(finder(Never("find")).find(b"", MaskFrom(text="a"), CLIENT))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


def test_a_mask_of_ours_is_read_alike_at_all_doors() -> None:
    """It has alpha, as OpenAI's have, and is white, as KServe's and as people see it."""
    white = np.zeros((6, 8), np.uint8)
    white[:2, :3] = 255
    file = base64.b64decode(_text_of_mask(encode(white)))
    mask = decode_mask(file, "MASK", LimitsConfig())
    for mode in ("white", "alpha", "auto", "strength"):
        assert (selected_pixels(mask, mode) == (white == 255)).all()
