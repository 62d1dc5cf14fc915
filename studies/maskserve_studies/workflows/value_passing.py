"""Time to pass 16 MiB from one node to the next: as a file on the host (by name), and through the
caller.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from maskserve_common.config import ValuesConfig
from maskserve_common.files.values import Values
from maskserve_common.imaging.images import as_file, encode_png, plain_picture
from maskserve_router.config import WorkflowFiles
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.nodes.node_pool import NodePool
from maskserve_workflows.plan import NodeCall
from maskserve_workflows.run import Task
from maskserve_workflows.values import NamedValue

_SIDE: Final = 2364
"""Side of a picture of 16 MiB."""
_CLIENT: Final = KeyHolder("bench", 64, admin=True)
_RUN: Final = "bench"


def pass_by_name(address: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Medians of both ways in turn: `pad` gives 16 MiB, and `crop` takes them.

    Args:
        address: of a node server.
        folder: of the values that it shares with its router.
        rounds: of each way.

    Raises:
        AssertionError: the ways give different pictures.
    """
    return asyncio.run(_by_name(address, Values(ValuesConfig(str(folder))), rounds))


async def _by_name(address: str, values: Values, rounds: int) -> dict[str, Any]:
    files, rng = WorkflowFiles(nodes=(address,), kept_bytes=0), np.random.default_rng()
    named = NodePool(files, FairShare(2), values=values)
    plain = NodePool(files, FairShare(2))
    seconds: dict[str, list[float]] = {"named": [], "plain": []}
    white = np.zeros((_SIDE, _SIDE + 1), np.uint8)
    white[100:132, 100:132] = 255
    values.begin(_CLIENT.scope, _RUN)
    try:
        for _ in range(rounds + 1):  # the first one warms
            pixels = rng.integers(0, 256, (_SIDE, _SIDE, 3), np.uint8)
            puts = [
                values.put(plain_picture(item), _CLIENT.scope, _RUN) for item in (pixels, white)
            ]
            picture, mask = (NamedValue(put) for put in puts if put is not None)
            by_name_s, actual = await _two(named, picture, mask, _RUN)
            by_value_s, expected = await _two(plain, encode_png(pixels), encode_png(white), "")
            cut = (
                actual if isinstance(actual, bytes) else values.read(actual.element, _CLIENT.scope)
            )
            assert as_file(cut) == as_file(expected)
            seconds["named"].append(round(by_name_s, 4))
            seconds["plain"].append(round(by_value_s, 4))
            values.end(_CLIENT.scope, _RUN)
            values.begin(_CLIENT.scope, _RUN)
    finally:
        values.end(_CLIENT.scope, _RUN)
        await named.close()
        await plain.close()
    middle = {name: statistics.median(item[1:]) for name, item in seconds.items()}
    return {
        "by_name_ms": round(1e3 * middle["named"], 1),
        "by_value_ms": round(1e3 * middle["plain"], 1),
        "by_name_ratio": round(middle["named"] / middle["plain"], 3),
        "seconds_by_name": seconds,
    }


async def _two(pool: NodePool, picture: Any, mask: Any, run: str) -> tuple[float, Any]:
    """Seconds of both nodes, and their outputs."""
    pad = Task("pad", NodeCall("pad", "pad", settings={"left": 1}), {"picture": picture})
    begin = time.perf_counter()
    padded = (await pool.call(pad, _CLIENT, run=run)).outputs["picture"]
    cut = Task("crop", NodeCall("crop", "crop"), {"picture": padded, "mask": mask})
    result = (await pool.call(cut, _CLIENT, run=run)).outputs["picture"]
    return time.perf_counter() - begin, result
