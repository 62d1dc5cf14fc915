"""What the page makes of what people paint and ask, without a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maskserve_client.events import EditResult, Event, Progress
from maskserve_client.web import _pictures, _Session, _settings, _source_and_mask, summary
from maskserve_core.contracts.settings import parse_settings
from maskserve_core.errors import InvalidRequest, Overloaded, TemplateNotFound

PLAIN: tuple[Any, ...] = (7, False, 0, 0, 0, 0, "auto", "")


def test_what_is_painted_on_any_layer_is_the_mask() -> None:
    picture = Image.new("RGB", (20, 10))
    one, two = (np.zeros((10, 20, 4), np.uint8) for _ in range(2))
    one[2, 3, 3], two[5, 6, 3] = 255, 1
    layers = [Image.fromarray(one, "RGBA"), Image.fromarray(two, "RGBA")]
    source, mask = _source_and_mask({"background": picture, "layers": layers})
    assert source.size == mask.size == (20, 10)
    assert np.argwhere(np.asarray(mask)).tolist() == [[2, 3], [5, 6]]


def test_a_layer_of_another_size_is_brought_to_the_pictures() -> None:
    layer = Image.new("RGBA", (40, 20), (255, 0, 0, 255))
    painted = {"background": Image.new("RGB", (20, 10)), "layers": [layer]}
    assert np.asarray(_source_and_mask(painted)[1]).all()


@pytest.mark.parametrize(
    ("painted", "told"),
    [
        (None, "picture: there is none yet"),
        ({"background": None, "layers": []}, "picture: there is none yet"),
        ({"background": Image.new("RGB", (4, 4)), "layers": []}, "mask: is empty"),
    ],
)
def test_what_is_missing_is_said(painted: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        _source_and_mask(painted)


def test_settings_are_those_that_the_server_takes() -> None:
    asked = _settings(7, False, 12, 3.5, 2, 1, "require", "hollow:0.8, other")
    assert asked["loras"] == [{"name": "hollow", "scale": 0.8}, {"name": "other"}]
    for made in (asked, _settings(*PLAIN), _settings(None, True, None, None, 0, 0, "off", None)):
        parse_settings(json.dumps(made).encode())
    assert "num_inference_steps" not in _settings(*PLAIN)
    with pytest.raises(InvalidRequest, match="LoRAs: 'x' is no number"):
        _settings(*PLAIN[:-1], "hollow:x")


def test_a_folder_of_pictures_that_is_not_there_is_told(tmp_path: Any) -> None:
    assert _pictures(None) == []
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.png").touch()
    assert [path.name for path in _pictures(str(tmp_path))] == ["b.png"]
    with pytest.raises(InvalidRequest, match="--images"):
        _pictures(str(tmp_path / "none"))


class Asked:
    """A client that has lost its templates once."""

    def __init__(self) -> None:
        self.registered, self.cancelled, self.sent = 0, list[str](), list[str]()

    def register(self, _: Image.Image) -> str:
        self.registered += 1
        return f"{self.registered:016x}"

    def cancel(self, request_id: str) -> bool:
        self.cancelled.append(request_id)
        raise Overloaded("not now")

    def edit_stream(self, image: None, mask: Any, prompt: str, **settings: Any) -> Iterator[Event]:
        assert image is None
        self.sent.append(settings["template_id"])
        if settings["template_id"] == f"{1:016x}" and len(self.sent) > 1:
            raise TemplateNotFound("gone")
        yield Progress(1, 2)


def test_a_picture_is_sent_once_and_again_when_the_server_has_lost_it() -> None:
    client: Any = Asked()
    session, picture = _Session(client), Image.new("RGB", (8, 8))
    for _ in range(3):
        assert list(session.events(picture, picture, "x", {})) == [Progress(1, 2)]
    assert client.registered == 2
    assert client.sent == [f"{n:016x}" for n in (1, 1, 2, 2)]
    session.stop("an-edit")  # and says nothing, as it may be done already
    assert client.cancelled == ["an-edit"]


def test_to_go_on_with_a_result_sends_no_picture() -> None:
    client: Any = Asked()
    session, picture = _Session(client), Image.new("RGB", (8, 8), (1, 2, 3))
    session.made(EditResult(picture, b"", {"result_template_id": f"{1:016x}"}))
    session.made(EditResult(Image.new("RGB", (8, 8)), b"", {"result_template_id": None}))
    client.registered = 1
    assert list(session.events(picture.copy(), picture, "x", {})) == [Progress(1, 2)]
    assert client.registered == 1
    assert client.sent == [f"{1:016x}"]


def test_what_the_cache_saved_is_said() -> None:
    meta = {
        "steps": 10, "seed": 3, "worker": "w", "cache": "hit", "computed_tokens": 100,
        "total_tokens": 100, "timings_ms": {"denoise": 900.0, "decode": 100.0},
    }  # fmt: skip
    said = summary(meta)
    assert "**1.00 s**, 10 steps, seed `3`" in said
    assert "10% of the tokens were computed" in said
    assert "| denoise | 900 |" in said
