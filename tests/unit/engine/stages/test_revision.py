"""The digest of the served weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from maskserve_engine.stages.revision import model_revision


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "weights.safetensors").write_bytes(bytes(300_000))
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    return tmp_path


def test_a_byte_in_the_middle_of_a_large_file_makes_another_model(folder: Path) -> None:
    before, path = model_revision(folder), folder / "transformer" / "weights.safetensors"
    raw = bytearray(path.read_bytes())
    raw[150_000] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(1, 1))  # of equal size
    assert model_revision(folder) != before


@pytest.mark.parametrize("part", ["text_encoder_3", "tokenizer", "processor", "text_processor"])
def test_what_reads_a_prompt_or_a_picture_is_a_part_of_the_model(folder: Path, part: str) -> None:
    (folder / part).mkdir()
    file = folder / part / "config.json"
    revisions = set()
    for name in ("{}", "{ }"):
        file.write_text(name)
        revisions.add(model_revision(folder))
    assert len(revisions) == 2


def test_files_are_read_once_and_the_digest_is_the_same(folder: Path) -> None:
    first = model_revision(folder)
    path = next(path for path in folder.glob("*/*") if path.is_file())
    raw, about = path.read_bytes(), path.stat()
    path.write_bytes(bytes(len(raw)))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert model_revision(folder) == first  # what size and time of change say is believed
    path.write_bytes(raw)
    (folder / ".maskserve-digests.json").write_text("not JSON")
    assert model_revision(folder) == first
