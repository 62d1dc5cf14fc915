"""Every config.pbtxt is what the declared tensors say, and what they say is whole."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from maskserve_benchmarks.documents.model_configs import ALL as CONTRACTS
from maskserve_benchmarks.documents.model_configs import config_text, path_of
from maskserve_common.contracts import tensors as tensor_tables
from maskserve_common.contracts.tensors import SERVICES, Tensor

ROOT = Path(__file__).parents[2]
FILES = {
    path.parent.name: path
    for folder in ("model_repository", "ensemble", "services")
    for path in (ROOT / folder).glob("*/config.pbtxt")
}
ON_DEVICE = ("encoder", "denoiser", "decoder", *SERVICES)
DTYPES = {"TYPE_STRING": "BYTES", "TYPE_UINT8": "UINT8", "TYPE_FP32": "FP32"}


def read(name: str) -> Any:
    return text_format.Parse(FILES[name].read_text(), model_config_pb2.ModelConfig())


def tensors(declared: Any) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(
            t.name,
            DTYPES[model_config_pb2.DataType.Name(t.data_type)],
            tuple(t.dims),
            getattr(t, "optional", False),
        )
        for t in declared
    )


def test_every_contract_has_a_file() -> None:
    assert set(FILES) == set(CONTRACTS)


@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_the_files_are_those_that_the_command_writes(name: str) -> None:
    """`python scripts/bench model_configs` writes them."""
    assert FILES[name] == path_of(name)
    assert FILES[name].read_text() == config_text(name)


def test_a_tensor_more_that_clients_may_send_is_one_declaration() -> None:
    declared = Path(tensor_tables.__file__).read_text()
    more = 'PICTURES = (IMAGE, MASK, CONTROL, Tensor("DEPTH", "BYTES", (-1,), optional=True))'
    changed = declared.replace("PICTURES = (IMAGE, MASK, CONTROL)", more)
    assert changed != declared
    module = types.ModuleType("changed_tensors")
    sys.modules["changed_tensors"] = module
    try:
        exec(compile(changed, "changed_tensors", "exec"), module.__dict__)
    finally:
        del sys.modules["changed_tensors"]
    for front in ("edit", "edit_stream"):
        assert module.CONTRACTS[front].input("DEPTH").optional
    for inner in ("edit_pipeline", "preprocess"):
        assert not module.CONTRACTS[inner].input("DEPTH").optional
    [preprocess, *_] = module.ensemble_steps()
    assert preprocess.inputs["DEPTH"] == "DEPTH"


@pytest.mark.parametrize("name", sorted(FILES))
def test_tensors(name: str) -> None:
    config, contract = read(name), CONTRACTS[name]
    assert config.name == name
    assert config.max_batch_size == contract.together
    assert config.HasField("dynamic_batching") == (contract.together > 0)
    assert config.dynamic_batching.max_queue_delay_microseconds == 0
    assert all(tensor.allow_ragged_batch == (contract.together > 0) for tensor in config.input)
    assert tensors(config.input) == contract.inputs
    assert tensors(config.output) == contract.outputs


@pytest.mark.parametrize("name", sorted(set(FILES) - {"edit_pipeline"}))
def test_python_models(name: str) -> None:
    config = read(name)
    assert config.backend == "python"
    assert config.model_transaction_policy.decoupled == CONTRACTS[name].decoupled
    [group] = config.instance_group
    kind = group.Kind.Name(group.kind)
    assert kind == ("KIND_MODEL" if name in ON_DEVICE else "KIND_CPU")
    assert group.count == 1
    assert (FILES[name].parent / "1" / "model.py").is_file()


def test_the_ensemble_is_whole() -> None:
    """Each step's inputs and outputs are mapped, each tensor has one source, and types agree."""
    config = read("edit_pipeline")
    sources = {t.name: t for t in CONTRACTS["edit_pipeline"].inputs}
    steps = list(config.ensemble_scheduling.step)
    assert [s.model_name for s in steps] == [
        "preprocess", "encoder", "denoiser", "decoder", "postprocess",
    ]  # fmt: skip
    used: set[str] = set()
    for step in steps:
        contract = CONTRACTS[step.model_name]
        # All inputs, the optional ones too: optional is for `control` alone.
        assert set(step.input_map) == {t.name for t in contract.inputs}
        assert set(step.output_map) == {t.name for t in contract.outputs}
        for tensor in contract.inputs:
            source = sources[step.input_map[tensor.name]]
            assert (source.dtype, source.dims) == (tensor.dtype, tensor.dims)
            used.add(source.name if step is steps[0] else step.input_map[tensor.name])
        for tensor in contract.outputs:
            name = step.output_map[tensor.name]
            assert name not in sources, f"{name} has two sources"
            sources[name] = tensor
    for output in CONTRACTS["edit_pipeline"].outputs:
        assert (sources[output.name].dtype, sources[output.name].dims) == (
            output.dtype,
            output.dims,
        )
    ends = {t.name for t in CONTRACTS["edit_pipeline"].outputs}
    assert set(sources) - used == ends, "a tensor is made and not used"


def test_what_follows_the_denoiser_takes_nothing_from_before_it() -> None:
    """Triton does not load such an ensemble."""
    steps = {s.model_name: s for s in read("edit_pipeline").ensemble_scheduling.step}
    earlier_outputs = set(steps["preprocess"].output_map.values()) | set(
        steps["encoder"].output_map.values()
    )
    for name in ("decoder", "postprocess"):
        assert not earlier_outputs & set(steps[name].input_map.values())
