"""The duration of parts of a plan, from the prices of its nodes and one device for each.

A loop that has not begun counts with the fewest rounds: one region, one try. A plan that is
reported as late is therefore really late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from maskserve_workflows.plan import Each, NodeCall, Repeat, Step, references_of

Price = Callable[[NodeCall], float]
"""Function from a call to its seconds on an idle device."""
COMPOSE: Final = NodeCall(id="compose", node="compose")
"""The node that composes one picture from rounds that ran side by side."""


def tails(steps: Sequence[Step], price: Price) -> dict[str, float]:
    """Return for each step the seconds of the longest chain of steps after it."""
    tail_s: dict[str, float] = dict.fromkeys((step.id for step in steps), 0.0)
    for step in reversed(steps):
        length_with_step = span(step, price) + tail_s[step.id]
        for owner in {ref.partition(".")[0] for ref in references_of(step)}:
            if owner in tail_s:
                tail_s[owner] = max(tail_s[owner], length_with_step)
    return tail_s


def length(steps: Sequence[Step], price: Price) -> float:
    """Return the seconds of the longest chain of steps."""
    tail_s = tails(steps, price)
    return max((span(step, price) + tail_s[step.id] for step in steps), default=0.0)


def span(step: Step, price: Price) -> float:
    """Return the seconds from a step's begin to its end."""
    if isinstance(step, NodeCall):
        return price(step)
    return _rounds(step) * length(step.body, price)


def work(step: Step, price: Price) -> float:
    """Return the seconds of all calls of a step."""
    if isinstance(step, NodeCall):
        return price(step)
    rounds = step.most if isinstance(step, Each) and step.over is None else 1
    return rounds * sum(work(substep, price) for substep in step.body)


def _rounds(step: Each | Repeat) -> int:
    """Return the least number of rounds that run one after the other."""
    is_single = isinstance(step, Repeat) or step.over is not None or step.carry is None
    return 1 if is_single else step.most
