"""Writes answers to URLs below prefixes that the operator has listed.

fsspec writes them with the operator's credentials (`AWS_…`, `GOOGLE_…`, the file system's).
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import fsspec

from maskserve_common.errors import EngineFailed, InvalidRequest
from maskserve_router.fair_share import LoopThreads

log = logging.getLogger("maskserve.router")
_NAME: Final = re.compile(r"[A-Za-z0-9._@+=, -]+")
"""A part of a path below a prefix, without characters that are special to a file system."""
_MOST_URL_LENGTH: Final = 1024
_THREADS: Final = 8


def check_output(url: str, prefixes: Sequence[str], field: str = "output_url") -> None:
    """Check that a URL may be written to.

    Args:
        url: URL of a file, or of a folder if it ends with a slash.
        prefixes: allowed prefixes; each ends with a slash.
        field: field of the request, for errors.

    Raises:
        InvalidRequest: naming the field.
    """
    if not prefixes:
        raise InvalidRequest(field, "is given, and no prefix is listed for it", "none")
    accepted = f"a URL below {', '.join(sorted(prefixes))}"
    prefix = next((candidate for candidate in prefixes if url.startswith(candidate)), None)
    if prefix is None:
        raise InvalidRequest(field, "is not below a prefix that is listed", accepted)
    parts = url[len(prefix) :].removesuffix("/").split("/") if url != prefix else []
    if len(url) > _MOST_URL_LENGTH or not all(
        _NAME.fullmatch(part) and part.strip(".") for part in parts
    ):
        raise InvalidRequest(field, "has a path segment that is not a plain name", accepted)


class Outputs:
    """Writes answers in threads.

    Args:
        timeout_s: most seconds to write an answer.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._threads = LoopThreads(_THREADS, "outputs")

    def close(self) -> None:
        self._threads.close()

    async def put(self, scope: str, url: str, content: bytes | memoryview) -> None:
        """Write a file, in the turn of a key; it appears only when it is complete.

        Raises:
            EngineFailed: it cannot be written, or not in time.
        """
        work = asyncio.ensure_future(self._threads.run(scope, _write, url, content))
        try:
            await asyncio.wait_for(asyncio.shield(work), self._timeout_s)
            return
        except (TimeoutError, asyncio.TimeoutError):
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            problem = f"not within {self._timeout_s:g} s"
        except Exception as error:  # each file system has its own errors
            log.error("%s: %s: %s", url, type(error).__name__, error)
            problem = type(error).__name__
        raise EngineFailed(f"output_url: could not be written: {problem}")


def _write(url: str, content: bytes | memoryview) -> None:
    content = bytes(content)  # file systems take only bytes
    if not url.startswith("file://"):  # an object appears only when it is complete
        files, path = fsspec.url_to_fs(url)
        files.pipe_file(path, content)
        return
    files, path = fsspec.url_to_fs(url, auto_mkdir=True)
    partial_path = f"{path}.{secrets.token_hex(4)}.part"
    try:
        files.pipe_file(partial_path, content)
        files.mv(partial_path, path)
    except BaseException:
        with suppress(OSError):
            files.rm_file(partial_path)
        raise
