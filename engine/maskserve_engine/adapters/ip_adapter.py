"""A picture as further tokens of a prompt (IP-Adapter): the part that the encoder computes.

Each cross attention of the model reads them beside the prompt, with their own keys and values:

    attention(q, k_text, v_text) + scale * attention(q, k_picture, v_picture)

They are the same at every step, and depend on the picture and the file alone. So the encoder
computes them once per picture, and they travel with the prompt's embeddings: the engine loads no
IP-Adapter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from maskserve_common.config import Config, ConfigError
from maskserve_common.contracts.request import ResolvedIpAdapter
from maskserve_common.errors import EngineFailed, InvalidRequest
from maskserve_common.lru_cache import LruCache
from maskserve_engine.base.job import Conditioning
from maskserve_engine.spec.ip_adapters import (
    LAYER,
    PROJECTION,
    IpAdapters,
    KnownIpAdapter,
    content_of,
)
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.loader import device_of, dtype_of, module_bytes

PICTURE_KEYS = "picture_keys"
"""Name, among a prompt's arrays, of [tokens, W]: for each cross attention, in the order they run,
a token's keys, then its values."""


class IpAdapter(NamedTuple):
    """The weights of a file, on the encoder's device."""

    projection: Any
    """diffusers' module from the image encoder's output to [1, tokens, text width]."""
    layers: Tensor
    """[W, text width] all layers of keys and values, one below the other."""

    @property
    def nbytes(self) -> int:
        return int(self.layers.nbytes) + module_bytes(self.projection)

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

        self._spec, self._files = spec, IpAdapters(config, spec)
        self._device, self._dtype = device_of(config), dtype_of(config)
        folder = config.ip_adapters.encoder_folder
        try:
            model: Any = CLIPVisionModelWithProjection.from_pretrained(
                str(folder), local_files_only=True, use_safetensors=True, dtype=self._dtype
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"[ip_adapters] image_encoder: cannot load {folder}") from error
        self._model = model.to(self._device).eval().requires_grad_(False)
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
            adapter = self._load(file)
            self._loaded.put(file, adapter)
        pixels = (torch.from_numpy(picture.copy()).float() / 255 - self._mean) / self._std
        batch = pixels.permute(2, 0, 1)[None].to(self._device, self._dtype)
        if adapter.reads_hidden_states:
            embeds, away = (
                self._model(pictures, output_hidden_states=True).hidden_states[-2]
                for pictures in (batch, torch.zeros_like(batch))
            )
        else:
            embeds = self._model(batch).image_embeds
            away = torch.zeros_like(embeds)
        return _keys_of(adapter, embeds), _keys_of(adapter, away)

    def _load(self, file: KnownIpAdapter) -> IpAdapter:
        from diffusers.loaders.unet import UNet2DConditionLoadersMixin

        numbers, text = self._spec.cross_layers, int(self._spec.denoiser["cross_attention_dim"])
        total = 2 * sum(width for _, width in numbers)
        layers = torch.empty(total, text, device=self._device, dtype=self._dtype)
        try:
            with safe_open(file.path, "pt") as opened:
                names: list[str] = opened.keys()
                weights = {
                    name.removeprefix(PROJECTION): opened.get_tensor(name)
                    for name in names
                    if name.startswith(PROJECTION)
                }
                projection = (
                    UNet2DConditionLoadersMixin()._convert_ip_adapter_image_proj_to_diffusers(
                        weights, low_cpu_mem_usage=False
                    )
                )
                begin = 0
                for number, width in numbers:
                    for part in "kv":
                        weight = opened.get_tensor(LAYER.format(number, part))
                        layers[begin : begin + width].copy_(weight)
                        begin += width
        except (OSError, SafetensorError, RuntimeError, KeyError) as error:
            problem = f"IP-Adapter {file.path.name} cannot be read: {error}"
            raise InvalidRequest("SETTINGS.ip_adapter.name", problem) from error
        projection = projection.to(self._device, self._dtype).eval().requires_grad_(False)
        return IpAdapter(projection, layers)


def _keys_of(adapter: IpAdapter, embeds: Tensor) -> Conditioning:
    [tokens] = adapter.projection(embeds)
    return {PICTURE_KEYS: (tokens @ adapter.layers.T).float().cpu().numpy()}
