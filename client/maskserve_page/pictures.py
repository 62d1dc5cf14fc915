"""Pictures that the page has: those that people bring, and results."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from maskserve_common.config import LimitsConfig
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.containers import read_container
from maskserve_common.imaging.images import Size, read_size
from maskserve_common.lru_cache import Kept

LIMITS = LimitsConfig()
EXPIRES_S = 3600.0
"""After its last use a picture goes, here and at the server."""
_MOST_PICTURES = 64
"""Kept by the page, those of all people; the one that was not used for longest goes."""
_MOST_KEPT_BYTES = 256 * 2**20
"""Of their files, which is all that is kept: nothing is decoded here."""
_TIDIED_EVERY_S = 60.0
_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".avif", ".gif"}
"""Of what browsers show."""


class PagePicture(NamedTuple):
    """One that the page has, as it came."""

    name: str
    """Digest of its file."""
    size: Size
    """(height, width), upright."""
    file: Path
    nbytes: int

    @property
    def url(self) -> str:
        """Where a browser finds it, relative to the page."""
        return f"gradio_api/file={self.file}"

    def told(self) -> dict[str, str]:
        """What the canvas is told to show."""
        return {"name": self.name, "url": self.url}


class PagePictures:
    """The pictures of the page's sessions: sources and results, in files. None is decoded: browsers
    show them and the server edits them; what is read here is the size, in the header.

    Args:
        folder: for their files.
        most: that are kept; the one that was not used for longest goes first.
        most_bytes: likewise, of their files.
        expires_s: after its last use a picture goes.
        gone: told the name of each that goes.
        now: a clock.
    """

    def __init__(
        self,
        folder: Path,
        most: int = _MOST_PICTURES,
        most_bytes: int = _MOST_KEPT_BYTES,
        expires_s: float = EXPIRES_S,
        gone: Callable[[str], None] = lambda name: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._gone = folder, gone
        least = -(-most_bytes // most)  # of which no more than `most` have room
        self._kept: Kept[str, PagePicture] = Kept(
            most_bytes,
            lambda picture: max(picture.nbytes, least),
            expires_s=expires_s,
            now=now,
            gone=lambda name, picture: self._leaving.append(picture),
        )
        self._leaving: list[PagePicture] = []
        self._lock = threading.Lock()

    def take(self, encoded: bytes) -> PagePicture:
        """Keep a picture of a kind that browsers show.

        Raises:
            InvalidRequest: it is none, or too large.
        """
        size = read_size(encoded, "picture", LIMITS)
        name = hashlib.sha256(encoded).hexdigest()
        with self._tidying():
            picture = self._kept.get(name)
            if picture is None:
                file = self._folder / f"{name}{_suffix(encoded)}"
                file.write_bytes(encoded)
                picture = PagePicture(name, size, file, len(encoded))
                self._kept.put(name, picture)
        return picture

    def get(self, name: Any) -> PagePicture:
        """Raises InvalidRequest: there is none of that name."""
        with self._tidying():
            picture = self._kept.get(name) if isinstance(name, str) else None
        if picture is None:
            raise InvalidRequest("picture", "is not here any more", "upload or pick it again")
        return picture

    def tidy(self) -> None:
        """Let go what is too old."""
        with self._tidying():
            self._kept.expire()

    @contextmanager
    def tidied(self) -> Iterator[None]:
        """Tidy from time to time, used or not."""
        ended = threading.Event()

        def tidy() -> None:
            while not ended.wait(_TIDIED_EVERY_S):
                self.tidy()

        threading.Thread(target=tidy, name="tidy", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    @contextmanager
    def _tidying(self) -> Iterator[None]:
        """Holds the lock; tells, without it, of the pictures that went meanwhile."""
        with self._lock:
            yield
            evicted, self._leaving = self._leaving, []
            for picture in evicted:
                picture.file.unlink(missing_ok=True)
        for picture in evicted:
            self._gone(picture.name)


def _suffix(encoded: bytes) -> str:
    kind = read_container(encoded).kind
    suffix = ".jpg" if kind == "jpeg" else f".{kind}"
    if suffix not in _SUFFIXES:
        raise InvalidRequest(
            "picture",
            f"is of {kind.upper()}, which browsers do not show",
            "PNG, JPEG, WebP, AVIF, GIF",
        )
    return suffix


def pictures_of(folder: str | None) -> list[Path]:
    if folder is None:
        return []
    if not Path(folder).is_dir():
        raise InvalidRequest("--images", f"there is no folder {folder}", "an existing folder")
    # No links: the page shows what the folder holds, and nothing that one of its files names.
    image_paths = [p for p in sorted(Path(folder).iterdir()) if p.suffix.lower() in _SUFFIXES]
    return [path.resolve() for path in image_paths if path.is_file() and not path.is_symlink()][:64]
