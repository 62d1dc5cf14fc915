"""LiteLLM's proxy before a router, as docs/api.md sets it up."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
import requests

from tests.support.eventually import eventually

PROGRAM = os.environ.get("MASKSERVE_LITELLM") or shutil.which("litellm")
"""The proxy's program, wherever it is installed."""
needs_litellm = pytest.mark.skipif(PROGRAM is None, reason="litellm: it is not installed")
_MASTER_KEY = "sk-of-the-proxy"


@contextmanager
def litellm_proxy(router: str, model: str, key: str, folder: Path) -> Iterator[openai.OpenAI]:
    """Run the proxy, and give OpenAI's SDK before it; it calls the model `edits`.

    Args:
        router: HTTP address of the router.
        model: served model.
        key: key for the router.
        folder: folder for configuration and log.
    """
    (folder / "litellm.yaml").write_text(
        "model_list:\n"
        "  - model_name: edits\n"
        "    litellm_params:\n"
        f"      model: openai/{model}\n"
        f"      api_base: http://{router}/v1\n"
        f"      api_key: {key}\n"
        "general_settings:\n"
        f"  master_key: {_MASTER_KEY}\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert PROGRAM is not None
    command = [PROGRAM, "--config", str(folder / "litellm.yaml"), "--host", "127.0.0.1"]
    with (folder / "litellm.txt").open("wb") as log_file:
        proxy = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            try:
                return requests.get(f"{url}/health/readiness", timeout=5).ok
            except requests.ConnectionError:
                return False

        eventually("the proxy is ready", ready, 180)
        with openai.OpenAI(base_url=f"{url}/v1", api_key=_MASTER_KEY, max_retries=0) as sdk:
            yield sdk
    finally:
        os.killpg(proxy.pid, signal.SIGTERM)
        proxy.wait(30)
