"""One batch over all devices of a worker, which deal its passes among themselves."""

from __future__ import annotations

from dataclasses import replace

from maskserve_engine.scheduling.step_scheduler import ALL_FREE, Decision, Devices, StepScheduler


class Pair(StepScheduler):
    """A `StepScheduler` whose steps are taken by all available devices together; `devices` is their
    number, and the other arguments are those of `StepScheduler`.
    """

    def __init__(
        self,
        devices: int,
        max_rows: int,
        max_waiting: int,
        priming_share: float,
        *,
        static: bool = False,
    ) -> None:
        super().__init__(max_rows, max_waiting, priming_share, static=static)
        self._devices = range(devices)

    def schedule(self, now: float, devices: Devices = ALL_FREE) -> Decision:
        """Decide when the last step has ended on all devices. Gangs are pairs: if a device is lost,
        a remaining one takes the steps.
        """
        living = tuple([device for device in self._devices if device not in devices.lost])
        if devices.busy or not living:
            return Decision((), (), ())
        if len(living) < len(self._devices):
            living = living[:1]
        decision = super().schedule(now)
        return replace(decision, runs=tuple([replace(r, devices=living) for r in decision.runs]))
