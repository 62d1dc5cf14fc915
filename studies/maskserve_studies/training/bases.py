"""The demo models in diffusers' own pipelines, for the training of LoRAs and ControlNets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, Final

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    FluxControlNetModel,
    FluxFillPipeline,
    StableDiffusionInpaintPipeline,
)
from diffusers.models.attention_processor import AttnProcessor
from torch import nn

from maskserve_benchmarks.checkout import DEMO_MODEL, DEMO_UNET
from maskserve_benchmarks.demo_model.prompts import MAX_SEQUENCE_LENGTH
from maskserve_benchmarks.demo_model.scenes import Edit, Picture
from maskserve_studies.demo_model.evaluation import run_edits
from maskserve_studies.training import transformer, unet
from maskserve_studies.training.attention import MatmulAttention
from maskserve_studies.training.data import encode
from maskserve_studies.training.export import STEPS
from maskserve_studies.training.loop import Step, Training
from maskserve_studies.training.unet_command import GUIDANCE
from maskserve_studies.training.vae import to_tensor

_DOUBLE, _SINGLE = 1, 2
_READER_WIDTHS: Final = (16, 32, 64)  # three: the demo VAE shrinks pictures four times
_SIZES: Final = ((128, 128), (128, 128), (96, 160), (160, 96))
"""(height, width) of the pictures that training draws."""


class Controlled(nn.Module):
    """A denoiser with a ControlNet. It is called like the denoiser."""

    def __init__(self, base: Any, net: Any) -> None:
        super().__init__()
        self.base, self.net = base, net
        self.pictures: torch.Tensor
        """Control pictures of the batch, in the form that the net takes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)


class ControlledFlux(Controlled):
    """A FLUX denoiser with a ControlNet. `pictures` are latents [B, N, 4 C]."""

    def forward(self, **inputs: Any) -> Any:
        """Run the net and the base with FluxTransformer2DModel's arguments."""
        hidden_states = inputs["hidden_states"]
        net_inputs = {**inputs, "hidden_states": hidden_states[..., : self.pictures.shape[2]]}
        doubles, singles = self.net(controlnet_cond=self.pictures, **net_inputs)
        return self.base(
            **inputs, controlnet_block_samples=doubles, controlnet_single_block_samples=singles
        )


class ControlledUnet(Controlled):
    """A UNet with a ControlNet. `pictures` are [B, 3, H, W] from 0 to 1."""

    def forward(
        self, sample: torch.Tensor, timestep: Any, encoder_hidden_states: Any, **inputs: Any
    ) -> Any:
        """Run the net and the base with UNet2DConditionModel's arguments. Both halves of a guided
        batch have the same pictures.
        """
        shared = sample, timestep, encoder_hidden_states
        downs, middle = self.net(
            sample[:, : self.net.config.in_channels],
            *shared[1:],
            self.pictures.repeat(len(sample) // len(self.pictures), 1, 1, 1),
            return_dict=False,
        )
        added = {
            "down_block_additional_residuals": downs,
            "mid_block_additional_residual": middle,
        }
        return self.base(*shared, **added, **inputs)


class Base:
    """A demo model in its diffusers pipeline."""

    part: ClassVar[str]
    """The denoiser's name in the pipeline."""
    net_class: ClassVar[Any]
    """The ControlNets' class."""
    controlled: ClassVar[type[Controlled]]
    """The class of the denoiser with a ControlNet."""
    targets: ClassVar[str]
    """Names of the layers in which a LoRA learns, as a regular expression."""
    guided: ClassVar[dict[str, float]] = {}
    """The pipeline's arguments for guidance. Empty: no step runs with an empty prompt."""
    attention: ClassVar[type] = MatmulAttention
    """An attention processor with a fast backward pass on CPUs."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.denoiser = getattr(pipe, self.part)
        self._texts = cache(torch.no_grad()(self._encode))

    def ready_to_learn(self) -> None:
        """Freeze the denoiser, so that only later additions learn."""
        self.denoiser.requires_grad_(False)
        self.denoiser.set_attn_processor(self.attention())

    def loss(self, model: Any, samples: list[Edit], generator: torch.Generator) -> torch.Tensor:
        """The base model's own training loss for edits of one picture size. `model` has the
        denoiser's form.
        """
        raise NotImplementedError

    def edit(self, edits: list[Edit]) -> list[Picture]:
        """Run the edits with diffusers' own pipeline."""
        return run_edits(self.pipe, edits, STEPS, 8, **self.guided)

    def new_net(self) -> Any:
        """A ControlNet that adds nothing yet; its blocks are copies of the base's."""
        raise NotImplementedError

    def controls(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """Control pictures in the form of `Controlled.pictures`."""
        raise NotImplementedError

    def _encode(self, prompt: str) -> Any:
        raise NotImplementedError


class FluxBase(Base):
    """The demo model. Its ControlNet has one double and two single blocks."""

    part, net_class, controlled = "transformer", FluxControlNetModel, ControlledFlux
    targets = (
        r".*transformer_blocks\.\d+\.(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
        r"|ff(_context)?\.net\.(0\.proj|2)|proj_mlp|proj_out)"
    )

    def __init__(self) -> None:
        super().__init__(FluxFillPipeline.from_pretrained(DEMO_MODEL))

    def loss(self, model: Any, samples: list[Edit], generator: torch.Generator) -> torch.Tensor:
        """`Base.loss`."""
        with torch.no_grad():
            batch = self._batch(samples)
        active = batch.condition[..., batch.clean.shape[2] :].amax(dim=2)
        return transformer.loss_of(model, batch, active, generator)

    def _batch(self, samples: list[Edit]) -> transformer.Batch:
        vae, factor = self.pipe.vae, self.pipe.vae_scale_factor
        clean, masked_source, mask = (
            transformer.pack(x) if x.ndim == 4 else transformer.pack_mask(x, factor)
            for x in _latents(vae, samples)
        )
        texts = [self._texts(sample.prompt) for sample in samples]
        height, width = samples[0].mask.shape
        rows, columns = height // factor // 2, width // factor // 2
        ids = torch.zeros(rows, columns, 3)
        ids[..., 1], ids[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)[None]
        none = torch.full((len(samples), 2), -1)
        return transformer.HintedBatch(
            clean=clean,
            condition=torch.cat([masked_source, mask], dim=2),
            prompt=torch.stack([states for states, _ in texts]),
            pooled=torch.stack([pooled for _, pooled in texts]),
            ids=ids.view(-1, 3),
            answer_object=none,
            token_objects=none[:, None].expand(-1, rows * columns, -1),
        )

    def _encode(self, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
        """T5 states (T, width) and pooled output (width,)."""
        states, pooled, _ = self.pipe.encode_prompt(
            prompt=prompt, prompt_2=None, max_sequence_length=MAX_SEQUENCE_LENGTH
        )
        return states[0], pooled[0]

    def new_net(self) -> FluxControlNetModel:
        """`Base.new_net`."""
        base = self.denoiser
        config = {
            name: value
            for name, value in base.config.items()
            if name not in ("_name_or_path", "out_channels") and not name.startswith("_")
        }
        tokens = base.config.out_channels
        net = FluxControlNetModel(
            **{**config, "in_channels": tokens, "num_layers": _DOUBLE, "num_single_layers": _SINGLE}
        )
        parts = (
            (net.time_text_embed, base.time_text_embed),
            (net.context_embedder, base.context_embedder),
            *zip(net.transformer_blocks, base.transformer_blocks, strict=False),
            *zip(net.single_transformer_blocks, base.single_transformer_blocks, strict=False),
        )
        _copy(parts, net.x_embedder, base.x_embedder, tokens)
        # Zeros both here and behind the blocks would stop all gradients.
        nn.init.normal_(net.controlnet_x_embedder.weight, std=0.02)
        return net

    def controls(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """`Base.controls`."""
        return transformer.pack(encode(self.pipe.vae, to_tensor(list(pictures))))


class UnetBase(Base):
    """The demo UNet. LoRAs also learn in the convolutions of resnets. Its ControlNet has the UNet's
    way down and its middle.
    """

    part, net_class, controlled = "unet", ControlNetModel, ControlledUnet
    targets = r".*(attn[12]\.(to_[qkv]|to_out\.0)|ff\.net\.(0\.proj|2)|resnets\.\d+\.conv[12])"
    guided = {"guidance_scale": GUIDANCE}  # noqa: RUF012
    attention = AttnProcessor

    def __init__(self) -> None:
        folder = DEMO_UNET
        super().__init__(
            StableDiffusionInpaintPipeline.from_pretrained(folder, safety_checker=None)
        )

    def loss(self, model: Any, samples: list[Edit], generator: torch.Generator) -> torch.Tensor:
        """`Base.loss`."""
        with torch.no_grad():
            clean, masked_source, mask = _latents(self.pipe.vae, samples)
            step = self.pipe.vae_scale_factor
            prompt = torch.stack([self._texts(sample.prompt) for sample in samples])
            batch = unet.Batch(clean, masked_source, mask[:, None, ::step, ::step], prompt)
        return unet.loss_of(model, batch, self.pipe.scheduler, generator)

    def _encode(self, prompt: str) -> torch.Tensor:
        """CLIP's states (T, width)."""
        return self.pipe.encode_prompt(prompt, "cpu", 1, do_classifier_free_guidance=False)[0][0]

    def new_net(self) -> ControlNetModel:
        """`Base.new_net`."""
        base = self.denoiser
        net = ControlNetModel.from_unet(
            base, conditioning_embedding_out_channels=_READER_WIDTHS, load_weights_from_unet=False
        )
        # Only the latents, as in diffusers' pipelines, without mask and masked picture.
        config = {name: net.config[name] for name in net.config if not name.startswith("_")}
        net = ControlNetModel(**{**config, "in_channels": base.config.out_channels})
        parts = (
            (net.time_embedding, base.time_embedding),
            (net.down_blocks, base.down_blocks),
            (net.mid_block, base.mid_block),
        )
        _copy(parts, net.conv_in, base.conv_in, base.config.out_channels)
        # Zeros both here and behind the blocks would stop all gradients.
        nn.init.normal_(net.controlnet_cond_embedding.conv_out.weight, std=0.05)
        return net

    def controls(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """`Base.controls`."""
        return (to_tensor(list(pictures)) + 1) / 2


BASES: Final[dict[str, Callable[[], Base]]] = {"flux": FluxBase, "unet": UnetBase}


def learn(
    name: str,
    module: nn.Module,
    loss_of: Callable[[np.random.Generator, tuple[int, int], torch.Generator], torch.Tensor],
    save: Callable[[], None],
    *,
    seed: int,
    seconds: float,
    rate: float,
) -> None:
    """Train an adapter, and save it on the way and at the end.

    Args:
        name: the adapter's name in the output.
        module: the module; its parameters that need gradients are the adapter.
        loss_of: draws a batch of pictures of this size (height, width) and returns its loss.
        save: writes the adapter.
        seed: of the random draws.
        seconds: CPU time of this process.
        rate: peak learning rate.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)

    def take(step: int, progress: float) -> Step:
        loss = loss_of(rng, _SIZES[int(rng.integers(len(_SIZES)))], generator)
        return Step(loss, value=loss.item())

    parameters = [p for p in module.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    Training(name, module, [optimiser], seconds, rate, decay=0.5, save=save).run(take)


@torch.no_grad()
def _copy(parts: Sequence[tuple[Any, Any]], first: Any, base_layer: Any, channels: int) -> None:
    """Copy the base's weights to a net. Its first layer gets the weights of the first `channels`
    inputs.
    """
    for part, base_part in parts:
        part.load_state_dict(base_part.state_dict())
    first.weight.copy_(base_layer.weight[:, :channels])
    first.bias.copy_(base_layer.bias)


def _latents(
    vae: AutoencoderKL, samples: list[Edit]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The answers' and masked sources' normalised latents (B, C, h, w), and masks (B, H, W)."""
    mask = torch.from_numpy(np.stack([sample.mask for sample in samples]).astype(np.float32))
    hidden = to_tensor([sample.source for sample in samples]) * (1 - mask[:, None])
    answers = to_tensor([sample.target for sample in samples])
    return encode(vae, answers), encode(vae, hidden), mask
