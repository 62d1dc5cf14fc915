"""Small LoRAs of text encoders, and a worker that has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from msgspec import structs

from maskserve_common.config import Config, ModelConfig
from maskserve_common.contracts.request import Lora
from maskserve_lora.store import AdapterStore
from tests.fakes.loras import Arrays, lora, write

INNER = 32
"""Width of the feed-forward parts of the tiny CLIPs."""
LAYER = "text_model.encoder.layers.0."


def served(folder: Path, model: Path, files: Mapping[str, Arrays]) -> tuple[Config, list[Lora]]:
    """A worker's configuration with these adapters in the host's memory, and the adapters."""
    for name, tensors in files.items():
        write(folder / "store" / f"{name}.safetensors", tensors)
    plain = Config(model=ModelConfig(path=str(model), max_sequence_length=16))
    adapters = structs.replace(plain.adapters, store=str(folder / "store"))
    config = structs.replace(plain, adapters=adapters, runtime_dir=str(folder))
    store = AdapterStore(config)
    store.catalogue.scan()
    loras = []
    for name in files:
        version = store.catalogue.find(name).version
        store.fetch(name, version)
        loras.append(Lora(name=name, version=version, text=True))
    store.close()
    return config, loras


def of_text(
    *parts: str, rank: int = 4, width: int = 32, inner: Mapping[str, int] = MappingProxyType({})
) -> Arrays:
    """A LoRA of these text encoders, in the size of their weights; `width` is their
    tokens' width, and `inner` the feed-forward width of parts where it is not INNER.
    """
    attention = {f"{LAYER}self_attn.{name}": (width, width) for name in ("q_proj", "out_proj")}
    drawn: Arrays = {}
    for part in parts:
        drawn |= lora(
            {**attention, f"{LAYER}mlp.fc1": (width, inner.get(part, INNER))}, rank, f"{part}."
        )
    return {name: (0.2 * value).astype(np.float32) for name, value in drawn.items()}
