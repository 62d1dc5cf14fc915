"""`--model FILE`: the folder that is made of it, and found again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from maskserve_common.files.store import FileStore
from maskserve_serving.checkpoint import CheckpointParts
from maskserve_serving.errors import ServeError
from maskserve_serving.source import with_model
from tests.fakes.checkpoint_files import weights_of, write_checkpoint
from tests.fakes.tiny_families import FAMILIES


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["z-image"](tmp_path_factory.mktemp("models") / "z-image")


@pytest.fixture(scope="module")
def file(base: Path) -> Path:
    return write_checkpoint("z-image", base, base.parent / "z-fp8.safetensors", "fp8 scaled")


def served(model: Path, report: Callable[[str], None] = print, **parts: Any) -> dict[str, Any]:
    cache = model.parent / "cache" / "models"
    tables = with_model({}, str(model), parts=CheckpointParts(cache=cache, report=report, **parts))
    table: dict[str, Any] = tables["model"]
    return table


def test_a_checkpoint_is_converted_once_and_again_when_it_changes(base: Path, file: Path) -> None:
    lines: list[str] = []
    first = served(file, lines.append, base=str(base))
    assert first["name"] == "z-fp8"
    assert any("decoded to bf16 by layer" in line for line in lines)
    lines.clear()
    assert served(file, lines.append, base=str(base)) == first
    assert lines == []
    write_checkpoint("z-image", base, file, "bf16")
    assert served(file, lines.append, base=str(base))["path"] != first["path"]
    assert [path.name for path in Path(first["path"]).parent.glob(".*")] == []


def test_the_base_is_fetched_without_what_the_file_has(base: Path, file: Path) -> None:
    fetched: list[tuple[str, list[str]]] = []

    def fetch(name: str, *, ignore_patterns: list[str], **_: Any) -> str:
        fetched.append((name, ignore_patterns))
        return str(base)

    parts = CheckpointParts(vae=str(base / "vae"), cache=base.parent / "cache", report=print)
    with_model({}, str(file), fetch=fetch, parts=parts)
    [(name, ignored)] = fetched
    assert name == "Tongyi-MAI/Z-Image-Turbo"
    assert "transformer/*.safetensors" in ignored
    assert "vae/*.safetensors" in ignored


def test_files_that_are_no_checkpoints_are_refused(base: Path, tmp_path: Path) -> None:
    for name, sentence in (
        ("a.gguf", "is cut short: its header is not whole"),
        ("a.ckpt", "other formats are not read, as they may run code"),
        ("a.safetensors", "too short for a safetensors file"),
    ):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(ServeError, match=sentence):
            served(tmp_path / name, base=str(base))
    save_file(weights_of(base / "vae"), tmp_path / "vae.safetensors")
    with pytest.raises(ServeError, match=r"is a VAE alone; accepted: .* with --vae "):
        served(tmp_path / "vae.safetensors", base=str(base))
    save_file({"transformer_blocks.0.x": torch.ones(1)}, tmp_path / "bare.safetensors")
    with pytest.raises(ServeError, match="name the model's folder or hub id with --base"):
        served(tmp_path / "bare.safetensors")
    with pytest.raises(ServeError, match="stand beside a checkpoint file"):
        served(base, vae=str(base / "vae"))
    left = tmp_path / "cache" / "models"
    assert not left.exists() or list(left.iterdir()) == []


def test_what_killed_conversions_left_is_removed_but_not_a_running_one(
    base: Path, file: Path
) -> None:
    cache = base.parent / "cache" / "models"
    killed, running = cache / ".z-old-0123456789abcdef-k1_l2", cache / ".z-new-0123-r1_n2"
    for folder in (killed, running):
        (folder / "vae").mkdir(parents=True)
    write_checkpoint("z-image", base, file, "fp16")
    with FileStore(cache).write_lock("z-new-0123", 0.0):
        served(file, base=str(base))
        assert not killed.exists()
        assert running.exists()
    write_checkpoint("z-image", base, file, "bf16")
    served(file, base=str(base))
    assert [path.name for path in cache.glob(".*")] == []
