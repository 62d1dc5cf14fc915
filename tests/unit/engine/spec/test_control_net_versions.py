"""The version by which a worker and a ControlNet service of another host know a ControlNet."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from maskserve_common.files.digests import file_digest
from maskserve_engine.spec.control_nets import content_of


@pytest.fixture
def net(tmp_path: Path) -> Path:
    folder = tmp_path / "net"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "diffusion_pytorch_model.safetensors").write_bytes(bytes(1000))
    return folder


def test_a_copy_with_other_times_is_the_same_net(net: Path, tmp_path: Path) -> None:
    shutil.copytree(net, tmp_path / "copy", copy_function=shutil.copyfile)
    for file in (tmp_path / "copy").iterdir():
        os.utime(file, ns=(1, 1))
    assert content_of(tmp_path / "copy") == content_of(net)


@pytest.mark.parametrize("name", ["config.json", "diffusion_pytorch_model.safetensors"])
def test_a_byte_makes_another(net: Path, name: str) -> None:
    before, file = content_of(net), net / name
    about, raw = file.stat(), bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns + 1))  # of equal size
    assert content_of(net) != before


def test_a_folder_that_cannot_be_written_is_read_once(
    net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (net / ".maskserve-digests.json").mkdir()
    read = []
    opened = Path.open

    def counted(self: Path, *args: object, **keys: object) -> object:
        read.append(self.name)
        return opened(self, *args, **keys)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", counted)
    first = file_digest(net, "config.json")
    assert file_digest(net, "config.json") == first
    assert read.count("config.json") == 1
