"""Memory for the pictures of one request.

Pictures take memory in order. The first picture always has its memory, so it can be written and
then frees memory for the next. A request therefore makes as many pictures at a time as its client
has memory for. Its first picture is refused if there is no memory.
"""

from __future__ import annotations

import asyncio
import time

from maskserve_router.key_holder import KeyHolder
from maskserve_router.scheduling.admission import Admission, EditRoom, NoRoomInMemory

_POLL_S = 0.1
"""Seconds between two checks for memory that other requests give back."""
_PATIENCE_S = 120.0
"""Seconds that a picture waits for memory."""


class PictureRooms:
    """Makes the rooms of one request.

    Args:
        admission: counts the bytes.
        client: holder of the key that sent the request.
    """

    def __init__(self, admission: Admission, client: KeyHolder) -> None:
        self._admission, self._client = admission, client
        self._changed = asyncio.Condition()
        self._begun = 0
        """Pictures that have taken their memory."""
        self.short = asyncio.Event()
        """Set when a picture waits for memory: the finished pictures must be written now."""

    def room(self, number: int) -> EditRoom:
        """Return the room of picture `number`, counted from 0."""
        return _PictureRoom(self, self._admission, self._client, number)

    async def _take(self, number: int, room: EditRoom, size: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._begun == number)
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                await EditRoom.take(room, size)  # not `_PictureRoom.take`, which calls this
                break
            except NoRoomInMemory:
                if not number or time.monotonic() > end:
                    raise
            self.short.set()
            await asyncio.sleep(_POLL_S)
        async with self._changed:
            self._begun += 1
            self._changed.notify_all()


class _PictureRoom(EditRoom):
    """The room of one of several pictures."""

    def __init__(
        self, rooms: PictureRooms, admission: Admission, client: KeyHolder, number: int
    ) -> None:
        super().__init__(admission, client)
        self._rooms, self._number = rooms, number

    async def take(self, size: int) -> None:
        await self._rooms._take(self._number, self, size)
