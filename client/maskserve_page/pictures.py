"""PagePictures that the page has: those that people bring, and results."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from maskserve_core.config import LimitsConfig
from maskserve_core.errors import InvalidRequest
from maskserve_core.imaging.images import Size, read_size

LIMITS = LimitsConfig()
EXPIRES_S = 3600.0
"""After its last use a picture goes, here and at the server."""
_MOST_PICTURES = 64
"""Kept by the page, those of all people; the one that was not used for longest goes."""
_MOST_KEPT_BYTES = 256 * 2**20
"""Of their files, which is all that is kept: nothing is decoded here."""
_TIDIED_EVERY_S = 60.0
_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}


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
        self._folder, self._most, self._most_bytes = folder, most, most_bytes
        self._expires_s, self._gone, self._now = expires_s, gone, now
        self._kept: OrderedDict[str, tuple[PagePicture, float]] = OrderedDict()
        """With the time of its last use."""
        self._lock = threading.Lock()

    def take(self, encoded: bytes) -> PagePicture:
        """Keep a picture: PNG, JPEG or WebP.

        Raises:
            InvalidRequest: it is none, or too large.
        """
        size = read_size(encoded, "picture", LIMITS)
        name = hashlib.sha256(encoded).hexdigest()
        with self._lock:
            if name not in self._kept:
                file = self._folder / f"{name}{_suffix(encoded)}"
                file.write_bytes(encoded)
                picture = PagePicture(name, size, file, len(encoded))
            else:
                picture, _ = self._kept[name]
            self._use(picture)
        self.tidy()
        return picture

    def get(self, name: Any) -> PagePicture:
        """Raises InvalidRequest: there is none of that name."""
        self.tidy()
        with self._lock:
            if not isinstance(name, str) or name not in self._kept:
                raise InvalidRequest("picture", "is not here any more", "upload or pick it again")
            picture, _ = self._kept[name]
            self._use(picture)
        return picture

    def tidy(self) -> None:
        """Let go what is too old, or too much."""
        while (name := self._let_go()) is not None:
            self._gone(name)

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

    def _use(self, picture: PagePicture) -> None:
        self._kept[picture.name] = picture, self._now()
        self._kept.move_to_end(picture.name)

    def _let_go(self) -> str | None:
        """The name of one that went; None: all may stay."""
        with self._lock:
            kept = [picture for picture, _ in self._kept.values()]
            much = len(kept) > self._most or sum(p.nbytes for p in kept) > self._most_bytes
            if not kept:
                return None
            picture, used = self._kept[kept[0].name]
            if not (much and len(kept) > 1) and self._now() - used < self._expires_s:
                return None
            del self._kept[picture.name]
            picture.file.unlink(missing_ok=True)
            return picture.name


def _suffix(encoded: bytes) -> str:
    if encoded[:2] == b"\xff\xd8":
        return ".jpg"
    return ".webp" if encoded[:4] == b"RIFF" else ".png"


def pictures_of(folder: str | None) -> list[Path]:
    if folder is None:
        return []
    if not Path(folder).is_dir():
        raise InvalidRequest("--images", f"there is no folder {folder}", "an existing folder")
    # No links: the page shows what the folder holds, and nothing that one of its files names.
    found = [p for p in sorted(Path(folder).iterdir()) if p.suffix.lower() in _SUFFIXES]
    return [path.resolve() for path in found if path.is_file() and not path.is_symlink()][:64]
