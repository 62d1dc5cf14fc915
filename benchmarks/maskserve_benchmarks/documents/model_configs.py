"""Write every config.pbtxt from the declared tensors (maskserve_common.contracts.tensors).

python scripts/bench model_configs            # after a change
python scripts/bench model_configs --check    # exit code 1 if a file is stale
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as config_pb

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.documents.check_flag import check_only
from maskserve_common.contracts.tensors import (
    CONTRACTS,
    ENSEMBLE,
    SERVICES,
    Contract,
    ensemble_steps,
)

_NOTICE = "Made by scripts/bench model_configs from maskserve_common/contracts/tensors.py."
_TYPES = {"BYTES": "TYPE_STRING", "UINT8": "TYPE_UINT8", "FP32": "TYPE_FP32"}
_WIDTH = 100
ALL = {**CONTRACTS, **SERVICES}


def path_of(name: str) -> Path:
    """Return the path of a model's config.pbtxt."""
    folder = "ensemble" if name == ENSEMBLE else "services" if name in SERVICES else None
    return CHECKOUT / (folder or "model_repository") / name / "config.pbtxt"


def config_text(name: str) -> str:
    """Return the text of a model's config.pbtxt: a comment, then Triton's ModelConfig."""
    contract = ALL[name]
    config = config_pb.ModelConfig(name=name)
    _declare(config, contract)
    if name == ENSEMBLE:
        config.platform = "ensemble"
        for step in ensemble_steps():
            config.ensemble_scheduling.step.add(
                model_name=step.model,
                model_version=-1,
                input_map=step.inputs,
                output_map=step.outputs,
            )
    else:
        config.backend = "python"
        kind = "KIND_MODEL" if contract.on_device else "KIND_CPU"
        config.instance_group.add(count=1, kind=kind)
        if contract.decoupled:
            config.model_transaction_policy.decoupled = True
        if contract.together:
            config.max_batch_size = contract.together
            config.dynamic_batching.SetInParent()
    lines = [*_comment(contract.about), *_comment(_NOTICE), ""]
    body: str = text_format.MessageToString(config, use_short_repeated_primitives=True)
    return "\n".join(lines) + body


def _declare(config: Any, contract: Contract) -> None:
    for tensor in contract.inputs:
        config.input.add(
            name=tensor.name,
            data_type=_TYPES[tensor.dtype],
            dims=tensor.dims,
            optional=tensor.optional,
            allow_ragged_batch=contract.together > 0,
        )
    for tensor in contract.outputs:
        config.output.add(name=tensor.name, data_type=_TYPES[tensor.dtype], dims=tensor.dims)


def _comment(sentence: str) -> list[str]:
    return textwrap.wrap(sentence, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def main() -> int:
    stale = [name for name in ALL if _read(path_of(name)) != config_text(name)]
    if check_only(__doc__):
        for name in stale:
            print(
                f"{path_of(name)} is not what scripts/bench model_configs writes", file=sys.stderr
            )
        return int(bool(stale))
    for name in stale:
        path_of(name).write_text(config_text(name), encoding="utf-8")
    return 0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
