"""What a worker of several devices cannot be, each in a sentence before a process is started."""

from __future__ import annotations

from maskserve_core.config import Config, ConfigError
from maskserve_core.models.registry import load_facts
from maskserve_core.planning.cost_profile import read_profile


def check_devices(config: Config, gpus: int) -> None:
    """See that a worker can have so many devices.

    Args:
        config: of the worker.
        gpus: that this process sees; 0: the model runs on the CPU, where a device is a process.

    Raises:
        ConfigError: it cannot.
    """
    devices, policy = config.engine.devices, config.engine.policy
    if config.engine.costs:
        read_profile(config.engine.costs)
    if config.controls.service:
        raise ConfigError(
            f"[engine] devices: {devices} devices per worker do not go with [controls] service; "
            "use one device"
        )
    if config.engine.flux_cuda_graphs:
        raise ConfigError(
            f"[engine] flux_cuda_graphs: does not go with {devices} devices per worker; use false"
        )
    if 0 < gpus < devices:
        raise ConfigError(
            f"[engine] devices: {devices} devices on {gpus} GPU(s); accepted: up to {gpus}"
        )
    if policy == "spread":
        return
    facts = load_facts(config.model.path, config.model.native_resolution)
    if policy == "cfg":
        if devices != 2:
            raise ConfigError(
                f'[engine] policy: "cfg" takes two devices, not {devices}: an edit has two passes '
                "at most"
            )
        if not facts.two_passes:
            raise ConfigError(
                '[engine] policy: "cfg" needs a model with classifier-free guidance; edits of this '
                'one have one pass: use "spread"'
            )
    elif facts.family == "flux":  # UNets share passes alone
        heads = int(facts.denoiser["num_attention_heads"])
        if devices > heads:
            raise ConfigError(
                f"[engine] devices: {devices} devices cannot share the {heads} attention heads of "
                f'this model; accepted: up to {heads}, or policy = "spread"'
            )
