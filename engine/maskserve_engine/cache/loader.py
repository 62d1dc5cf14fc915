"""The loader moves entries to the device, part by part, beside the step that reads them.

The step begins on block 0 while later blocks arrive, and waits at a part that is not ready (FlashPS
§4.2). Parts are moved in the order of the steps that read them, and within a step block by block
for all rows, so that a later read never delays an earlier one. The tokens of a row are gathered
before the move, by a copy in host memory or over a CUDA device's link. If it is faster, a CUDA
device reads whole tensors of the file by itself, and gathers there.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_engine.base.device_clock import Span, mark
from maskserve_engine.cache.entries import PARTS, AnchorEntry, Coded
from maskserve_engine.cache.entry_file import FileTensor, OpenFile, StoredCoded
from maskserve_engine.cache.registered import Registered, Registrar
from maskserve_engine.cache.reserve import ALIGN, Block

Part = tuple[int, str]
"""A block and one of PARTS."""
PartTensors = tuple[Coded, ...] | tuple[StoredCoded, ...]
"""The tensors of a part, in memory or in a file."""

_LOOK_S = 0.2
"""Seconds between two checks that the loader's thread is alive."""
_ALIGNED = 16
"""Bytes at whose multiples tensors of one copy begin, for the kernels that read them."""
_RUNS = 4
"""Copies in which an entry travels whose parts join: each asks for two calls of the host, and a
step that waits for the entry begins with the first.
"""
_MOST_COPIES = 2
"""Most direct copies under way at once: while one travels, the next is queued."""
_IDS = 8
"""Lists of ids that stay on the device: those of a few rows, at a few levels each."""


class Selection:
    """Token ids per level of the model; blocks of one level read the same tokens.

    Args:
        levels: [n] int64 ids of each level, in the order of the row's cached tokens.
        of_block: level of each block; empty if the model has one level.
        heads: first and last (exclusive) head whose keys and values are read, and the number of all
            heads; None: all.
    """

    def __init__(
        self,
        levels: Sequence[NDArray[np.int64]],
        of_block: Sequence[int] = (),
        heads: tuple[int, int, int] | None = None,
    ) -> None:
        self.heads = heads
        self.levels = tuple(np.ascontiguousarray(ids, dtype=np.int64) for ids in levels)
        self._of_block = tuple(of_block)
        digest = hashlib.blake2b(digest_size=16, person=repr(heads).encode() if heads else b"")
        for ids in self.levels:
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(ids.tobytes())
        self._device_ids: dict[tuple[int, torch.device], Tensor] = {}
        self.digest = digest.digest()
        """Digest of the ids: equal for rows of one mask, which share what is loaded."""

    def of_heads(self, begin: int, end: int, of: int) -> Selection:
        """Return the same tokens with keys and values of heads `begin` to `end` of `of` only."""
        cut = Selection(self.levels, self._of_block, (begin, end, of))
        cut._device_ids = self._device_ids
        return cut

    def of(self, block: int) -> NDArray[np.int64]:
        """[n] ids that `block` reads."""
        return self.levels[self._of_block[block] if self._of_block else 0]

    def keep_ids(self, levels: Sequence[Tensor]) -> None:
        """Keep the device copies of the ids per level, so that `on` need not wait."""
        for level, ids in enumerate(levels):
            self._device_ids[level, ids.device] = ids

    def on(self, block: int, device: torch.device) -> Tensor:
        """Return `of(block)` as a tensor on the device, and keep it."""
        level = self._of_block[block] if self._of_block else 0
        if (level, device) not in self._device_ids:
            self._device_ids[level, device] = torch.from_numpy(self.levels[level]).to(device)
        return self._device_ids[level, device]


@dataclass(slots=True)
class Copying:
    """A copy to the device, of one or more parts. One stream, the model's, reads them."""

    event: torch.cuda.Event | None
    """Event behind the copy; None: the reading stream has waited."""
    memory: tuple[Tensor, ...]

    def wait(self) -> None:
        """Let later work of the current stream come after the copy."""
        if self.event is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.event)
            for tensor in self.memory:
                tensor.record_stream(stream)  # else it could be given away too early
            self.event = None


@dataclass(slots=True)
class Arrival:
    """A part on the device, or a queued copy of it."""

    parts: tuple[Coded, ...]
    copying: Copying | None = None
    """The copy; None: no wait is needed."""

    def ready(self) -> bool:
        event = None if self.copying is None else self.copying.event
        return event is None or event.query()

    def get(self) -> tuple[Coded, ...]:
        """Return the part, for later work of the current stream."""
        if self.copying is not None:
            self.copying.wait()
        return self.parts


class Mover(Protocol):
    """Moves parts to one device; `move` is used by one thread."""

    device: torch.device
    reads_device: bool
    """Whether rows read whole entries in place on the device, so that nothing is moved."""

    def to_host(self, entry: AnchorEntry) -> AnchorEntry:
        """Return a copy of the entry in host memory, for a file."""
        ...

    def register(self, file: OpenFile) -> None:
        """Let the device read a file in memory by itself; called from any thread
        when it is opened.
        """
        ...

    def move(
        self, parts: PartTensors, ids: NDArray[np.int64] | None, room: Block | None = None
    ) -> Arrival:
        """Move the tokens `ids` (None: all) of some tensors to the device, into `room` if given."""
        ...

    def reads_whole(self, entry: LoadSource, selection: Selection) -> bool:
        """Whether all tokens of an entry arrive sooner than those of a selection, so that rows
        select theirs where they lie.
        """
        ...

    def joins(self, part: PartTensors, following: PartTensors) -> bool:
        """Whether a part can travel in one copy with the part before it, all tokens of both."""
        ...

    def copy_run(self, run: Sequence[PartTensors], room: Block | None = None) -> list[Arrival]:
        """Move parts that join (`joins`), in one copy."""
        ...

    def close(self) -> None:
        """End all moves."""
        ...


class HostMover:
    """For a model on the CPU: the device's memory is the host's.

    numpy copies rows on the calling thread and releases the interpreter; torch would start threads
    that take cores from the step. Tokens in memory are gathered once, like tokens of a file: a row
    reads them at all steps of its anchor.
    """

    device = torch.device("cpu")
    reads_device = False

    def to_host(self, entry: AnchorEntry) -> AnchorEntry:
        return entry

    def register(self, file: OpenFile) -> None: ...

    def close(self) -> None: ...

    def move(
        self, parts: PartTensors, ids: NDArray[np.int64] | None, room: Block | None = None
    ) -> Arrival:
        take = partial(gathered, ids=ids)
        return Arrival(tuple([coded.map(take) for coded in parts]))

    def reads_whole(self, entry: LoadSource, selection: Selection) -> bool:
        return False

    def joins(self, part: PartTensors, following: PartTensors) -> bool:
        return False

    def copy_run(self, run: Sequence[PartTensors], room: Block | None = None) -> list[Arrival]:
        return [self.move(parts, None, room) for parts in run]


def gathered(
    source: Tensor | FileTensor, ids: NDArray[np.int64] | None, out: Tensor | None = None
) -> Tensor:
    """Return a copy of the tokens `ids` (None: all) of `source` [tokens, n], in `out` if given.

    Raises:
        OSError: a file cannot be read any more.
    """
    count = len(source) if ids is None else len(ids)
    if out is None:
        out = torch.empty((count, *source.shape[1:]), dtype=source.dtype)
    if isinstance(source, FileTensor):
        source.read(ids, _raw(out))
        return out
    raw, to = _raw(source), _raw(out)
    if ids is None:
        np.copyto(to, raw)
    else:
        np.take(raw, ids, axis=0, out=to, mode="clip")  # any other mode copies once more
    return out


def _raw(tensor: Tensor) -> NDArray[np.uint8]:
    # [tokens, bytes]: one number per token (a scale) is more than one byte, too.
    raw: NDArray[np.uint8] = (
        (tensor if tensor.dim() > 1 else tensor[:, None]).view(torch.uint8).numpy()
    )
    return raw


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Bytes per second of both ways to move tokens to a CUDA device, assumed or measured."""

    gathered: float = 10e9
    """Rate of tokens that this process gathers: about the rate of one core."""
    direct: float = 50e9
    """Rate of whole tensors that the device reads and gathers itself; 0: it reads none."""

    def best(self, share: float) -> float:
        """Return the bytes per second of the faster way, for tensors of which `share` (0 to 1) is
        read.
        """
        return max(self.gathered, self.direct * share)

    def text(self) -> str:
        direct = f"{self.direct / 1e9:.1f} GB/s" if self.direct else "not at all"
        return f"gathered {self.gathered / 1e9:.1f} GB/s, by the device itself {direct}"


class CudaMover:
    """Moves entries to a CUDA device in two ways, on a stream of its own; the host does not wait.

        gathered   file, or memory ─► tokens in a ring of pinned buffers ═► device
        direct     file that is registered ═► whole tensors on the device, many in one copy

    The first way moves fewer bytes, at the rate of one core; the second moves more, at the rate of
    the link. `rates` decides, of whole entries (`reads_whole`) or, where a rank reads some heads,
    of single tensors, whose tokens the device then gathers. A buffer is reused once its copy is
    done. At most `_MOST_COPIES` direct copies are under way, so that urgent parts never wait long
    and the seconds of a move measure its way.

    Args:
        buffer_bytes: size of one pinned buffer.
        buffers: number of buffers: one is filled while the others are copied.
        registrar: registers files that the device may read by itself; None: it reads none.
        rates: rates of both ways.
    """

    reads_device = True

    def __init__(
        self,
        device: torch.device,
        buffer_bytes: int,
        buffers: int = 3,
        registrar: Registrar | None = None,
        rates: LinkRates | None = None,
    ) -> None:
        self.device, self.rates = device, rates or LinkRates()
        self.stream, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._ring = [
            (torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
            for _ in range(buffers)
        ]
        self._bytes, self._next = buffer_bytes, 0
        self._registrar = registrar
        self._copies: deque[torch.cuda.Event] = deque()
        """Events behind the latest direct copies."""
        self._ids: deque[tuple[NDArray[np.int64], Tensor]] = deque(maxlen=_IDS)
        """Token ids on the device; blocks of one level share them."""

    def to_host(self, entry: AnchorEntry) -> AnchorEntry:
        """Copy the entry on a stream of its own, behind the work queued so far."""

        def down(tensor: Tensor) -> Tensor:
            return tensor.to("cpu")

        def moved(coded: Coded) -> Coded:
            return coded.map(down, down)

        with torch.cuda.device(self.device):
            self._down.wait_stream(torch.cuda.default_stream(self.device))
            with torch.cuda.stream(self._down):
                return AnchorEntry(
                    entry.anchor,
                    tuple(block_entry.map_coded(moved) for block_entry in entry.blocks),
                )

    def register(self, file: OpenFile) -> None:
        if self._registrar is not None:
            with torch.cuda.device(self.device):
                file.registered = self._registrar.register(file.descriptor, file.nbytes)

    def close(self) -> None:
        if self._registrar is not None:
            self._registrar.close()

    def move(
        self, parts: PartTensors, ids: NDArray[np.int64] | None, room: Block | None = None
    ) -> Arrival:
        if ids is None and self.rates.direct > self.rates.gathered and _place_of(parts):
            [arrival] = self.copy_run([parts], room)
            return arrival
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            arrived = tuple(
                coded.map(
                    lambda t: self._move_tensor(t, ids, room),
                    lambda t: self._move_tensor(t, None, room),
                )
                for coded in parts
            )
            event = torch.cuda.Event()
            event.record(self.stream)
        tensors = tuple(tensor for coded in arrived for tensor in coded.tensors())
        return Arrival(arrived, Copying(event, tensors))

    def reads_whole(self, entry: LoadSource, selection: Selection) -> bool:
        if selection.heads is not None:
            return False
        whole = selected = 0
        for number, block in enumerate(entry.blocks):
            tokens = len(selection.of(number))
            for tensors in block.parts.values():
                for coded in tensors:
                    if not isinstance(coded, StoredCoded) or _registered(coded.data) is None:
                        return False
                    whole += coded.nbytes
                    selected += coded.nbytes_of(tokens)
        return whole * self.rates.gathered < selected * self.rates.direct

    def joins(self, part: PartTensors, following: PartTensors) -> bool:
        place, next_place = _place_of(part), _place_of(following)
        return place is not None and next_place is not None and place.stop == next_place.start

    def copy_run(self, run: Sequence[PartTensors], room: Block | None = None) -> list[Arrival]:
        first, last = _place_of(run[0]), _place_of(run[-1])
        assert first is not None
        assert last is not None
        source = run[0][0]
        assert isinstance(source, StoredCoded)
        registered = _registered(source.data)
        assert registered is not None
        file, memory = registered
        nbytes = last.stop - first.start
        self._wait_for_copies()
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            if room is None:
                arrived = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            else:
                arrived = room.empty((nbytes,), torch.uint8)
            arrived.copy_(memory[first.start : last.stop], non_blocking=True)
            event = self._record_copy(file)

        def view_of(tensor: FileTensor) -> Tensor:
            begin = tensor.offset - first.start
            return arrived[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        copying = Copying(event, (arrived,))
        arrivals = []
        for parts in run:
            coded = [tensor.viewed(view_of) for tensor in parts if isinstance(tensor, StoredCoded)]
            arrivals.append(Arrival(tuple(coded), copying))
        return arrivals

    def _wait_for_copies(self) -> None:
        while len(self._copies) >= _MOST_COPIES:
            self._copies.popleft().synchronize()

    def _record_copy(self, file: Registered) -> torch.cuda.Event:
        """Return an event behind a copy from the file, which ends no sooner."""
        event = torch.cuda.Event()
        event.record(self.stream)
        file.record_copy(event)
        self._copies.append(event)
        return event

    def _move_tensor(
        self, source: Tensor | FileTensor, ids: NDArray[np.int64] | None, room: Block | None
    ) -> Tensor:
        shape = (len(source) if ids is None else len(ids), *source.shape[1:])
        if room is None:
            arrived = torch.empty(shape, dtype=source.dtype, device=self.device)
        else:
            arrived = room.empty(shape, source.dtype)
        count = len(arrived)
        if isinstance(source, Tensor) and ids is None and source.is_pinned():
            arrived.copy_(source, non_blocking=True)
        elif not (isinstance(source, FileTensor) and count and self._direct(source, ids, arrived)):
            self._gather(source, ids, arrived)
        return arrived

    def _gather(
        self, source: Tensor | FileTensor, ids: NDArray[np.int64] | None, arrived: Tensor
    ) -> None:
        count = len(arrived)
        token_bytes = source.nbytes // max(1, len(source))
        step = max(1, self._bytes // max(1, token_bytes))
        for begin in range(0, count, step):
            end = min(count, begin + step)
            token_ids = np.arange(begin, end) if ids is None else ids[begin:end]
            buffer, event = self._ring[self._next]
            self._next = (self._next + 1) % len(self._ring)
            event.synchronize()  # the copy that used it last
            shape = (end - begin, *source.shape[1:])
            pinned = buffer[: token_bytes * (end - begin)].view(source.dtype).view(shape)
            gathered(source, token_ids, pinned)
            arrived[begin:end].copy_(pinned, non_blocking=True)
            event.record(self.stream)

    def _direct(self, source: FileTensor, ids: NDArray[np.int64] | None, arrived: Tensor) -> bool:
        """Let the device read the whole tensor from the file, if that is faster."""
        whole, first = source.cut or (source, 0)
        registered = _registered(whole)
        sooner = whole.nbytes * self.rates.gathered < arrived.nbytes * self.rates.direct
        if registered is None or not sooner:
            return False
        file, memory = registered
        device_ids = None if ids is None else self._on_device(ids)
        self._wait_for_copies()
        out = arrived.flatten().view(torch.uint8)
        plain = device_ids is None and source.cut is None
        to = out if plain else torch.empty(whole.nbytes, dtype=torch.uint8, device=self.device)
        to.copy_(memory[whole.offset : whole.offset + whole.nbytes], non_blocking=True)
        self._record_copy(file)
        if not plain:
            tokens, out = to.view(len(whole), -1), out.view(len(arrived), -1)
            tokens = tokens[:, first : first + out.shape[1]]
            if device_ids is None:
                out.copy_(tokens, non_blocking=True)
            else:
                torch.index_select(_widest(tokens), 0, device_ids, out=_widest(out))
        return True

    def _on_device(self, ids: NDArray[np.int64]) -> Tensor:
        for host_ids, device_ids in self._ids:
            if host_ids is ids:
                return device_ids
        device_ids = torch.empty(len(ids), dtype=torch.int64, device=self.device)
        self._gather(torch.from_numpy(ids), None, device_ids)
        self._ids.append((ids, device_ids))
        return device_ids


def _registered(tensor: FileTensor) -> tuple[Registered, Tensor] | None:
    """Return the memory of the tensor's file if the device reads it by itself."""
    file = tensor.file.registered
    memory = None if file is None else file.memory
    return None if file is None or memory is None else (file, memory)


def _place_of(part: PartTensors) -> slice | None:
    """Return the bytes of a registered file that are a part, all of them and nothing else; None: it
    does not lie so, or a copy of it would not be aligned.
    """
    places: list[FileTensor] = []
    for coded in part:
        if not isinstance(coded, StoredCoded) or not coded.whole:
            return None
        places += coded.places()
    begins = [place.offset for place in places]
    ends = [place.offset + place.nbytes for place in places]
    if begins[1:] != ends[:-1] or any(at % _ALIGNED for at in (*begins, ends[-1])):
        return None
    return None if _registered(places[0]) is None else slice(begins[0], ends[-1])


def _widest(x: Tensor) -> Tensor:
    """Return [tokens, bytes] as the widest integers that divide each row: a device gathers number
    by number.
    """
    for dtype in (torch.int64, torch.int32, torch.int16):
        size = dtype.itemsize
        at = x.storage_offset(), x.stride(0), x.shape[1]
        if not any(value % size for value in at):
            return x.view(dtype)
    return x


class EntryLost(Exception):
    """A part of an entry will not arrive: its file is bad, or the loader has failed."""


class BlockSource(Protocol):
    """Tensors of a block by part, such as `entries.BlockEntry`."""

    @property
    def parts(self) -> Mapping[str, PartTensors]: ...

    def part(self, name: str) -> PartTensors: ...


class LoadSource(Protocol):
    """Source of a load, such as `entries.AnchorEntry`."""

    @property
    def blocks(self) -> Sequence[BlockSource]: ...


class Load:
    """Tokens of one entry on the device: those of a selection, or all.

    Args:
        entry: source of the parts, kept until the load is dropped.
        tier: tier of the entry.
        selection: tokens and heads to move; None: all, and each row selects its own on the device.
    """

    def __init__(self, entry: LoadSource, tier: str, selection: Selection | None) -> None:
        self.entry, self.tier, self.selection = entry, tier, selection
        self.sizes = np.full((len(entry.blocks), len(PARTS)), np.inf)
        """[blocks, len(PARTS)] bytes to move; `inf` for parts that are not kept."""
        for number, block in enumerate(entry.blocks):
            tokens = None if selection is None else len(selection.of(number))
            for part in block.parts:
                self.sizes[number, PARTS.index(part)] = sum(
                    coded.nbytes if tokens is None else coded.nbytes_of(tokens)
                    for coded in self.parts(number, part)
                )
        self.missing = self.sizes.copy()
        """[blocks, len(PARTS)] bytes that have not arrived yet."""
        self.moved = 0
        """Bytes that have arrived and are not accounted for yet."""
        self.arrived: dict[Part, Arrival] = {}
        self.requested: dict[Part, int] = {}
        """Parts that are loading, with the number of the first step that needs each."""
        self.lost: BaseException | None = None
        self.memory: Block | None = None
        """Block of the reserve that receives its parts; None: each part has memory of its own."""

    @property
    def room(self) -> int:
        """Bytes of the reserve's block that fits all parts."""
        blocks = self.entry.blocks
        tensors = 3 * sum(len(part) for block in blocks for part in block.parts.values())
        return self.nbytes + ALIGN * tensors

    @property
    def nbytes(self) -> int:
        return int(self.sizes[np.isfinite(self.sizes)].sum())

    def keeps(self, part: Part) -> bool:
        return bool(np.isfinite(self.sizes[part[0], PARTS.index(part[1])]))

    def arrive(self, part: Part, arrival: Arrival) -> None:
        at = part[0], PARTS.index(part[1])
        self.arrived[part] = arrival
        self.requested.pop(part, None)
        self.moved += int(self.missing[at])
        self.missing[at] = 0.0

    def forget(self, part: Part) -> None:
        """Drop a part from the device; it can be asked for again."""
        at = part[0], PARTS.index(part[1])
        self.arrived.pop(part, None)
        self.missing[at] = self.sizes[at]

    def parts(self, block: int, part: str) -> PartTensors:
        """Return the tensors to move for a part, with all tokens and the selected heads."""
        coded_parts = self.entry.blocks[block].part(part)
        if part != "kv" or self.selection is None or self.selection.heads is None:
            return coded_parts
        begin, end, of = self.selection.heads
        cut: Any = [coded.columns(begin, end, of) for coded in coded_parts]
        return tuple(cut)


class Loader:
    """Moves parts to the device on a thread of its own.

    Args:
        mover: moves bytes to the device.
    """

    def __init__(self, mover: Mover) -> None:
        self.mover = mover
        self._moves: deque[tuple[str, float, float]] = deque(maxlen=4096)
        self._tasks: list[tuple[int, int, int, Load, Part]] = []
        """A heap by step and by place among the parts of the step."""
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._moving: Load | None = None
        self._thread: threading.Thread | None = None

    def ask(self, load: Load, parts: Iterable[Part], step: int) -> None:
        """Queue parts to be moved to the device; parts that have arrived, or are loading for an
        earlier step, stay as they are.

        Args:
            load: owner of the parts.
            parts: parts in the order in which the step reads them; parts that are not kept are
                skipped.
            step: number of the step that reads them.
        """
        with self._changed:
            new = [
                (place, part)
                for place, part in enumerate(parts)
                if part not in load.arrived
                and load.requested.get(part, step + 1) > step
                and load.keeps(part)
            ]
            for place, part in new:
                load.requested[part] = step
                heapq.heappush(self._tasks, (step, place, next(self._order), load, part))
            self._start()
            if new:  # else the loader would wake at every step, and take the interpreter from it
                self._changed.notify_all()

    def wait(self, load: Load, part: Part) -> Arrival:
        """Wait for a part and return it.

        Raises:
            EntryLost: it will not arrive.
        """
        with self._changed:
            while part not in load.arrived:
                if load.lost is not None:
                    raise EntryLost(f"block {part[0]}, part {part[1]}") from load.lost
                if part not in load.requested:
                    raise EntryLost(f"block {part[0]}, part {part[1]}, was not asked for")
                if self._thread is None or not self._thread.is_alive():
                    load.lost = EntryLost("the loader has ended")
                    continue
                self._changed.wait(_LOOK_S)
            return load.arrived[part]

    def read(self, load: Load, part: Part, stalls: list[Span]) -> tuple[Coded, ...]:
        """Return a part for later work of the current stream, and wait for it if it has not
        arrived.

        Args:
            load: owner of the part.
            part: part that was asked for.
            stalls: receives the span of the wait.

        Raises:
            EntryLost: it will not arrive.
        """
        arrival = load.arrived.get(part)
        if arrival is not None and arrival.ready():
            return arrival.get()
        begin = mark(self.mover.device)
        tensors = (arrival or self.wait(load, part)).get()
        stalls.append(Span(begin, mark(self.mover.device)))
        return tensors

    def keep_only(self, load: Load, parts: Collection[Part]) -> None:
        """Drop the other parts of a load from the device; they can be asked for again."""
        with self._changed:
            for part in [part for part in load.arrived if part not in parts]:
                load.forget(part)

    def drop(self, load: Load) -> None:
        """Cancel the parts of a load that have not arrived."""
        with self._changed:
            load.requested.clear()
            load.arrived.clear()
            load.lost = EntryLost("the load was dropped")
            self._tasks = [task for task in self._tasks if task[3] is not load]
            heapq.heapify(self._tasks)

    def take_moves(self) -> list[tuple[str, float, float]]:
        """Return and clear the (tier, bytes, seconds) of the moves since the last call."""
        return [self._moves.popleft() for _ in range(len(self._moves))]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(10.0)
        self.mover.close()

    def _start(self) -> None:
        if self._tasks and (self._thread is None or not self._thread.is_alive()):
            if self._moving is not None:  # the thread before has died over it
                self._moving.lost = EntryLost("the loader has ended")
            self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._tasks and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                step, *_, load, part = heapq.heappop(self._tasks)
                run = self._run_of(load, part, step)
                self._moving = load
            if run and load.lost is None:
                self._move(load, run)
            self._moving = None
            del load  # its memory is another's once nobody reads it

    def _run_of(self, load: Load, part: Part, step: int) -> list[Part]:
        """Return the parts that travel with a part in one copy: those that the step reads next and
        that join it, up to a share of the entry. Empty: it has arrived.
        """
        if part in load.arrived:
            return []
        run, blocks = [part], load.entry.blocks
        most = -(-int(np.isfinite(load.sizes).sum()) // _RUNS)
        while len(run) < most and load.selection is None and self._tasks:
            next_step, *_, next_load, following = self._tasks[0]
            if next_load is not load or next_step != step or following in load.arrived:
                break
            tensors = (blocks[block].part(name) for block, name in (run[-1], following))
            if not self.mover.joins(*tensors):
                break
            heapq.heappop(self._tasks)
            run.append(following)
        return run

    def _move(self, load: Load, run: Sequence[Part]) -> None:
        begin = time.perf_counter()
        try:
            if len(run) > 1:
                parts = [load.parts(*part) for part in run]
                arrivals = self.mover.copy_run(parts, load.memory)
            else:
                [(block, name)] = run
                ids = None if load.selection is None else load.selection.of(block)
                room = () if load.memory is None else (load.memory,)
                arrivals = [self.mover.move(load.parts(block, name), ids, *room)]
        except Exception as error:  # a device or a file may raise anything: readers get it
            with self._changed:
                load.lost = error
                self._changed.notify_all()
            return
        with self._changed:
            if load.lost is None:
                size = 0.0
                for part, arrival in zip(run, arrivals, strict=True):
                    size += float(load.missing[part[0], PARTS.index(part[1])])
                    load.arrive(part, arrival)
                self._moves.append((load.tier, size, time.perf_counter() - begin))
            self._changed.notify_all()
