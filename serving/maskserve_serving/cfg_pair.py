"""`maskserve serve --cfg-devices A,B`: one worker whose two devices share each edit's passes."""

from __future__ import annotations

from typing import Any

from maskserve_common.config import ConfigError
from maskserve_engine.families.specs import load_spec
from maskserve_serving.command import visible_gpus
from maskserve_serving.errors import ServeError
from maskserve_serving.files import with_values
from maskserve_serving.options import ServeOptions

_CPU = "cpu"


def pair_of(text: str) -> tuple[str, str]:
    """Return the two devices: numbers of the host's GPUs, or `cpu` twice.

    Raises:
        ServeError: they are not two such devices.
    """
    names = [name.strip().removeprefix("cuda:") for name in text.split(",")]
    gpus = all(name.isdecimal() for name in names) and len(set(map(int, names))) == 2
    if len(names) != 2 or not (gpus or names == [_CPU, _CPU]):
        raise ServeError(
            f"--cfg-devices: {text!r} is not two different GPUs, as 0,1, or {_CPU},{_CPU}"
        )
    return names[0], names[1]


def gpus_of_pair(text: str) -> str | None:
    """Return CUDA_VISIBLE_DEVICES of the worker; None: it uses no GPU.

    Raises:
        ServeError: a named GPU does not exist.
    """
    names = pair_of(text)
    if _CPU in names:
        return None
    gpus = visible_gpus()
    for name in names:
        if int(name) >= len(gpus):
            raise ServeError(f"--cfg-devices: there is no GPU {name}; this host has {len(gpus)}")
    return ",".join(gpus[int(name)] for name in names)


def with_pair(options: ServeOptions, tables: dict[str, Any]) -> dict[str, Any]:
    """Return the worker's configuration with such a pair over it.

    Raises:
        ServeError: it contradicts another option, or the model has only one pass.
    """
    names = pair_of(options.cfg_devices)
    for flag, wrong in (
        ("--workers", options.workers != 1),
        ("--service", bool(options.services_of("controlnet"))),
        ("--devices-per-worker", options.devices_per_worker not in (0, 2)),
    ):
        if wrong:
            raise ServeError(f"--cfg-devices is one worker of two devices; leave {flag} out")
    gpus_of_pair(options.cfg_devices)
    model = tables["model"]
    try:
        spec = load_spec(model["path"], model.get("native_resolution", 0))
    except ConfigError as error:
        raise ServeError(str(error)) from error
    if not spec.two_passes:
        raise ServeError(
            "--cfg-devices: edits of this model have one pass, because it has no "
            "classifier-free guidance; use --devices-per-worker 2 or --workers 2"
        )
    if _CPU in names:
        tables = with_values(tables, "model", device=_CPU)
    return with_values(tables, "engine", devices=2, policy="cfg")
