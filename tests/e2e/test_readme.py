"""The commands of README.md and the documents that it sends people to, as printed and in order, in
an environment that has what `make demo` installs, and a shell that knows nothing of it.

Only the ports differ: others may use those of the documents.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maskserve_benchmarks.documents.job_pictures import readme_jobs
from maskserve_studies.demo_model.captioned_pictures import shows
from maskserve_studies.demo_model.judge import judge
from tests.support.calls import Pixels
from tests.support.clone import Clone, blocks, serving_clone, serving_jobs

ROOT = Path(__file__).resolve().parents[2]
README, API = blocks("README.md"), blocks("docs/api.md")
JOBS = readme_jobs()
ASKS = re.compile(r"localhost:\d|\.venv/bin/maskserve (edit|status|templates|adapters|workflows)")
EXAMPLES = [
    (document, language, code)
    for document in ("README.md", "docs/api.md", "docs/workflows.md")
    for language, code in blocks(document)
    if ASKS.search(code) and code != JOBS
]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def clone(
    request: pytest.FixtureRequest, demo: Clone, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Clone]:
    """Clones that serve with a worker of one device and of two."""
    if request.param == 1:
        yield demo
        return
    with serving_clone(tmp_path_factory.mktemp("clone"), request.param) as running:
        yield running


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
    assert (warm & inside).sum() > 0.97 * warm.sum(), "the ControlNet does not show"


def test_the_documents_have_their_examples() -> None:
    for tool in ("maskserve edit", "openai", "tritonclient.grpc"):
        examples = [code for document, _, code in EXAMPLES if document == "README.md"]
        assert len([code for code in examples if tool in code]) == 1, tool
    for tool in ("curl", "/v2/", "/v1/", "maskserve_client", "--lora", "--control"):
        assert any(tool in code for _, code in API), tool


def test_all_examples_ask_the_one_server_that_is_started() -> None:
    for _, _, code in EXAMPLES:
        assert set(re.findall(r"localhost:(\d+)", code)) <= {"8080", "8081"}, code
        assert "maskserve edit" not in code or "--url localhost:8081" in code, code


@pytest.mark.parametrize("package", ["pytest", "gradio", "mypy"])
def test_nothing_else_is_installed(package: str, clone: Clone) -> None:
    assert clone.shell(f".venv/bin/python -c 'import {package}'").returncode


@pytest.mark.parametrize(
    ("document", "language", "code"),
    EXAMPLES,
    ids=[f"{document}: {code.splitlines()[0][:40]}" for document, _, code in EXAMPLES],
)
def test_an_example_runs_as_printed(document: str, language: str, code: str, clone: Clone) -> None:
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


def pixels_of(path: Path) -> Pixels:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def objects_of(text: str) -> list[list[str]]:
    """Colour, shape and side ("": in the middle) of the objects that a prompt asks for."""
    return [list(words) for words in re.findall(r"\ba (\w+) (\w+)(?: at the (\w+))?", text)]


def check_changed(
    before: Path, after: Path, objects: list[list[str]], change: str
) -> list[list[str]]:
    """The first picture has the objects; in the second one has become another. Return those of the
    second.
    """
    [[colour, shape, _]] = objects_of(change)
    changed = [
        [colour, shape, side] if f"the {old} {form}" in change else [old, form, side]
        for old, form, side in objects
    ]
    assert changed != objects
    for path, right, wrong in ((before, objects, changed), (after, changed, objects)):
        picture = pixels_of(path)
        assert all(shows(picture, *words, side or None) for *words, side in right), path
        assert not all(shows(picture, *words, side or None) for *words, side in wrong), path
    return changed


def test_the_jobs_show_what_their_prompts_name(demo: Clone) -> None:
    with serving_jobs(demo.folder) as running:
        ran = running.shell(f"export MASKSERVE_URL=localhost:{running.router}\n{JOBS}")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    folder, inputs = demo.folder, ROOT / "assets/demo/demo-edit"
    texts = re.findall(r'(?:--prompt |prompt=|change=)"([^"]*)"', JOBS)
    caption, instruction, back, masked, scene, change = texts
    source_path, instructed_path = folder / "picture.png", folder / "instructed.png"
    objects = check_changed(source_path, instructed_path, objects_of(caption), instruction)
    check_changed(instructed_path, folder / "referred.png", objects, back)
    check_changed(folder / "scene-made.png", folder / "scene.png", objects_of(scene), change)
    source, edited = pixels_of(inputs / "source.png"), pixels_of(folder / "edited.png")
    mask = pixels_of(inputs / "mask.png")[..., 0] > 127
    [[colour, shape, _]] = objects_of(masked)
    assert judge(edited, source, mask).matches(colour, shape)
    assert not judge(source, source, mask).matches(colour, shape)
    assert np.array_equal(edited[~mask], source[~mask])


def test_the_page_ends_with_its_server() -> None:
    """There is no such model, so the server ends at once."""
    old = [f"--assume-old=.venv/.installed-{name}" for name in ("serving", "page")]
    command = ["make", "page", "MODEL=/nowhere", *old]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode
    assert "/nowhere" in ran.stderr


def test_what_serve_says_to_try_works(clone: Clone) -> None:
    ran = clone.shell(clone.try_command)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check_edited(clone.folder)
