"""diffusers' own pipelines with the arguments of our edits. Only the functions that run a pipeline
import torch, because not every process that collects tests needs it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray
from PIL import Image

from maskserve_common.contracts.request import steps_run
from maskserve_common.contracts.settings import EditSettings

if TYPE_CHECKING:
    import torch

    from tests.fakes.jobs import Case


def diffusers_edit(
    pipeline: Any,
    pixels: NDArray[np.uint8],
    mask: NDArray[np.uint8],
    prompt: str,
    settings: EditSettings,
    seed: int,
    **options: Any,
) -> Any:
    """`images` of an inpainting pipeline, at the picture's own size.

    `asked` holds further arguments of the pipeline, such as `output_type`.
    """
    import torch

    height, width = mask.shape
    return pipeline(
        prompt=prompt,
        image=Image.fromarray(pixels),
        mask_image=Image.fromarray(mask),
        height=height,
        width=width,
        num_inference_steps=settings.num_inference_steps,
        guidance_scale=settings.guidance_scale,
        strength=settings.strength,
        generator=torch.Generator("cpu").manual_seed(seed),
        **_negative(pipeline, settings),
        **options,
    ).images


def _negative(pipeline: Any, settings: EditSettings) -> dict[str, Any]:
    if settings.negative_prompt is None:
        return {}
    # SDXL treats a missing negative prompt unlike an empty one; our server treats them alike.
    zeros = pipeline.config.get("force_zeros_for_empty_prompt", False)
    text = (settings.negative_prompt or None) if zeros else settings.negative_prompt
    more = {"true_cfg_scale": settings.true_cfg_scale} if settings.true_cfg_scale else {}
    return {"negative_prompt": text, **more}


def whole_picture(pipeline: Any, case: Case, **options: Any) -> Any:
    """`images` of a pipeline without a mask: of the source, or of the prompt alone. Of `options`
    and of the edit's settings a pipeline gets those that it takes.
    """
    import torch

    settings, (height, width) = case.settings, case.mask.shape
    values: dict[str, Any] = {
        "height": height,
        "width": width,
        "num_inference_steps": settings.num_inference_steps,
        "guidance_scale": settings.guidance_scale,
        "strength": settings.strength,
        "generator": torch.Generator("cpu").manual_seed(case.seed),
        "output_type": "latent",
        **_negative(pipeline, settings),
        **options,
    }
    if case.kind == "edit":
        values["image"] = _images(case.pixels, case.references)
    parameters = inspect.signature(pipeline.__call__).parameters
    arguments = {
        name: value for name, value in values.items() if name in parameters and value is not None
    }
    return pipeline(prompt=case.prompt, **arguments).images


def _images(pixels: NDArray[np.uint8], references: Sequence[NDArray[np.uint8]]) -> Any:
    """The pictures as a pipeline takes them: one, or a list."""
    images = [Image.fromarray(picture) for picture in (pixels, *references)]
    return images if references else images[0]


def blended_edit(
    pipeline: Any,
    pixels: NDArray[np.uint8],
    mask: NDArray[np.uint8],
    prompt: str,
    settings: EditSettings,
    seed: int,
    references: Sequence[NDArray[np.uint8]] = (),
    **options: Any,
) -> Any:
    """`images` of Flux2KleinKVPipeline or Flux2Pipeline, which have no mask. They are blended after
    each step, as in Flux2KleinInpaintPipeline.
    """
    import torch
    import torch.nn.functional as F
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    pipeline.image_processor.check_image_input = lambda image: None  # it refuses 32-pixel pictures
    source, (height, width) = Image.fromarray(pixels), mask.shape
    image_tensor = pipeline.image_processor.preprocess(source, height=height, width=width)
    with torch.no_grad():
        clean = pipeline._encode_vae_image(image_tensor, torch.Generator())
    noise = torch.randn(clean.shape, generator=torch.Generator("cpu").manual_seed(seed))
    steps, size = settings.num_inference_steps, clean.shape[-2:]
    assert steps is not None
    begin = steps - steps_run(steps, settings.strength)
    sigmas = np.linspace(1.0, 1 / steps, steps)[begin:].tolist()
    scheduler, tokens = pipeline.scheduler, size[0] * size[1]
    scheduler.set_timesteps(sigmas=sigmas, mu=compute_empirical_mu(tokens, steps))
    start = scheduler.scale_noise(clean, scheduler.timesteps[:1], noise)
    edit = torch.from_numpy(mask > 127).float()[None, None]
    edit = F.interpolate(edit, size=size, mode="bilinear")
    clean, noise, edit = map(pipeline._pack_latents, (clean, noise, edit))

    def blend(_: Any, step: int, __: Any, now: dict[str, Any]) -> dict[str, Any]:
        outside, later = clean, scheduler.timesteps[step + 1 : step + 2]
        if len(later):
            outside = scheduler.scale_noise(clean, later, noise)
        return {"latents": (1 - edit) * outside + edit * now["latents"]}

    return pipeline(
        prompt=prompt,
        image=_images(pixels, references),
        latents=start,
        sigmas=sigmas,
        num_inference_steps=steps,
        callback_on_step_end=blend,
        **options,
    ).images


@contextmanager
def _blended_steps(
    sampler: Any, clean: torch.Tensor, noise: torch.Tensor, mask: torch.Tensor
) -> Iterator[None]:
    """Let each step of a sampler end in the noised source where the mask, 1 = edit, is 0."""
    real = sampler.step

    def blended(*inputs: Any, **more: Any) -> Any:
        [moved] = real(*inputs, **more)
        sigma = sampler.sigmas[sampler.step_index]
        return ((1 - mask) * (sigma * noise + (1 - sigma) * clean) + mask * moved,)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampler, "step", blended)
        yield


def flux3_edit(pipeline: Any, edit: Case) -> NDArray[np.float32]:
    """[C, h, w] latents of a FLUX.3 pipeline, which has no mask. Its sampler's steps are blended as
    in Flux2KleinInpaintPipeline.
    """
    import torch
    import torch.nn.functional as F
    from diffusers import ClassifierFreeGuidance

    settings, steps = edit.settings, edit.settings.num_inference_steps
    assert steps is not None
    source = Image.fromarray(edit.pixels)
    encoded = pipeline.blocks.sub_blocks["vae_encoder"].init_pipeline()
    encoded.update_components(vae=pipeline.vae)
    [clean] = encoded(image=source, output="image_cond_latents")
    noise = torch.randn(clean.shape, generator=torch.Generator("cpu").manual_seed(edit.seed))
    mask = torch.from_numpy(edit.mask > 127).float()[None, None]
    mask = F.interpolate(mask, size=clean.shape[-2:], mode="bilinear")
    sampler, begin = pipeline.scheduler, steps - steps_run(steps, settings.strength)
    sigmas = np.linspace(1.0, 1 / steps, steps)[begin:]
    sampler.set_timesteps(sigmas=sigmas)
    start = sampler.sigmas[0] * noise + (1 - sampler.sigmas[0]) * clean
    clean, noise, mask = (x.flatten(2).transpose(1, 2) for x in (clean, noise, mask))
    more: dict[str, Any] = {}
    if "guider" in pipeline.components:
        guider = ClassifierFreeGuidance(guidance_scale=settings.guidance_scale or 1.0)
        pipeline.update_components(guider=guider)
        more["negative_prompt"] = settings.negative_prompt
    with _blended_steps(sampler, clean, noise, mask):
        latents = pipeline(
            prompt=edit.prompt,
            image=_images(edit.pixels, edit.references),
            latents=start,
            sigmas=sigmas,
            num_inference_steps=len(sigmas),
            max_sequence_length=160,
            output="latents",
            **more,
        )
    picture: NDArray[np.float32] = F.pixel_shuffle(latents, 2)[0].float().numpy()
    return picture


def flux3_whole_picture(pipeline: Any, case: Case) -> NDArray[np.float32]:
    """[C, h, w] latents of a FLUX.3 pipeline, of the source or of the prompt alone."""
    import torch
    import torch.nn.functional as F
    from diffusers import ClassifierFreeGuidance

    settings, (height, width) = case.settings, case.mask.shape
    more: dict[str, Any] = {}
    if "guider" in pipeline.components:
        guider = ClassifierFreeGuidance(guidance_scale=settings.guidance_scale or 1.0)
        pipeline.update_components(guider=guider)
        more["negative_prompt"] = settings.negative_prompt
    if case.kind == "edit":
        more["image"] = _images(case.pixels, case.references)
    latents = pipeline(
        prompt=case.prompt,
        height=height,
        width=width,
        num_inference_steps=settings.num_inference_steps,
        generator=torch.Generator("cpu").manual_seed(case.seed),
        max_sequence_length=160,
        output="latents",
        **more,
    )
    picture: NDArray[np.float32] = F.pixel_shuffle(latents, 2)[0].float().numpy()
    return picture


def longcat_pipeline(folder: Path) -> Any:
    """The pipeline of a LongCat-Image folder. Diffusers has none of it that loads LoRAs."""
    from diffusers import LongCatImageEditPipeline, LongCatImagePipeline
    from diffusers.loaders.lora_pipeline import QwenImageLoraLoaderMixin
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen2VLProcessor

    from maskserve_engine.families.qwen_image.encode import picture_processor
    from maskserve_engine.spec.model_index import read_model_index

    is_edit = read_model_index(folder)["_class_name"] == "LongCatImageEditPipeline"
    base: Any = LongCatImageEditPipeline if is_edit else LongCatImagePipeline
    methods = {"__module__": base.__module__}
    with_loras: Any = type(base.__name__, (base, QwenImageLoraLoaderMixin), methods)
    processor = picture_processor(
        Qwen2VLProcessor,
        Qwen2VLImageProcessorPil.from_pretrained(folder / "text_processor"),
        AutoTokenizer.from_pretrained(folder / "tokenizer"),
    )
    pipeline: Any = with_loras.from_pretrained(folder, text_processor=processor)
    return pipeline


def longcat_edit(pipeline: Any, case: Case) -> Any:
    """Tokens of a LongCat-Image pipeline, which has neither mask nor strength. It begins with the
    noised source, and its sampler's steps are blended, as in FluxInpaintPipeline.
    """
    import torch
    import torch.nn.functional as F

    settings, steps, vae = case.settings, case.settings.num_inference_steps, pipeline.vae
    assert steps is not None
    module = importlib.import_module(type(pipeline).__module__)
    generator = torch.Generator("cpu").manual_seed(case.seed)
    edits = hasattr(pipeline, "image_processor_vl")
    image_tensor = pipeline.image_processor.preprocess(Image.fromarray(case.pixels))
    with torch.no_grad():
        posterior = vae.encode(image_tensor).latent_dist
    clean = posterior.mode() if edits else posterior.sample(generator)
    clean = (clean - vae.config.shift_factor) * vae.config.scaling_factor
    noise = torch.randn(clean.shape, generator=generator)
    mask = torch.from_numpy(case.mask > 127).float()[None, None]
    mask = F.interpolate(mask, size=clean.shape[-2:]).expand_as(clean)
    clean, noise, mask = (
        pipeline._pack_latents(x.contiguous(), *x.shape) for x in (clean, noise, mask)
    )
    sigmas = np.linspace(1.0, 1 / steps, steps)[steps - steps_run(steps, settings.strength) :]
    sampler = pipeline.scheduler
    sampler.set_timesteps(sigmas=sigmas, mu=module.calculate_shift(clean.shape[1]))
    start = sampler.sigmas[0] * noise + (1 - sampler.sigmas[0]) * clean
    options: dict[str, Any] = {"latents": start, "sigmas": sigmas, "enable_prompt_rewrite": False}
    case = replace(case, settings=structs.replace(settings, num_inference_steps=len(sigmas)))
    with _blended_steps(sampler, clean, noise, mask):
        if edits:
            return qwen_whole_picture(pipeline, replace(case, kind="edit"), **options)
        return whole_picture(pipeline, replace(case, kind="generate"), **options)


def joyimage_pipeline(folder: Path) -> Any:
    """The pipeline of a JoyImage-Edit folder, which reads pictures of any size, and of their
    posterior the mode; published it draws from it, and not by its generator.
    """
    from diffusers import JoyImageEditPipeline
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLProcessor

    from maskserve_engine.families.qwen_image.encode import picture_processor

    processor = picture_processor(
        Qwen3VLProcessor,
        Qwen2VLImageProcessorPil.from_pretrained(folder / "processor"),
        AutoTokenizer.from_pretrained(folder / "tokenizer"),
    )
    pipeline: Any = JoyImageEditPipeline.from_pretrained(folder, processor=processor)
    encode = pipeline.vae.encode

    def encode_to_mode(images: torch.Tensor) -> Any:
        posterior = encode(images).latent_dist
        return SimpleNamespace(latent_dist=SimpleNamespace(sample=posterior.mode))

    pipeline.vae.encode = encode_to_mode
    pipeline.vae_image_processor.get_default_height_width = lambda image, *size: size
    return pipeline


def joyimage_edit(pipeline: Any, case: Case) -> Any:
    """[C, h, w] latents of a JoyImage-Edit pipeline, which has neither mask nor strength. With a
    mask it begins with the noised source, and its sampler's steps are blended, as in
    QwenImageEditInpaintPipeline.
    """
    import torch
    import torch.nn.functional as F

    settings, steps, sampler = case.settings, case.settings.num_inference_steps, pipeline.scheduler
    assert steps is not None
    generator = torch.Generator("cpu").manual_seed(case.seed)

    def edited(**options: Any) -> Any:
        [latents] = pipeline(
            image=Image.fromarray(case.pixels),
            prompt=case.prompt,
            height=case.mask.shape[0],
            width=case.mask.shape[1],
            num_inference_steps=steps,
            guidance_scale=settings.guidance_scale,
            negative_prompt=settings.negative_prompt,
            generator=generator,
            output_type="latent",
            **options,
        ).images
        return latents.numpy()

    if case.kind == "edit":
        return edited()
    pixels = torch.from_numpy(case.pixels).permute(2, 0, 1)[None, :, None] / 127.5 - 1.0
    with torch.no_grad():
        mode = pipeline.vae.encode(pixels).latent_dist.sample()
    clean = pipeline.normalize_latents(mode)[:, None]
    noise = torch.randn(clean.shape, generator=generator)
    mask = torch.from_numpy(case.mask > 127).float()[None, None]
    mask = F.interpolate(mask, size=clean.shape[-2:])[:, :, None, None]
    begin = steps - steps_run(steps, settings.strength)
    sampler.set_timesteps(steps)
    start = sampler.sigmas[begin] * noise + (1 - sampler.sigmas[begin]) * clean

    def timesteps_of(*inputs: Any) -> Any:
        sampler.set_timesteps(steps)
        sampler.set_begin_index(begin)
        return sampler.timesteps[begin:], steps - begin

    module = importlib.import_module(type(pipeline).__module__)
    with pytest.MonkeyPatch.context() as patched, _blended_steps(sampler, clean, noise, mask):
        patched.setattr(module, "retrieve_timesteps", timesteps_of)
        return edited(latents=start)


def qwen_edit_pipeline(folder: Path) -> Any:
    """The inpainting pipeline of a Qwen-Image-Edit folder, or the pipeline without a mask of a
    -2509, -2511 or 2.1 folder. It is put together here because diffusers' processor needs
    torchvision.
    """
    from diffusers import DiffusionPipeline, QwenImageEditInpaintPipeline
    from transformers import (
        AutoTokenizer,
        Qwen2VLImageProcessorPil,
        Qwen2VLProcessor,
        Qwen3VLProcessor,
    )

    from maskserve_engine.families.qwen_image.encode import picture_processor

    is_dir = (folder / "tokenizer").is_dir()
    processor = picture_processor(
        Qwen2VLProcessor if is_dir else Qwen3VLProcessor,
        Qwen2VLImageProcessorPil.from_pretrained(folder / "processor"),
        AutoTokenizer.from_pretrained(folder / ("tokenizer" if is_dir else "processor")),
    )
    pipeline: Any = DiffusionPipeline.from_pretrained(folder, processor=processor)
    if type(pipeline).__name__ == "QwenImageEditPipeline":
        pipeline = QwenImageEditInpaintPipeline(**pipeline.components)
    return pipeline


@contextmanager
def _own_area(
    module: Any, pixels: NDArray[np.uint8], references: Sequence[NDArray[np.uint8]] = ()
) -> Iterator[pytest.MonkeyPatch]:
    """Let the area of 1024x1024 of a Qwen pipeline's module be that of the pictures, each of its
    own ratio.
    """
    real = module.calculate_dimensions
    own_sizes = [picture.shape[1::-1] for picture in (pixels, *references)]

    def dimensions(area: int, ratio: float) -> Any:
        sizes = real(area, ratio)
        size = min(own_sizes, key=lambda size: abs(size[0] / size[1] - ratio))
        return (*size, *sizes[2:]) if area == 1024**2 else sizes

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "calculate_dimensions", dimensions)
        yield patched


def qwen_whole_picture(pipeline: Any, case: Case, **options: Any) -> Any:
    """`whole_picture` of such a pipeline, at the picture's own size."""
    module = importlib.import_module(type(pipeline).__module__)
    with _own_area(module, case.mask[..., None], case.references):
        return whole_picture(pipeline, case, **options)


def qwen_edit(
    pipeline: Any,
    pixels: NDArray[np.uint8],
    mask: NDArray[np.uint8],
    prompt: str,
    settings: EditSettings,
    seed: int,
    references: Sequence[NDArray[np.uint8]] = (),
    **options: Any,
) -> Any:
    """`images` of such a pipeline. Its area of 1024x1024 is the picture's own area here."""
    module = importlib.import_module(type(pipeline).__module__)
    args = pixels, mask, prompt, settings, seed
    with _own_area(module, pixels, references) as patched:
        if hasattr(pipeline, "mask_processor"):
            return diffusers_edit(pipeline, *args, **options)
        start, blend, walk = _blended_start(pipeline, module, *args)
        patched.setattr(module, "retrieve_timesteps", walk)
        if settings.negative_prompt is not None:
            options["negative_prompt"] = settings.negative_prompt
            options["true_cfg_scale"] = settings.true_cfg_scale
        return pipeline(
            prompt=prompt,
            image=_images(pixels, references),
            height=mask.shape[0],
            width=mask.shape[1],
            latents=start,
            num_inference_steps=settings.num_inference_steps,
            callback_on_step_end=blend,
            **options,
        ).images


def _blended_start(
    pipeline: Any,
    module: Any,
    pixels: NDArray[np.uint8],
    mask: NDArray[np.uint8],
    prompt: str,
    settings: EditSettings,
    seed: int,
) -> tuple[torch.Tensor, Callable[..., Any], Callable[..., Any]]:
    """Start, blending and sampler steps for QwenImageEditPlusPipeline or QwenImage21Pipeline, by
    QwenImageEditInpaintPipeline's rule. Returns the first latents, the callback after each step,
    and a replacement for `retrieve_timesteps`.
    """
    import torch
    import torch.nn.functional as F

    steps, (height, width), sampler = settings.num_inference_steps, mask.shape, pipeline.scheduler
    assert steps is not None
    source = Image.fromarray(pixels)
    if pipeline.vae.config.get("in_channels") == 4:
        source = source.convert("RGBA")
    image_tensor = pipeline.image_processor.preprocess(source, height, width)
    with torch.no_grad():
        clean = pipeline._encode_vae_image(image_tensor.unsqueeze(2), torch.Generator())
    noise = torch.randn(clean.shape, generator=torch.Generator("cpu").manual_seed(seed))
    size = clean.shape[-2:]
    edit = F.interpolate(torch.from_numpy(mask > 127).float()[None, None], size=size)[:, :, None]
    clean, noise, edit = (
        pipeline._pack_latents(x.expand_as(clean).contiguous(), 1, clean.shape[1], *size)
        for x in (clean, noise, edit)
    )
    limits = "base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"
    shift = module.calculate_shift(clean.shape[1], *(sampler.config[name] for name in limits))
    sample_sigmas = pipeline.config.get("sample_sigmas") or np.linspace(1.0, 1 / steps, steps)
    sampler.set_timesteps(sigmas=sample_sigmas, mu=shift)
    begin, whole = steps - steps_run(steps, settings.strength), sampler.sigmas.clone()
    timesteps, sigmas, real = sampler.timesteps[begin:], whole[begin:], module.retrieve_timesteps

    def at(sigma: torch.Tensor) -> torch.Tensor:
        return sigma * noise + (1 - sigma) * clean

    def blend(_: Any, step: int, __: Any, now: dict[str, Any]) -> dict[str, Any]:
        outside = clean if step + 1 == len(timesteps) else at(sigmas[step + 1])
        return {"latents": (1 - edit) * outside + edit * now["latents"]}

    def walk(sampler: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, int]:
        real(sampler, *args, **kwargs)
        assert torch.equal(sampler.sigmas, whole), "which the pipeline begins later alone"
        sampler.timesteps, sampler.sigmas = timesteps, sigmas
        sampler._step_index = sampler._begin_index = None
        return timesteps, len(timesteps)

    return at(sigmas[0]), blend, walk


def diffusers_latents(pipeline: Any, case: Case, **options: Any) -> NDArray[np.float32]:
    """[C, h, w] latents of the tiny model's Flux pipeline, before decoding."""
    if type(pipeline).__name__.startswith("FluxKontext"):
        options["_auto_resize"] = False  # the server sets the sizes of pictures
    tokens = diffusers_edit(
        pipeline,
        case.pixels,
        case.mask,
        case.prompt,
        case.settings,
        case.seed,
        max_sequence_length=16,
        output_type="latent",
        **options,
    )
    factor = pipeline.vae_scale_factor
    latents: torch.Tensor = pipeline._unpack_latents(tokens, *case.mask.shape, factor)
    return latents[0].float().cpu().numpy()
