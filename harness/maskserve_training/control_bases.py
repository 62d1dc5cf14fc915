"""The demo models, as a ControlNet learns beside them and as diffusers' own pipelines run them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from diffusers import ControlNetModel, FluxControlNetModel
from torch import nn

from maskserve_harness.demo_model.outlines import OutlinedEdit
from maskserve_training import transformer, unet
from maskserve_training.data import encode
from maskserve_training.lora_bases import Base, FluxBase, UnetBase
from maskserve_training.vae import to_tensor

_DOUBLE, _SINGLE = 1, 2
_READER_WIDTHS: Final = (16, 32, 64)  # three: the demo VAE shrinks pictures four times


class Controlled(nn.Module):
    """A denoiser with the net's additions, in the denoiser's own form."""

    def __init__(self, base: Any, net: Any) -> None:
        super().__init__()
        self.base, self.net = base, net
        self.pictures: torch.Tensor | None = None
        """Of the batch, as the net takes them; None: the base alone."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)


class ControlledFlux(Controlled):
    """`pictures`: [B, N, 4 C] their latents."""

    def forward(self, **given: Any) -> Any:
        """As FluxTransformer2DModel's."""
        if self.pictures is None:
            return self.base(**given)
        hidden = given["hidden_states"]
        own = {**given, "hidden_states": hidden[..., : self.pictures.shape[2]]}
        doubles, singles = self.net(controlnet_cond=self.pictures, **own)
        return self.base(
            **given, controlnet_block_samples=doubles, controlnet_single_block_samples=singles
        )


class ControlledUnet(Controlled):
    """`pictures`: [B, 3, H, W] from 0 to 1."""

    def forward(
        self, sample: torch.Tensor, timestep: Any, encoder_hidden_states: Any, **given: Any
    ) -> Any:
        """As UNet2DConditionModel's; of a guided batch both halves have the same pictures."""
        if self.pictures is None:
            return self.base(sample, timestep, encoder_hidden_states, **given)
        downs, middle = self.net(
            sample[:, : self.net.config.in_channels],
            timestep,
            encoder_hidden_states,
            self.pictures.repeat(len(sample) // len(self.pictures), 1, 1, 1),
            return_dict=False,
        )
        return self.base(
            sample,
            timestep,
            encoder_hidden_states,
            down_block_additional_residuals=downs,
            mid_block_additional_residual=middle,
            **given,
        )


class ControlBase(Protocol):
    """A demo model beside which a ControlNet learns."""

    guided: bool
    """Whether steps also run with an empty prompt."""

    @property
    def base(self) -> Base:
        """The model in its pipeline."""

    def new_net(self) -> Any:
        """A net that adds nothing yet; its blocks are copies of the base's."""

    def read_net(self, folder: Path) -> Any:
        """A net that diffusers wrote."""

    def controlled(self, net: Any) -> Controlled:
        """The denoiser with the net."""

    def pictures(self, asked: list[OutlinedEdit]) -> torch.Tensor:
        """The control pictures, as `Controlled.pictures`."""

    def loss(
        self, model: Controlled, asked: list[OutlinedEdit], generator: torch.Generator
    ) -> torch.Tensor:
        """The base's own training loss, of edits of one picture size."""


class FluxControlBase:
    """The demo model; the net has one double and two single blocks."""

    guided = False

    def __init__(self) -> None:
        self.base = FluxBase()

    def new_net(self) -> FluxControlNetModel:
        """`ControlBase.new_net`."""
        base = self.base.denoiser
        config = {
            name: value
            for name, value in base.config.items()
            if name not in ("_name_or_path", "out_channels") and not name.startswith("_")
        }
        tokens = base.config.out_channels
        net = FluxControlNetModel(
            **{**config, "in_channels": tokens, "num_layers": _DOUBLE, "num_single_layers": _SINGLE}
        )
        with torch.no_grad():
            for own, theirs in (
                (net.time_text_embed, base.time_text_embed),
                (net.context_embedder, base.context_embedder),
                *zip(net.transformer_blocks, base.transformer_blocks, strict=False),
                *zip(net.single_transformer_blocks, base.single_transformer_blocks, strict=False),
            ):
                own.load_state_dict(theirs.state_dict())
            net.x_embedder.weight.copy_(base.x_embedder.weight[:, :tokens])
            net.x_embedder.bias.copy_(base.x_embedder.bias)
            # Zero here and behind the blocks would let no gradient through.
            nn.init.normal_(net.controlnet_x_embedder.weight, std=0.02)
        return net

    def read_net(self, folder: Path) -> FluxControlNetModel:
        """`ControlBase.read_net`."""
        return FluxControlNetModel.from_pretrained(folder)

    def controlled(self, net: FluxControlNetModel) -> ControlledFlux:
        """`ControlBase.controlled`."""
        return ControlledFlux(self.base.denoiser, net)

    def pictures(self, asked: list[OutlinedEdit]) -> torch.Tensor:
        """`ControlBase.pictures`."""
        pictures = to_tensor([each.control for each in asked])
        return transformer.pack(encode(self.base.pipe.vae, pictures))

    def loss(
        self, model: Controlled, asked: list[OutlinedEdit], generator: torch.Generator
    ) -> torch.Tensor:
        """`ControlBase.loss`."""
        batch = self.base.batch([each.edit for each in asked])
        active = batch.condition[..., batch.clean.shape[2] :].amax(dim=2)
        return transformer.loss_of(model, batch, active, generator)


class UnetControlBase:
    """The demo UNet; the net has its way down and its middle."""

    guided = True

    def __init__(self) -> None:
        self.base = UnetBase()

    def new_net(self) -> ControlNetModel:
        """`ControlBase.new_net`."""
        base = self.base.denoiser
        net = ControlNetModel.from_unet(
            base, conditioning_embedding_out_channels=_READER_WIDTHS, load_weights_from_unet=False
        )
        # The latents alone, as diffusers' pipelines give them: neither mask nor masked picture.
        config = {name: net.config[name] for name in net.config if not name.startswith("_")}
        net = ControlNetModel(**{**config, "in_channels": base.config.out_channels})
        with torch.no_grad():
            for own, theirs in (
                (net.time_embedding, base.time_embedding),
                (net.down_blocks, base.down_blocks),
                (net.mid_block, base.mid_block),
            ):
                own.load_state_dict(theirs.state_dict())
            net.conv_in.weight.copy_(base.conv_in.weight[:, : base.config.out_channels])
            net.conv_in.bias.copy_(base.conv_in.bias)
            # Zero here and behind the blocks would let no gradient through.
            nn.init.normal_(net.controlnet_cond_embedding.conv_out.weight, std=0.05)
        return net

    def read_net(self, folder: Path) -> ControlNetModel:
        """`ControlBase.read_net`."""
        return ControlNetModel.from_pretrained(folder)

    def controlled(self, net: ControlNetModel) -> ControlledUnet:
        """`ControlBase.controlled`."""
        return ControlledUnet(self.base.denoiser, net)

    def pictures(self, asked: list[OutlinedEdit]) -> torch.Tensor:
        """`ControlBase.pictures`."""
        return (to_tensor([each.control for each in asked]) + 1) / 2

    def loss(
        self, model: Controlled, asked: list[OutlinedEdit], generator: torch.Generator
    ) -> torch.Tensor:
        """`ControlBase.loss`."""
        batch = self.base.batch([each.edit for each in asked])
        return unet.loss_of(model, batch, self.base.pipe.scheduler, generator)


BASES: Final[dict[str, Callable[[], ControlBase]]] = {
    "flux": FluxControlBase,
    "unet": UnetControlBase,
}
