"""A picture as further tokens of a prompt (IP-Adapter): the part that the encoder computes.

Some of the model's attentions read them, with their own keys and values:

    scale * attention(q, k_picture, v_picture)

A UNet adds this to what a cross attention reads of the prompt. FLUX.1 adds it to the image tokens
that leave a double block, with queries that have no position.

They are the same at every step, and depend on the picture and the file alone. So the encoder
computes them once per picture, and they travel with the prompt's embeddings: the engine loads no
IP-Adapter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from maskserve_common.config import Config, ConfigError
from maskserve_common.contracts.request import ResolvedIpAdapter
from maskserve_common.errors import EngineFailed, InvalidRequest
from maskserve_common.lru_cache import LruCache
from maskserve_engine.base.job import Conditioning
from maskserve_engine.batch.picture_tokens import PICTURE_KEYS
from maskserve_engine.spec.ip_adapters import (
    LAYOUTS,
    IpAdapters,
    KnownIpAdapter,
    content_of,
)
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.loader import device_of, dtype_of, module_bytes


class IpAdapter(NamedTuple):
    """The weights of a file, on the encoder's device."""

    projection: Any
    """diffusers' module from the image encoder's output to [1, tokens, text width]."""
    layers: Tensor
    """[W, text width] all layers of keys and values, one below the other."""
    biases: Tensor | None
    """[W] their biases; None: they have none."""

    @property
    def nbytes(self) -> int:
        biases = 0 if self.biases is None else int(self.biases.nbytes)
        return int(self.layers.nbytes) + biases + module_bytes(self.projection)

    @property
    def reads_hidden_states(self) -> bool:
        """Whether it reads the image encoder's last hidden states but one: the form `plus`."""
        from diffusers.models.embeddings import ImageProjection

        return not isinstance(self.projection, ImageProjection)


class IpAdapterEncoder:
    """The image encoder, and the IP-Adapters that were used last.

    Raises:
        ConfigError: the image encoder cannot be loaded.
    """

    def __init__(self, config: Config, spec: ModelSpec) -> None:
        from transformers import CLIPVisionModelWithProjection
        from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

        assert spec.ip_adapters is not None, "the model takes none"
        self._takes, self._files = spec.ip_adapters, IpAdapters(config, spec)
        self._device, self._dtype = device_of(config), dtype_of(config)
        folder = config.ip_adapters.encoder_folder
        try:
            model: Any = CLIPVisionModelWithProjection.from_pretrained(
                str(folder), local_files_only=True, use_safetensors=True, dtype=self._dtype
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"[ip_adapters] image_encoder: cannot load {folder}") from error
        self.model = model.to(self._device).eval().requires_grad_(False)
        self._mean, self._std = torch.tensor(OPENAI_CLIP_MEAN), torch.tensor(OPENAI_CLIP_STD)
        self._loaded: LruCache[KnownIpAdapter, IpAdapter] = LruCache(
            config.ip_adapters.device_bytes, lambda adapter: adapter.nbytes
        )

    def find(self, adapter: ResolvedIpAdapter) -> KnownIpAdapter:
        """Return an edit's file.

        Raises:
            AdapterNotFound, InvalidRequest: as `IpAdapters.find`.
            EngineFailed: the worker has another file of this name than this stage service.
        """
        file = self._files.find(adapter.name)
        if adapter.content and adapter.content != content_of(file.path):
            raise EngineFailed(f"the stage service has another IP-Adapter {adapter.name}")
        return file

    @torch.inference_mode()
    def encode(
        self, file: KnownIpAdapter, picture: NDArray[np.uint8]
    ) -> tuple[Conditioning, Conditioning]:
        """Return the arrays that a picture adds to a prompt, and to the negative prompt.

        Args:
            file: the IP-Adapter.
            picture: RGB [side, side, 3].

        Raises:
            InvalidRequest: the file cannot be read.
        """
        adapter = self._loaded.get(file)
        if adapter is None:
            adapter = self.load(file)
            self._loaded.put(file, adapter)
        batch = self._batch_of(picture)
        if self._takes.layout == "xlabs":  # its pipelines lead away from a black picture
            black = self._batch_of(np.zeros_like(picture))
            embeds, away = (self.model(pictures).image_embeds for pictures in (batch, black))
        elif adapter.reads_hidden_states:
            embeds, away = (
                self.model(pictures, output_hidden_states=True).hidden_states[-2]
                for pictures in (batch, torch.zeros_like(batch))
            )
        else:
            embeds = self.model(batch).image_embeds
            away = torch.zeros_like(embeds)
        return _keys_of(adapter, embeds), _keys_of(adapter, away)

    def _batch_of(self, picture: NDArray[np.uint8]) -> Tensor:
        """Return the image encoder's input, [1, 3, side, side]."""
        pixels = (torch.from_numpy(picture.copy()).float() / 255 - self._mean) / self._std
        return pixels.permute(2, 0, 1)[None].to(self._device, self._dtype)

    def load(self, file: KnownIpAdapter) -> IpAdapter:
        """Load an IP-Adapter to the device.

        Raises:
            InvalidRequest: the file cannot be read.
        """
        takes, begin = self._takes, 0
        layout = LAYOUTS[takes.layout]
        layers = torch.empty(
            2 * sum(takes.widths), takes.text, device=self._device, dtype=self._dtype
        )
        biases = layers.new_empty(len(layers)) if layout.biased else None
        try:
            with safe_open(file.path, "pt") as opened:
                names: list[str] = opened.keys()
                weights = {
                    name.removeprefix(layout.projection): opened.get_tensor(name)
                    for name in names
                    if name.startswith(layout.projection)
                }
                projection = _projection(weights, takes.text)
                for number, width in takes.layers:
                    for part in "kv":
                        weight, bias = layout.names(number, part)
                        layers[begin : begin + width].copy_(opened.get_tensor(weight))
                        if biases is not None:
                            biases[begin : begin + width].copy_(opened.get_tensor(bias))
                        begin += width
        except (OSError, SafetensorError, RuntimeError, KeyError) as error:
            problem = f"IP-Adapter {file.path.name} cannot be read: {error}"
            raise InvalidRequest("SETTINGS.ip_adapter.name", problem) from error
        projection = projection.to(self._device, self._dtype).eval().requires_grad_(False)
        return IpAdapter(projection, layers, biases)


def _projection(weights: dict[str, Tensor], text: int) -> Any:
    """Return diffusers' module of a file's projection to tokens of width `text`."""
    from diffusers.loaders.unet import UNet2DConditionLoadersMixin
    from diffusers.models.embeddings import ImageProjection

    plain = weights.get("proj.weight")
    if plain is None:
        loader = UNet2DConditionLoadersMixin()
        return loader._convert_ip_adapter_image_proj_to_diffusers(weights, low_cpu_mem_usage=False)
    projection = ImageProjection(plain.shape[1], text, len(plain) // text)
    projection.load_state_dict(
        {name.replace("proj", "image_embeds"): weight for name, weight in weights.items()}
    )
    return projection


def _keys_of(adapter: IpAdapter, embeds: Tensor) -> Conditioning:
    [tokens] = adapter.projection(embeds)
    keys = F.linear(tokens, adapter.layers, adapter.biases)
    return {PICTURE_KEYS: keys.float().cpu().numpy()}
