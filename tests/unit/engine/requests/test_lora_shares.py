"""LoRAs that the edits of one key hold on the device leave room to those of others."""

from __future__ import annotations

import pytest

from maskserve_common.config import AdaptersConfig, Config, ModelConfig
from maskserve_common.contracts.request import Lora
from maskserve_common.errors import MaskserveError, Overloaded
from maskserve_common.files.adapter_folder import AdapterFile
from maskserve_common.observations import Observations
from maskserve_common.resources.resource_states import ResourceStates
from maskserve_engine.adapters.lora_loader import LORAS
from maskserve_engine.requests.loras import Loras


class Files:
    """LoRAs of ten bytes, which never come."""

    def half_bytes(self, lora: Lora) -> int:
        return self.file_bytes(lora)

    def file_bytes(self, lora: Lora) -> int:
        return 10

    def typical_bytes(self) -> float:
        return 10.0

    def on_host(self) -> tuple[AdapterFile, ...]:
        return ()

    def load(self, lora: Lora, done: object) -> None:
        pass

    def close(self) -> None:
        pass


def lora(name: str) -> Lora:
    return Lora(name=name, version=name)


def loras_within(budget: int) -> Loras:
    config = Config(
        model=ModelConfig(dtype="bfloat16"), adapters=AdaptersConfig(device_bytes=budget)
    )
    resource_states = ResourceStates(64, {LORAS.name: budget})
    return Loras(config, resource_states, Files(), lambda _, outcome: None, Observations())


def test_edits_of_one_key_may_not_hold_all_of_the_device() -> None:
    loras = loras_within(60)
    for number in range(3):
        loras.hold(f"greedy!{number}", (lora(f"l{number}"),))
    loras.hold("greedy!again", (lora("l0"),))  # the same one takes no more room
    with pytest.raises(Overloaded, match="edits of this key hold LoRAs of 30 bytes"):
        loras.hold("greedy!3", (lora("l3"),))
    loras.hold("modest!one", (lora("m"),))
    for name in ("greedy!0", "greedy!again", "modest!one"):
        loras.release(name)
    loras.hold("greedy!3", (lora("l0"),))


def test_where_keys_are_not_told_apart_edits_may_hold_all() -> None:
    loras = loras_within(60)
    for number in range(6):
        loras.hold(str(number), (lora(f"l{number}"),))
    with pytest.raises(MaskserveError, match="no room for adapter"):
        loras.hold("6", (lora("l6"),))
