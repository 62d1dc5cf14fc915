"""Room for the pictures that one request asks for.

Each takes its room behind the one before it, so that of those under way the first is always among
those that have one: it can be written, and makes room for the next. So a request goes on with as
many pictures at a time as its client has room for, and its first is refused where it has none.
"""

from __future__ import annotations

import asyncio
import time

from maskserve_router.keys import KeyHolder
from maskserve_router.scheduling.admission import Admission, EditRoom, NoRoomInMemory

_LOOK_S = 0.1
"""Room that other requests of the client give back is seen so late."""
_PATIENCE_S = 120.0
"""Of a picture that waits for room."""


class PictureRooms:
    """Makes the rooms of one request.

    Args:
        admission: has the room.
        client: whose request it is.
    """

    def __init__(self, admission: Admission, client: KeyHolder) -> None:
        self._admission, self._client = admission, client
        self._changed = asyncio.Condition()
        self._taken = 0
        """Pictures that have had their room."""
        self.short = asyncio.Event()
        """A picture waits: those that are there are to be written now."""

    def room(self, number: int) -> EditRoom:
        """Of the picture of this number, from 0."""
        return _PictureRoom(self, self._admission, self._client, number)

    async def _take(self, number: int, room: EditRoom, size: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._taken == number)
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                await EditRoom.take(room, size)
                break
            except NoRoomInMemory:
                if not number or time.monotonic() > end:
                    raise
            self.short.set()
            await asyncio.sleep(_LOOK_S)
        async with self._changed:
            self._taken += 1
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
