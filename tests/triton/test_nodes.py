"""A node server's front: what it is given by name and by value, and what it makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from maskserve_common.config import Config, ValuesConfig
from maskserve_common.config_file import config_of
from maskserve_common.files.values import Values
from maskserve_common.imaging.images import as_file, encode_png, plain_picture
from maskserve_engine.nodes.pictures import PictureNodes
from maskserve_triton.nodes import NodeFront
from maskserve_workflows.node_models import NodeModels
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.values import Judgement, NamedValue, parts_of
from maskserve_workflows.wire import (
    OTHER_VERSION,
    PLACED,
    RECORD,
    NodeResult,
    NodeTask,
    pack_values,
    unpack_values,
)
from tests.fakes.pb_utils import FakeTriton
from tests.support.draws import fresh_rng
from tests.support.eventually import eventually
from tests.support.workflows import node_path

Ask = Callable[..., Any]
VERDICTS = (Judgement(0.2, passed=False), Judgement(0.9, passed=True))


def cells(elements: list[bytes]) -> Any:
    """A BYTES tensor of these."""
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


@pytest.fixture
def values(tmp_path: Path) -> Values:
    value_store = Values(ValuesConfig(str(tmp_path / "values"), least_bytes=1))
    value_store.begin("k1", "run")
    return value_store


@pytest.fixture
def ask(api: FakeTriton, config: Config, values: Values) -> Iterator[Ask]:
    models = NodeModels(config)
    front = NodeFront(api, models, values)

    def call_node(node: str, inputs: dict[str, Any], run: str = "", scope: str = "k1") -> Any:
        """The outputs by name, or the error's text."""
        layout, elements = pack_values(inputs, NODE_TYPES[node].inputs)
        task = NodeTask(node, layout, {}, scope, run)
        request = api.request(TASK=msgspec.json.encode(task), VALUES=cells(elements))
        front.execute([request])
        answer = request.sender.wait()
        if (error := answer.error()) is not None:
            return error.message()
        result = msgspec.json.decode(answer.text("RESULT"), type=NodeResult)
        [output_tensor] = [tensor for tensor in answer.output_tensors() if tensor.name() == "MADE"]
        return unpack_values(result.outputs, list(output_tensor.as_numpy()))

    yield call_node
    models.close()


@pytest.mark.parametrize("node", ["invert", "split", "outline", "compose", "crop", "best"])
def test_nodes_give_the_same_by_name_and_by_value(ask: Ask, values: Values, node: str) -> None:
    rng = fresh_rng()
    drawn = rng.integers(0, 256, (24, 32, 3), np.uint8)
    white = np.zeros((24, 32), np.uint8)
    white[2:9, 3:9] = white[14:20, 20:30] = 255
    kinds: dict[str, Any] = {"picture": drawn, "mask": white, "pictures": (drawn, drawn[::-1])}

    def input_of(kind: str, change: Callable[[Any], Any]) -> Any:
        value = kinds[kind]
        return tuple(map(change, value)) if isinstance(value, tuple) else change(value)

    def named(pixels: Any) -> NamedValue:
        reference = values.put(plain_picture(pixels), "k1", "run")
        assert reference is not None
        return NamedValue(reference)

    def inputs(change: Callable[[Any], Any]) -> dict[str, Any]:
        node_inputs = {
            name: input_of(kind, change)
            for name, kind in NODE_TYPES[node].inputs.items()
            if kind != "verdicts"
        }
        return node_inputs | ({"verdicts": VERDICTS} if node == "best" else {})

    plain = ask(node, inputs(encode_png))
    for run in ("run", ""):
        outputs = ask(node, inputs(named), run)
        assert outputs.keys() == plain.keys()
        for name, value in outputs.items():
            pairs = zip(parts_of(value), parts_of(plain[name]), strict=True)
            for actual, expected in pairs:
                if isinstance(actual, NamedValue):
                    assert run
                    actual = as_file(values.read(actual.element, "k1"))
                as_files = [as_file(x) if isinstance(x, bytes) else x for x in (actual, expected)]
                assert as_files[0] == as_files[1]


def test_a_picture_passes_as_its_pixels_and_a_mask_as_a_png(ask: Ask) -> None:
    drawn = fresh_rng().integers(0, 256, (24, 32, 3), np.uint8)
    white = np.zeros((24, 32), np.uint8)
    white[2:9, 3:9] = 255
    inputs = {"picture": encode_png(drawn), "mask": encode_png(white)}
    cut = ask("crop", inputs)["picture"]
    assert cut == b"".join(plain_picture(drawn[:25, :25]))  # with 16 pixels around
    assert ask("invert", {"mask": inputs["mask"]})["mask"] == encode_png(~white)


def test_a_name_that_is_another_keys_or_gone_is_not_known(ask: Ask, values: Values) -> None:
    reference = values.put([encode_png(np.full((8, 8), 255, np.uint8))], "k1", "run")
    assert reference is not None
    mask = {"mask": NamedValue(reference)}
    assert set(ask("invert", mask, "run")) == {"mask"}
    error_text = ask("invert", mask, "run", "k2")
    assert error_text.startswith("[TEMPLATE_NOT_FOUND] value ")
    values.end("k1", "run")
    assert ask("invert", mask, "run") == error_text


def test_the_record_says_what_the_host_holds(api: FakeTriton, values: Values) -> None:
    models = NodeModels(Config())
    request = api.request(TASK=msgspec.json.encode(NodeTask(RECORD, (), {})), VALUES=cells([]))
    values.put([b"something"], "k1", "run")
    NodeFront(api, models, values).execute([request])
    record = msgspec.json.decode(request.sender.wait().text("RESULT"))
    assert record["values"] == {"host": values.host, "count": 1, "bytes": 9}
    models.close()


def test_who_asks_for_the_record_may_say_what_is_to_be_loaded(
    api: FakeTriton, values: Values, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "clipseg"}')
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    config = config_of({"nodes": {"find": str(tmp_path), "load": "use"}})
    models = NodeModels(config, lambda model, setup: PictureNodes(setup))
    front = NodeFront(api, models, values)

    def ask_record(settings: dict[str, Any]) -> Any:
        task = msgspec.json.encode(NodeTask(RECORD, (), settings))
        request = api.request(TASK=task, VALUES=cells([]))
        front.execute([request])
        return request.sender.wait()

    def state(settings: dict[str, Any]) -> str:
        record = msgspec.json.decode(ask_record(settings).text("RESULT"))
        return str({model["name"]: model["state"] for model in record["models"]}["find"])

    assert state({}) == "absent"
    assert state({PLACED: ["find"]}) in ("loading", "ready")
    eventually("it is there", lambda: state({}) == "ready")
    eventually("nothing needs it", lambda: state({PLACED: []}) == "absent")
    for wrong in ("find", [1]):
        error = ask_record({PLACED: wrong}).error()
        assert "TASK.placed: " in error.message()
        assert "accepted: names of models" in error.message()
    models.close()


BAD = """
import numpy as np
from typing import NamedTuple
from maskserve_workflows.node_types import node, node_model
from maskserve_workflows.ports import Mask, Picture

class Both(NamedTuple):
    picture: Picture
    mask: Mask

@node(model="odd", price_s=0.1)
def odd(mask: Mask, *, does: str = "") -> Both: ...

@node_model("odd")
class Odd:
    def __init__(self, setup): ...
    def run(self, calls):
        for call in calls:
            does = call.settings["does"]
            picture, mask = np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4), np.uint8)
            if does == "too few":
                return
            if does == "raise":
                raise ZeroDivisionError("a secret")
            yield {
                "": {"picture": picture, "mask": mask},
                "name": {"picture": picture, "masks": mask},
                "one": {"picture": picture},
                "list": [picture, mask],
                "floats": {"picture": picture.astype(float), "mask": mask},
                "shape": {"picture": mask, "mask": mask},
                "type": {"picture": picture, "mask": "white"},
                "error": KeyError("x"),
            }[does]
"""
RAISE = BAD.splitlines().index('                raise ZeroDivisionError("a secret")') + 1


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("too few", "nodes: run() of Odd left a call unanswered"),
        ("raise", f"odd: failed with a ZeroDivisionError in odd.py:{RAISE}"),
        ("error", "odd: failed with a KeyError in odd.py"),
        ("name", "odd: odd.py returns picture, masks; accepted: picture, mask"),
        ("one", "odd: odd.py returns picture; accepted: picture, mask"),
        ("list", "odd: odd.py returns a list; accepted: picture, mask by name"),
        ("floats", "odd: odd.py returns picture: an array float64 [4, 4, 3]; accepted: pixels uint8"
         " [H, W, 3], or a picture that the node received"),
        ("shape", "odd: odd.py returns picture: an array uint8 [4, 4]; accepted: pixels uint8 "
         "[H, W, 3], or a picture that the node received"),
        ("type", "odd: odd.py returns mask: a str; accepted: pixels uint8 [H, W], or a mask that "
         "the node received"),
    ],
)  # fmt: skip
def test_a_class_that_breaks_its_signature_fails_its_call(
    api: FakeTriton, values: Values, tmp_path: Path, does: str, words: str
) -> None:
    (tmp_path / "odd.py").write_text(BAD)
    (tmp_path / "worse.py").write_text("import nowhere\n" + BAD.replace("odd", "worse"))
    with node_path():
        models = NodeModels(config_of({"nodes": {"path": [str(tmp_path)]}}))
        assert not models.hosts("worse")  # it cannot be imported; all others are served
        front = NodeFront(api, models, values)

        def error_of(does: str, signature: str = "", node: str = "odd") -> str:
            layout, elements = pack_values({"mask": encode_png(np.ones((4, 4), np.uint8))},
                                           {"mask": "mask"})  # fmt: skip
            task = NodeTask(node, layout, {"does": does}, signature=signature)
            request = api.request(TASK=msgspec.json.encode(task), VALUES=cells(elements))
            front.execute([request])
            error = request.sender.wait().error()
            return "" if error is None else str(error.message())

        assert error_of(does) == f"[ENGINE_FAILED] {words}"
        assert error_of("", NODE_TYPES["odd"].signature) == ""
        other = NODE_TYPES["odd"].signature.replace("mask: mask", "area: mask", 1)
        sentence = error_of("", other)
        assert sentence.startswith(f"[INVALID_REQUEST] TASK.node: odd {OTHER_VERSION}: odd.py has ")
        assert sentence.endswith(f"accepted: {other}")
        assert "'worse' is not run by this node server" in error_of("", node="worse")
        models.close()
