"""The policies of `[engine] policy`: how a worker of several devices shares them among its edits.

Each policy is a scheduler in its own module and an entry in this one; `EngineConfig` has its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from maskserve_common.config import EngineConfig
from maskserve_engine.families.specs import counted_work
from maskserve_engine.scheduling.gangs.batching import Batching
from maskserve_engine.scheduling.gangs.deadline import Deadline
from maskserve_engine.scheduling.gangs.fixed import Fixed
from maskserve_engine.scheduling.gangs.rounds import Rounds
from maskserve_engine.scheduling.gangs.scheduler import GangScheduler
from maskserve_engine.scheduling.gangs.work import GangPolicy
from maskserve_engine.scheduling.pair import Pair
from maskserve_engine.scheduling.spread import Spread
from maskserve_engine.scheduling.step_scheduler import SchedulingPolicy
from maskserve_engine.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DevicePolicy:
    """A scheduling policy as the engine uses it."""

    make: Callable[[EngineConfig, int, int, float], SchedulingPolicy]
    """Makes the scheduler, from the configuration and the arguments of `MakePolicy`."""
    gangs: bool = False
    """Whether it chooses the number of devices per step, so that tickets need the seconds of each
    number.
    """
    deals: bool = False
    """Whether all devices take the steps of one batch and deal its passes
    (`batch.cfg_parallel`)."""
    problem: Callable[[int, ModelSpec], str | None] = lambda devices, spec: None
    """Returns why so many devices cannot share a model's steps in this way; None: they can."""

    @property
    def shares_steps(self) -> bool:
        """Whether several devices may take a step together."""
        return self.gangs or self.deals


def policy_of(engine: EngineConfig) -> DevicePolicy:
    return POLICIES[engine.policy]


def batches_of(engine: EngineConfig) -> int:
    """Batches of a worker: one for each device, or one that all devices step."""
    return 1 if policy_of(engine).deals else engine.devices


def is_static(engine: EngineConfig) -> bool:
    """Whether batches are formed and run to their end (`[engine] batching`)."""
    return engine.batching == "static"


def _gangs(gangs: GangPolicy, engine: EngineConfig, rows: int, waiting: int) -> GangScheduler:
    return GangScheduler(Batching(gangs, rows), engine.devices, rows, waiting)


def _together(engine: EngineConfig, rows: int, waiting: int, _: float) -> GangScheduler:
    return GangScheduler(Fixed(engine.devices, engine.devices), engine.devices, rows, waiting)


def _two_passes(devices: int, spec: ModelSpec) -> str | None:
    if devices != 2:
        return (
            f'[engine] policy: "cfg" takes two devices, not {devices}: an edit has two passes '
            "at most"
        )
    if not spec.two_passes:
        return (
            '[engine] policy: "cfg" needs a model with classifier-free guidance; edits of this '
            'one have one pass: use "spread"'
        )
    return None


def _heads(devices: int, spec: ModelSpec) -> str | None:
    side = spec.native_resolution // spec.vae_scale_factor
    heads = counted_work(spec, side, side).heads
    if heads and devices > heads:
        return (
            f"[engine] devices: {devices} devices cannot share the {heads} attention heads of "
            f'this model; accepted: up to {heads}, or policy = "spread"'
        )
    return None  # models that do not share heads share only passes


POLICIES = {
    "spread": DevicePolicy(
        lambda engine, *bounds: Spread(engine.devices, *bounds, static=is_static(engine))
    ),
    "deadline": DevicePolicy(
        lambda engine, rows, waiting, _: _gangs(Deadline(engine.devices), engine, rows, waiting),
        gangs=True,
        problem=_heads,
    ),
    "rounds": DevicePolicy(
        lambda engine, rows, waiting, _: _gangs(
            Rounds(engine.devices, round_steps=engine.round_steps), engine, rows, waiting
        ),
        gangs=True,
        problem=_heads,
    ),
    "together": DevicePolicy(_together, gangs=True, problem=_heads),
    "cfg": DevicePolicy(
        lambda engine, *bounds: Pair(engine.devices, *bounds, static=is_static(engine)),
        deals=True,
        problem=_two_passes,
    ),
}
"""Policies by their name in `[engine] policy`."""
