"""The README's examples, as printed, against a real Triton (only the addresses differ)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from maskserve_serving.worker import Worker

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(
    r"```(bash|python)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
)
EXAMPLES = [(language, code) for language, code in BLOCKS if "localhost:900" in code]


def test_the_readme_has_its_examples() -> None:
    tools = ("maskserve edit", "curl", "tritonclient.grpc", "maskserve_client")
    for tool in tools:
        assert any(tool in code for _, code in EXAMPLES), tool


@pytest.mark.parametrize(
    ("language", "code"), EXAMPLES, ids=[code.split("\n")[0][:40] for _, code in EXAMPLES]
)
def test_an_example_runs_as_printed(
    language: str, code: str, worker: Worker, tmp_path: Path
) -> None:
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    code = code.replace("localhost:9000", worker.http_url.removeprefix("http://"))
    code = code.replace("localhost:9001", worker.grpc_url)
    shell = ["bash", "-euo", "pipefail", "-c", code]
    command = shell if language == "bash" else [sys.executable, "-c", code]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    with (
        Image.open(tmp_path / "edited.png") as edited,
        Image.open(ROOT / "assets" / "demo" / "source.jpg") as source,
    ):
        assert edited.size == source.size
