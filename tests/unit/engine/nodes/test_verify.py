"""Verdicts of a model behind an operator's URL: what it says, and what becomes of all else."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_common.config_file import config_of
from maskserve_common.errors import EngineFailed, InvalidRequest
from maskserve_common.imaging.images import encode_png
from maskserve_engine.nodes.verify import VerifyNodes
from maskserve_workflows.node_request import ModelSetup, NodeRequest
from maskserve_workflows.values import Judgement

PICTURE = encode_png(np.zeros((4, 6, 3), np.uint8))


class Model(BaseHTTPRequestHandler):
    """Answers with what the statement asks for."""

    requests: list[dict[str, Any]] = []  # noqa: RUF012  of the test's one server

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.requests.append({**body, "key": self.headers["authorization"]})
        statement = body["messages"][0]["content"][0]["text"].split("this: ")[1].split("\n")[0]
        if statement == "elsewhere":
            self.send_response(302)
            self.send_header("location", "/v1/chat/completions")
            self.end_headers()
            return
        response = {"large": "x" * 2**21, "other": None}.get(statement, statement)
        raw = json.dumps({"choices": [{"message": {"content": response}}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def nodes_of(url: str, tmp_path: Path) -> VerifyNodes:
    (tmp_path / "key").write_text("secret\n")
    options = {"verify_url": url, "verify_model": "sees", "verify_key_file": str(tmp_path / "key")}
    return VerifyNodes(ModelSetup(url, config_of({"nodes": options})))


def test_its_number_is_the_score_and_all_else_an_error(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody's
    nodes = nodes_of(url, tmp_path)
    replies = ["85", "It shows 40 of 100.", "101", "no idea", "other", "elsewhere", "large"]
    calls = [
        NodeRequest("agrees", {"picture": PICTURE, "statement": x}, {"enough": 0.5})
        for x in replies
    ]
    bad = NodeRequest("agrees", {"picture": b"no", "statement": "1"}, {"enough": 0.5})
    *answers, refused = nodes.run([*calls, bad])
    assert answers[:3] == [
        {"verdict": Judgement(0.85, True)}, {"verdict": Judgement(0.4, False)},
        {"verdict": Judgement(1.0, True)},
    ]  # fmt: skip
    assert isinstance(refused, InvalidRequest)
    assert all(isinstance(answer, EngineFailed) for answer in answers[3:])
    assert "status 302" in str(answers[5])
    assert "over 1048576 bytes" in str(answers[6])
    first = next(request for request in Model.requests if "85" in str(request["messages"]))
    assert (first["key"], first["model"]) == ("Bearer secret", "sees")
    sent = first["messages"][0]["content"][1]["image_url"]["url"].partition("base64,")[2]
    assert base64.b64decode(sent) == PICTURE


def test_one_that_is_not_there_is_told_without_its_address(tmp_path: Path) -> None:
    nodes = nodes_of("http://127.0.0.1:1/v1", tmp_path)
    [answer] = nodes.run(
        [NodeRequest("agrees", {"picture": PICTURE, "statement": "1"}, {"enough": 0.5})]
    )
    assert str(answer) == "[ENGINE_FAILED] the verifier does not answer"
