"""The pictures of the page: uploads and results."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from maskserve_common.config import LimitsConfig
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.containers import read_container
from maskserve_common.imaging.images import Size, read_size
from maskserve_common.lru_cache import LruCache

LIMITS = LimitsConfig()
EXPIRES_S = 3600.0
"""Seconds after its last use when a picture is removed, here and at the server."""
_MOST_PICTURES = 64
"""Most pictures of all users; beyond, the least recently used one is removed."""
_MOST_BYTES = 256 * 2**20
"""Most bytes of their files. Only files are kept: nothing is decoded here."""
_TIDIED_EVERY_S = 60.0
_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".avif", ".gif"}
"""Formats that browsers show."""


class PagePicture(NamedTuple):
    """A picture of the page, in its original file."""

    name: str
    """Digest of the file."""
    size: Size
    """(height, width), upright."""
    file: Path
    nbytes: int

    @property
    def url(self) -> str:
        """URL for a browser, relative to the page."""
        return f"gradio_api/file={self.file}"

    def template(self) -> dict[str, str]:
        """Return the message that tells the canvas to show it."""
        return {"name": self.name, "url": self.url}


class PagePictures:
    """The pictures of the page's sessions, sources and results, in files.

    Pictures are never decoded: browsers show them and the server edits them. Only the size is read,
    from the header.

    Args:
        folder: folder for the files.
        most: most pictures; beyond, the least recently used one is removed.
        most_bytes: most bytes of the files.
        expires_s: seconds after its last use when a picture is removed.
        on_evict: called with the name of each picture that is removed.
        now: a clock.
    """

    def __init__(
        self,
        folder: Path,
        most: int = _MOST_PICTURES,
        most_bytes: int = _MOST_BYTES,
        expires_s: float = EXPIRES_S,
        on_evict: Callable[[str], None] = lambda name: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._on_evict = folder, on_evict
        least_bytes = -(-most_bytes // most)  # counted for each, so that at most `most` fit
        self._pictures: LruCache[str, PagePicture] = LruCache(
            most_bytes,
            lambda picture: max(picture.nbytes, least_bytes),
            expires_s=expires_s,
            now=now,
            on_evict=lambda name, picture: self._removed.append(picture),
        )
        self._removed: list[PagePicture] = []
        self._lock = threading.Lock()

    def take(self, encoded: bytes) -> PagePicture:
        """Keep a picture in a format that browsers show.

        Raises:
            InvalidRequest: it is not a picture, or too large.
        """
        size = read_size(encoded, "picture", LIMITS)
        name = hashlib.sha256(encoded).hexdigest()
        with self._locked():
            picture = self._pictures.get(name)
            if picture is None:
                file = self._folder / f"{name}{_suffix(encoded)}"
                file.write_bytes(encoded)
                picture = PagePicture(name, size, file, len(encoded))
                self._pictures.put(name, picture)
        return picture

    def get(self, name: Any) -> PagePicture:
        """Return a picture. Raises InvalidRequest: there is none with this name."""
        with self._locked():
            picture = self._pictures.get(name) if isinstance(name, str) else None
        if picture is None:
            raise InvalidRequest("picture", "is not here any more", "upload or pick it again")
        return picture

    def available(self, names: Sequence[str]) -> list[PagePicture]:
        """Return those of the pictures that are here, in this order."""
        with self._locked():
            return [picture for picture in map(self._pictures.get, names) if picture is not None]

    def tidy(self) -> None:
        """Remove expired pictures."""
        with self._locked():
            self._pictures.expire()

    @contextmanager
    def tidy_regularly(self) -> Iterator[None]:
        """Remove expired pictures regularly within the block."""
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
    def _locked(self) -> Iterator[None]:
        """Hold the lock in the block; then delete the files of pictures that it removed, and report
        them.
        """
        with self._lock:
            yield
            evicted, self._removed = self._removed, []
            for picture in evicted:
                picture.file.unlink(missing_ok=True)
        for picture in evicted:
            self._on_evict(picture.name)


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


def pictures_in(folder: str | None) -> list[Path]:
    """Return the first 64 pictures of a folder; none without a folder.

    Raises:
        InvalidRequest: there is no such folder.
    """
    if folder is None:
        return []
    if not Path(folder).is_dir():
        raise InvalidRequest("--images", f"there is no folder {folder}", "an existing folder")
    # No links: the page shows only files of the folder, and not what a link points to.
    image_paths = [p for p in sorted(Path(folder).iterdir()) if p.suffix.lower() in _SUFFIXES]
    return [path.resolve() for path in image_paths if path.is_file() and not path.is_symlink()][:64]
