"""Tensors of a step cache by part, on the device or in host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar

import torch

from maskserve_engine.cache.entries import Coded
from maskserve_engine.cache.host_cache import HostCache
from maskserve_engine.cache.loader import Part

_log = logging.getLogger(__name__)


class PartContent(Protocol):
    def tensors(self) -> tuple[Coded, ...]: ...

    def with_tensors(self, tensors: tuple[Coded, ...]) -> Self:
        """Return the same content with the tensors at another place."""
        ...


C = TypeVar("C", bound=PartContent)


class CacheParts(Generic[C]):
    """Contents by part. They move to host memory when the device has no memory for the next one."""

    def __init__(self) -> None:
        self.host: HostCache | None = None
        """Host memory to which they may move; None: they stay on the device."""
        self.on_host = False
        """Whether they lie there."""
        self._contents: dict[Part, C] = {}
        self._near: tuple[Part, C] | None = None
        """Last part in host memory that was read or written, on the device."""

    def __contains__(self, part: Part) -> bool:
        return part in self._contents

    def __len__(self) -> int:
        return len(self._contents)

    @property
    def nbytes(self) -> int:
        contents = self._contents.values()
        return sum(coded.nbytes for content in contents for coded in content.tensors())

    def peek(self, part: Part) -> C | None:
        """Return a part, wherever its tensors lie; None: there is none."""
        return self._contents.get(part)

    def get(self, part: Part) -> C:
        """Return a part on the device.

        Raises:
            EntryLost: it does not arrive from host memory.
        """
        content = self._contents[part]
        if not self.on_host:
            return content
        assert self.host is not None, "parts in host memory have a place there"
        if self._near is None or self._near[0] != part:
            self._near = None
            self._near = (part, content.with_tensors(self.host.get(part)))
        return self._near[1]

    def put(self, part: Part, make: Callable[[], C]) -> bool:
        """Set a part to what `make` returns; return False if there is no memory for it."""
        content = self._content_of(part, make)
        if content is None and self._move_to_host():
            content = self._content_of(part, make)
        if content is None:
            return False
        self._contents[part] = content
        return True

    def clear(self) -> None:
        self._contents.clear()
        self._near = None
        if self.host is not None:
            self.host.clear()

    def _content_of(self, part: Part, make: Callable[[], C]) -> C | None:
        try:
            content = make()
        except torch.OutOfMemoryError:
            return None
        return self._host_copy(part, content) if self.on_host else content

    def _host_copy(self, part: Part, content: C) -> C | None:
        assert self.host is not None, "parts in host memory have a place there"
        copies = self.host.put(part, content.tensors())
        if copies is None:
            return None
        self._near = (part, content)
        return content.with_tensors(copies)

    def _move_to_host(self) -> bool:
        """Move all parts to host memory; return False if they stay where they are."""
        if self.host is None or self.on_host:
            return False
        moved: dict[Part, C] = {}
        for part, content in self._contents.items():
            copy = self._host_copy(part, content)
            if copy is None:
                self.host.clear()
                self._near = None
                return False
            moved[part] = copy
        _log.warning("an edit's step cache moves to host memory")
        self._contents, self._near, self.on_host = moved, None, True
        return True
