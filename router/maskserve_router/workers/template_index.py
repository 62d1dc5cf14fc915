"""An index of which workers have which templates.

It keeps one integer per template and tier, in which bit N stands for worker N. Thousands of workers
that share most of ten thousand templates take megabytes, and a lookup is one operation.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import numpy as np
import numpy.typing as npt


class TemplateIndex:
    """Templates by tier and worker. Each worker has a number that `join` gives it."""

    def __init__(self) -> None:
        self._tiers: dict[str, dict[str, int]] = {}
        self._counts: dict[tuple[str, int], int] = {}
        """(tier, worker) -> number of templates."""
        self._free: list[int] = []
        self._numbers = 0

    def join(self) -> int:
        """Return a number for a new worker without templates."""
        if self._free:
            return self._free.pop()
        self._numbers += 1
        return self._numbers - 1

    def leave(self, number: int) -> None:
        """Remove a worker, and free its number for another one."""
        self.clear(number)
        self._free.append(number)

    def clear(self, number: int) -> None:
        """Remove all templates of a worker."""
        for tier in self._tiers:
            self.remove(number, tier, self._of(number, tier))

    def add(self, number: int, tier: str, templates: Iterable[str]) -> None:
        holder_bits, bit, new_count = self._tiers.setdefault(tier, {}), 1 << number, 0
        for template in templates:
            bits = holder_bits.get(template, 0)
            if not bits & bit:
                holder_bits[template] = bits | bit
                new_count += 1
        self._counts[tier, number] = self._counts.get((tier, number), 0) + new_count

    def remove(self, number: int, tier: str, templates: Iterable[str]) -> None:
        holder_bits, bit, fewer = self._tiers.get(tier, {}), 1 << number, 0
        for template in templates:
            bits = holder_bits.get(template, 0)
            if bits == bit:
                del holder_bits[template]
            elif bits & bit:
                holder_bits[template] = bits ^ bit
            fewer += bool(bits & bit)
        self._counts[tier, number] = self._counts.get((tier, number), 0) - fewer

    def of(self, number: int) -> dict[str, list[str]]:
        """Return all templates of a worker, by tier."""
        return {tier: templates for tier in self._tiers if (templates := self._of(number, tier))}

    def view(self, number: int) -> Mapping[str, Container[str]]:
        """Return a live view of a worker's templates, by tier."""
        return _Tiers(self._tiers, number)

    def holders(self, tier: str, template: str, count: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the workers 0 to `count` - 1 that have the template."""
        mask = self._tiers.get(tier, {}).get(template, 0) & ((1 << count) - 1)
        raw = mask.to_bytes(-(-count // 8), "little")
        bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little")
        return bits[:count].view(np.bool_)

    def _of(self, number: int, tier: str) -> list[str]:
        if not self._counts.get((tier, number)):
            return []
        bit = 1 << number
        return [template for template, mask in self._tiers[tier].items() if mask & bit]


class _Tiers(Mapping[str, Container[str]]):
    """Tier -> templates that one worker has there."""

    __slots__ = ("_number", "_tiers")

    def __init__(self, tiers: Mapping[str, Mapping[str, int]], number: int) -> None:
        self._tiers, self._number = tiers, number

    def __getitem__(self, tier: str) -> Container[str]:
        return _Tier(self._tiers[tier], self._number)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._tiers)

    def __len__(self) -> int:
        return len(self._tiers)


class _Tier:
    __slots__ = ("_number", "_templates")

    def __init__(self, templates: Mapping[str, int], number: int) -> None:
        self._templates, self._number = templates, number

    def __contains__(self, template: object) -> bool:
        return bool(self._templates.get(template, 0) >> self._number & 1)  # type: ignore[call-overload]
