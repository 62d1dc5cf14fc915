"""The buffer of a worker's messages between the worker and the client.

A worker is done with an edit when it has sent its last message, even if the client reads slowly.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

_MOST = 64
_MOST_BYTES = 4 * 2**20


class Message(NamedTuple):
    """One message of a worker."""

    content: bytes
    passing: bool = False
    """True for progress and previews, which may be dropped if the client reads too slowly."""


class StreamBuffer:
    """Messages in order. An async iterator that ends after the last message."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._ended = False
        self._news = asyncio.Event()
        self.size = 0
        """Bytes of all unread messages."""

    def put(self, message: Message) -> None:
        """Append a message. If the buffer is full, drop the oldest progress."""
        self._messages.append(message)
        self.size += len(message.content)
        while (self.size > _MOST_BYTES or len(self._messages) > _MOST) and self._drop():
            pass
        self._news.set()

    def end(self, _: object = None) -> None:
        """Note that no more messages follow."""
        self._ended = True
        self._news.set()

    def _drop(self) -> bool:
        """Drop the oldest message that may be dropped, but not the newest. Return False: none."""
        for place in range(len(self._messages) - 1):
            if self._messages[place].passing:
                self.size -= len(self._messages[place].content)
                del self._messages[place]
                return True
        return False

    def __aiter__(self) -> StreamBuffer:
        return self

    async def __anext__(self) -> bytes:
        while not self._messages:
            if self._ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        content = self._messages.popleft().content
        self.size -= len(content)
        return content
