"""Checks the configuration of a worker with several devices before a process is started."""

from __future__ import annotations

from maskserve_common.config import Config, ConfigError
from maskserve_engine.families.specs import load_spec
from maskserve_engine.planning.cost_profile import read_profile
from maskserve_engine.scheduling.policies import is_static, policy_of


def check_devices(config: Config, gpus: int) -> None:
    """Check that a worker can have its configured devices. `gpus` is the number of GPUs that this
    process sees; at 0 the model runs on the CPU, where a device is a process.

    Raises:
        ConfigError: it cannot.
    """
    devices = config.engine.devices
    if config.engine.costs:
        read_profile(config.engine.costs)
    if config.controls.service:
        raise ConfigError(
            f"[engine] devices: {devices} devices per worker do not go with [controls] service; "
            "use one device"
        )
    if is_static(config.engine) and policy_of(config.engine).gangs:
        raise ConfigError(
            f'[engine] batching: "static" does not go with policy = "{config.engine.policy}"; '
            'accepted: "continuous", or policy = "spread"'
        )
    if 0 < gpus < devices:
        raise ConfigError(
            f"[engine] devices: {devices} devices on {gpus} GPU(s); accepted: up to {gpus}"
        )
    spec = load_spec(config.model.path, config.model.native_resolution)
    problem = policy_of(config.engine).problem(devices, spec)
    if problem is not None:
        raise ConfigError(problem)
