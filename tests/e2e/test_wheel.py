"""The wheel, installed without a checkout, serves the demo model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from PIL import Image

from maskserve_serving.ports import Ports, free_base_port

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "assets" / "demo"


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that knows nothing of the checkout."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a virtual environment with the wheel and the third-party packages of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    [wheel] = folder.glob("maskserve-*.whl")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    # Behind the wheel's own; an editable install there is not followed.
    site_packages = [
        path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")
    ]
    (packages / "others.pth").write_text("\n".join(site_packages) + "\n")
    return python.parent


def test_it_has_its_own_code_and_models(installed: Path, tmp_path: Path) -> None:
    say = (
        "import json, maskserve_client, maskserve_common, maskserve_engine\n"
        "from maskserve_serving import options\n"
        "files = [m.__file__ for m in (maskserve_client, maskserve_common, maskserve_engine)]\n"
        "print(json.dumps([*files, str(options.MODELS), str(options.ENSEMBLE), "
        "str(options.SERVICES)]))"
    )
    paths = json.loads(run(installed / "python", "-c", say, cwd=tmp_path))
    assert all(Path(path).is_relative_to(installed.parent) for path in paths), paths
    originals = "model_repository", "ensemble", "services"
    for carried, original in zip(map(Path, paths[-3:]), originals, strict=True):
        assert _files(carried) == _files(ROOT / original)


def test_it_says_where_the_demo_model_is(installed: Path, tmp_path: Path) -> None:
    demo = [installed / "maskserve", "demo"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(demo, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 2, ran.stderr
    assert "demo: the demo model is in maskserve's sources" in ran.stderr
    assert "make demo" in ran.stderr


def _files(folder: Path) -> dict[str, bytes]:
    """Files that Triton reads in a repository; a wheel may leave out an empty version folder."""
    paths = (path for path in folder.rglob("*") if path.suffix in (".py", ".pbtxt"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.slow  # test_readme.py serves a clone in the same way; above: a wheel has what that has
def test_it_serves(installed: Path, tmp_path: Path) -> None:
    base = free_base_port()
    url = f"localhost:{Ports.of_worker(base, 0).grpc}"
    model = ROOT / "assets" / "models" / "demo"
    serve = subprocess.Popen(
        [installed / "maskserve", "serve", "--model", model, "--base-port", str(base)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert serve.stdout is not None
        lines = []
        for line in serve.stdout:
            lines.append(line)
            if line.startswith("ready"):
                break
        assert serve.poll() is None, "".join(lines)
        edit = ["edit", "--url", url, "--steps", "2", "--prompt", "a red star", "--json"]
        files = ["--image", DEMO / "source.jpg", "--mask", DEMO / "mask.png", "--out", "e.png"]
        meta = json.loads(run(installed / "maskserve", *edit, *files, cwd=tmp_path))
        assert meta["steps"] == 2
        with Image.open(tmp_path / "e.png") as edited, Image.open(DEMO / "source.jpg") as source:
            assert edited.size == source.size
    finally:
        serve.send_signal(signal.SIGTERM)
        serve.communicate(timeout=90)
    assert serve.returncode == 0
