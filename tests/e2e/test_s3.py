"""Answers are put to a real S3 server.

s3fs and moto's server want other versions of libraries than ours, so they run in an environment of
their own (`pip install s3fs 'moto[s3,server]'`), whose Python MASKSERVE_S3_PYTHON names.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest
import requests

from maskserve_benchmarks.checkout import CHECKOUT
from tests.support.draws import fresh_rng
from tests.support.eventually import eventually

PYTHON = os.environ.get("MASKSERVE_S3_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="s3: MASKSERVE_S3_PYTHON names no environment"),
]
PUT = """
import asyncio, sys
from maskserve_common.errors import EngineFailed
from maskserve_router.api.outputs import Outputs, check_output

check_output(sys.argv[1], ["s3://answers/of-one/", "s3://nowhere/"])
try:
    asyncio.run(Outputs(30).put("", sys.argv[1], sys.stdin.buffer.read()))
except EngineFailed as error:
    sys.exit(str(error))
else:
    import fsspec

    with fsspec.open(sys.argv[1]) as file:  # what the server has
        sys.stdout.buffer.write(file.read())
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [PYTHON, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    running = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"

    def bucket_exists() -> bool:
        try:
            return requests.put(f"{url}/answers", timeout=5).ok
        except requests.ConnectionError:
            return False

    try:
        eventually("the bucket is there", bucket_exists, 60)
        yield url
    finally:
        os.killpg(running.pid, signal.SIGTERM)
        running.wait(30)


def put(server: str, url: str, content: bytes) -> subprocess.CompletedProcess[bytes]:
    """As the router does, with credentials from its environment; its stdout is what is there."""
    paths = [str(CHECKOUT / "router"), str(CHECKOUT / "engine")]
    s3_variables = {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }
    s3_variables |= {"PYTHONPATH": os.pathsep.join(paths), "AWS_DEFAULT_REGION": "us-east-1"}
    return subprocess.run(
        [PYTHON, "-c", PUT, url],
        input=content,
        env=os.environ | s3_variables,
        capture_output=True,
        timeout=120,
        check=False,
    )


def test_a_picture_is_an_object_byte_for_byte(server: str) -> None:
    content = fresh_rng().bytes(3_000_000)
    result = put(server, "s3://answers/of-one/2026/a b@2x.png", content)
    assert result.returncode == 0, result.stderr
    assert result.stdout == content


def test_a_bucket_that_is_not_there_is_told_in_a_sentence(server: str) -> None:
    result = put(server, "s3://nowhere/b.png", b"picture")
    assert result.returncode == 1
    assert b"[ENGINE_FAILED] output_url: could not be written: " in result.stderr
