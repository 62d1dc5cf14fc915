"""LoRAs of the text encoders, applied while one prompt is encoded.

Hooks add each layer's update to the layer's output: no weight is written, and removing the hooks
restores the model. (transformers' own adapters stay in the model's layers.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from maskserve_common.config import Config
from maskserve_common.contracts.request import Lora
from maskserve_common.errors import InvalidRequest, Overloaded
from maskserve_engine.adapters.lora_file import Parts, read_lora
from maskserve_engine.layers.low_rank import Factors
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.lora_header import BadAdapter
from maskserve_lora.store import AdapterStore

_FIELD = "SETTINGS.loras"


class TextAdapters:
    """The text encoders' part of LoRAs. Only one thread may encode at a time.

    Args:
        config: configuration of the worker.
        models: text encoders by part (`lora_header.PARTS`).
        most_bytes: bytes of factors kept with the encoders; the least recently used are
            evicted. A LoRA of rank 16 has 10 MB for CLIP.
    """

    def __init__(
        self, config: Config, models: Mapping[str, nn.Module], most_bytes: int = 2**28
    ) -> None:
        self._models, self._most_bytes = models, most_bytes
        self._folder, self._gguf = config.model.path, config.model.gguf
        self._store = AdapterStore(config)
        self._base: BaseLayers | None = None
        self._loaded_parts: OrderedDict[str, Parts] = OrderedDict()

    def close(self) -> None:
        self._store.close()

    @contextmanager
    def applied(self, loras: Sequence[Lora]) -> Iterator[None]:
        """Encode with these LoRAs, at their scales, inside the context.

        Raises:
            InvalidRequest: a file does not fit.
            Overloaded: a file was evicted from the host since the edit was accepted.
        """
        with ExitStack() as hooks:
            for lora in loras:
                if lora.text and lora.scale:
                    for part, layers in self._parts(lora).items():
                        for name, factors in layers.items():
                            hook = _add_hook(self._models[part], name, factors, lora.scale)
                            hooks.callback(hook.remove)
            yield

    def _parts(self, lora: Lora) -> Parts:
        """Return factors on the encoders' device, in their dtype."""
        parts = self._loaded_parts.pop(lora.version, None)
        if parts is None:
            try:
                parts = self._read(lora)
            except BadAdapter as error:
                raise InvalidRequest(_FIELD, f"adapter {lora.name} {error}") from error
        self._loaded_parts[lora.version] = parts
        while (
            len(self._loaded_parts) > 1
            and sum(map(_nbytes, self._loaded_parts.values())) > self._most_bytes
        ):
            self._loaded_parts.popitem(last=False)
        return parts

    def _read(self, lora: Lora) -> Parts:
        file = self._store.host.find(lora.name, lora.version)
        if file is None:
            raise Overloaded(f"{_FIELD}: adapter {lora.name} was evicted; send the edit again")
        if self._base is None:
            self._base = BaseLayers.of_folder(self._folder, self._gguf)
        parts = read_lora(file.path, self._base, self._folder, only=self._models)
        placed: Parts = {}
        for part, layers in parts.items():
            target = next(self._models[part].parameters())
            placed[part] = {
                _name_in(self._models[part], name): Factors(
                    *(x.flatten(1).to(target) for x in factors)
                )
                for name, factors in layers.items()
            }
        return placed


def _name_in(model: nn.Module, name: str) -> str:
    """Return the module of a weight in the file; only some versions of transformers prefix the
    names of text models.
    """
    for candidate in (name, f"text_model.{name}", name.removeprefix("text_model.")):
        try:
            module = model.get_submodule(candidate)
        except AttributeError:
            continue
        if isinstance(module, nn.Linear):
            return candidate
    raise BadAdapter(f"changes {name}, which is not a linear layer of the text encoder")


def _add_hook(model: nn.Module, name: str, factors: Factors, scale: float) -> RemovableHandle:
    """Add scale · B(A x) to a layer's output."""
    down, up = factors

    def add(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Any:
        low = torch.nn.functional.linear(inputs[0], down)
        return out + scale * torch.nn.functional.linear(low, up)

    return model.get_submodule(name).register_forward_hook(add)


def _nbytes(parts: Parts) -> int:
    return sum(
        x.nbytes for layers in parts.values() for factors in layers.values() for x in factors
    )
