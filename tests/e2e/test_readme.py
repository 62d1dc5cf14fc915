"""The commands of README.md and docs/api.md, as printed, in a shell that knows nothing of the
virtual environment.

Only the ports differ: others may use those of the documents.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maskserve_serving.ports import free_base_port

ROOT = Path(__file__).resolve().parents[2]
README, API = (
    re.findall(r"```(bash|python)\n(.*?)```", (ROOT / name).read_text("utf-8"), re.DOTALL)
    for name in ("README.md", "docs/api.md")
)
[SERVE] = [code for _, code in README if "maskserve serve" in code]
"""What all examples ask."""
EXAMPLES = [
    (language, code)
    for language, code in README + API
    if re.search(r"localhost:\d|maskserve (edit|status|templates|adapters)", code)
]


@dataclass(frozen=True)
class Clone:
    """A folder with what a clone has after `make setup`, and a worker that serves it behind a
    router.
    """

    folder: Path
    router: int
    """Its HTTP port; gRPC is behind it."""
    try_command: str
    """What `maskserve serve` says to try next."""

    def shell(self, code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=self.folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


def environment() -> dict[str, str]:
    """Of a fresh shell: without the virtual environment and without what pytest added."""
    own = str(Path(sys.executable).parent)
    path = [part for part in os.environ["PATH"].split(os.pathsep) if part != own]
    names = ("PYTHONPATH", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {"PATH": os.pathsep.join(path)}


@pytest.fixture(scope="module", params=["1", pytest.param("2", marks=pytest.mark.slow)])
def clone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Clone]:
    """Of a worker of one device, and of two."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "assets").symlink_to(ROOT / "assets")
    (folder / ".venv").symlink_to(sys.prefix)
    base = free_base_port(2)
    command = SERVE.replace("\\\n", " ").strip()
    process = subprocess.Popen(
        [
            "bash",
            "-c",
            f"exec {command} --devices-per-worker {request.param} --base-port {base} "
            f"--router-port {base + 10}",
        ],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("try: "):
                break
        assert process.poll() is None, "".join(said)
        tried = said[-1].removeprefix("try: ")
        yield Clone(folder, base + 10, tried)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=90)
    assert process.returncode == 0


def check_edited(folder: Path) -> None:
    with (
        Image.open(folder / "edited.png") as edited,
        Image.open(ROOT / "assets" / "demo" / "source.jpg") as source,
    ):
        assert edited.size == source.size


def check_lora_and_control_show(folder: Path) -> None:
    """The LoRA's colour is there, in the outline's place and not all over the mask."""
    with (
        Image.open(folder / "edited.png") as edited,
        Image.open(ROOT / "assets" / "demo" / "outline.png") as outline,
        Image.open(ROOT / "assets" / "demo" / "mask.png") as mask,
    ):
        red, green, blue = np.asarray(edited.convert("RGB")).astype(int).transpose(2, 0, 1)
        line = np.asarray(outline.convert("L")) > 127
        masked = np.asarray(mask.convert("L")) > 127
    warm = masked & (red - blue > 40)
    brown = warm & (red < 190) & (green > red // 4)
    assert brown.sum() > 0.7 * warm.sum(), "the LoRA does not show"
    rows, columns = np.nonzero(line)
    inside = np.zeros_like(masked)
    inside[rows.min() - 8 : rows.max() + 9, columns.min() - 8 : columns.max() + 9] = True
    assert (warm & inside).sum() > 0.9 * warm.sum(), "the ControlNet does not show"


def test_the_documents_have_their_examples() -> None:
    for tool in ("maskserve edit", "openai", "tritonclient.grpc"):
        assert len([code for _, code in README if tool in code]) == 1, tool
    for tool in ("curl", "tritonclient.grpc", "maskserve_client", "--lora", "--control"):
        assert any(tool in code for _, code in API), tool


def test_all_examples_ask_the_one_server_that_is_started() -> None:
    for _, code in EXAMPLES:
        assert set(re.findall(r"localhost:(\d+)", code)) <= {"8080", "8081"}, code
        assert "maskserve edit" not in code or "--url localhost:8081" in code, code


@pytest.mark.parametrize(
    ("language", "code"), EXAMPLES, ids=[code.split("\n")[0][:40] for _, code in EXAMPLES]
)
def test_an_example_runs_as_printed(language: str, code: str, clone: Clone) -> None:
    edited = clone.folder / "edited.png"
    edited.unlink(missing_ok=True)
    code = code.replace("localhost:8080", f"localhost:{clone.router}")
    code = code.replace("localhost:8081", f"localhost:{clone.router + 1}")
    if language == "python":
        (clone.folder / "example.py").write_text(code)
        code = ".venv/bin/python example.py"
    ran = clone.shell(code)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check_edited(clone.folder)
    if "a brown star" in code:
        check_lora_and_control_show(clone.folder)


def test_what_serve_says_to_try_works(clone: Clone) -> None:
    ran = clone.shell(clone.try_command)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check_edited(clone.folder)
