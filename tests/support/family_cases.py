"""The table of the family contract: one row a model, with its tiny folder, its diffusers pipeline,
random edits, and the checks that it supports (tests/unit/engine/families/test_family_contract.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.config import Config
from maskserve_common.contracts.request import EditKind
from maskserve_engine.base.job import EditJob
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.spec.model_index import read_model_index
from maskserve_engine.stages.latents import to_model
from maskserve_triton.preprocess import mask_for_model
from tests.fakes.jobs import (
    WORDS,
    Case,
    config_of,
    encode_case,
    guided,
    random_case,
    without_mask,
)
from tests.fakes.pipelines import (
    blended_edit,
    diffusers_edit,
    diffusers_latents,
    flux3_edit,
    flux3_whole_picture,
    joyimage_edit,
    joyimage_pipeline,
    longcat_edit,
    longcat_pipeline,
    qwen_edit,
    qwen_edit_pipeline,
    qwen_whole_picture,
    whole_picture,
)
from tests.fakes.tiny_families import FAMILIES
from tests.fakes.tiny_longcat import LENGTH  # tiny_joyimage's, too
from tests.support.cached_rows import KINDS, Primed

Latents = NDArray[np.float32]
"""[C, h, w]"""
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class FamilyCase:
    """A row of the table: a model, and the checks that it supports."""

    name: str
    """Key of `tests.fakes.tiny_families.FAMILIES`."""
    sort: str
    """Models of one sort share their code. A normal run has each check for one model of a sort; the
    slow tests have it for all."""
    oracle: Callable[[FamilyModel, Case], Latents]
    """Result of the diffusers pipeline."""
    pipeline: Callable[[Path], Any]
    wholes: Mapping[EditKind, Callable[[FamilyModel, Case], Latents]] = field(default_factory=dict)
    """Result of the diffusers pipeline of each kind of edit without a mask that the model makes."""
    references: Mapping[EditKind, int] = field(default_factory=dict)
    """Most references beside the source that the pipelines above take, by the kind of the edit."""
    img2img: bool = True
    """Whether an edit of the whole picture begins at its `strength`."""
    plain: Settings = field(default_factory=dict)
    """Settings of an edit with one pass a step."""
    guidance: Callable[[np.random.Generator], Settings] | None = None
    """Random settings of an edit with two passes a step; None: the model has none."""
    sections: Mapping[str, Settings] = field(default_factory=dict)
    """The worker's configuration."""
    long: int = 0
    """Words of the long prompt, which every third edit has; 0: no edit has it."""
    least_steps: int = 1
    sides: tuple[Sequence[int], Sequence[int]] | None = None
    """Heights and widths of pictures, where rows of a batch have one size or tokens are large;
    None: from 32 to 64 pixels."""
    stride: int = 1
    """Steps of a template for each anchor."""
    kinds: Sequence[str] = KINDS
    """Kinds of blocks of cached rows. Empty: the model is served without a cache."""
    all_tokens: Sequence[str] = KINDS
    """Kinds with which a cached row that computes all tokens is a dense row. `dense` alone: a
    reference is never computed, and the template's has seen another prompt."""
    no_anchor: bool = True
    """Whether a step without an anchor is one of the plan `dense`."""
    int8: float | None = 0.05
    """Bound of int8's mean error, as a share of the mean latent: a layer's error is half a step in
    127, and 3 to 7 steps of random weights add it up. None: tests/unit/engine/stages/test_quantise
    has this family."""
    lora_forms: Sequence[str] = ("transformer.{}.lora_A.weight",)
    """Forms of names in LoRA files."""
    lora_oracle: bool = True
    """Whether rows with LoRAs are compared with the pipeline's here; if not,
    tests/unit/engine/layers/test_low_rank.py does so for this family."""
    refresh_text: bool | None = True
    """Whether steps between refresh steps leave the text out; None: there are no refresh steps."""
    lines: bool = True
    """Whether all that such steps read lies on the lines of one `StepCache` a pass."""
    ranks: Sequence[str] = ("tokens",)
    """How two ranks divide a step: `tokens` of each pass, or whole `passes`."""
    recorded: bool = True
    """Whether steps may be CUDA graphs, and are compared here with those that are not."""
    rank_tokens: int = 1
    """The number of a picture's tokens is a multiple of it, where ranks share tokens."""
    slow: bool = False
    """Whether only the slow tests have this model."""

    def edit(
        self, seed: int, kind: EditKind = "inpaint", *, several: bool = False, **settings: Any
    ) -> Case:
        """A random edit of a seed: odd seeds are guided, and every third has the long prompt. With
        `several` it has references beside its source.
        """
        rng = np.random.default_rng(seed)
        steps = int(rng.integers(self.least_steps, 7))
        more = self.guidance(rng) if self.guidance and seed % 2 else {}
        defaults = {"cache": "off", "num_inference_steps": steps, **self.plain, **more}
        if kind != "inpaint":
            begins = kind == "edit" and self.img2img
            settings = {**settings, "strength": 0.6 if begins else 1.0}
        edit = random_case(rng, **{**defaults, **settings})
        if self.sides is not None:
            edit = replace(edit, **_picture(rng, *(int(rng.choice(side)) for side in self.sides)))
        if kind != "inpaint":
            edit = without_mask(edit, kind)
        if several:
            edit = replace(edit, references=self._references(rng, edit, self.references[kind]))
        return replace(edit, prompt=self.long_prompt) if self.long and seed % 3 == 2 else edit

    def _references(
        self, rng: np.random.Generator, edit: Case, most: int
    ) -> tuple[NDArray[np.uint8], ...]:
        """Pictures of other ratios than the source's and one another's."""
        count, pictures = int(rng.integers(1, most + 1)), [edit.mask[..., None]]
        while len(pictures) <= count:
            sides = self.sides or (range(32, 65, 8),) * 2
            size = [int(rng.choice(side)) for side in sides]
            if size[0] / size[1] not in [len(picture) / picture.shape[1] for picture in pictures]:
                pictures.append(rng.integers(0, 256, (*size, 3), dtype=np.uint8))
        return tuple(pictures[1:])

    @property
    def long_prompt(self) -> str:
        return "two cats and " * (self.long // 3)


def _picture(rng: np.random.Generator, height: int, width: int) -> dict[str, NDArray[np.uint8]]:
    """Random pixels, and a mask of one rectangle."""
    mask = np.zeros((height, width), np.uint8)
    top, left = (int(rng.integers(0, side - 1)) for side in (height, width))
    mask[top : top + int(rng.integers(1, height)), left : left + int(rng.integers(1, width))] = 255
    return {"pixels": rng.integers(0, 256, (height, width, 3), dtype=np.uint8), "mask": mask}


class FamilyModel:
    """diffusers' pipeline and our parts over the tiny folder of a row of the table.

    Args:
        case: the row.
        folder: a model folder that is there already, or where to write one.
        model: further keys of the configuration's section `model`.
    """

    def __init__(self, case: FamilyCase, folder: Path, **model: Any) -> None:
        self.case = case
        self.folder = folder if folder.exists() else FAMILIES[case.name](folder)
        self.config = self.config_with(model=model)
        self.encoder, self.adapter = load_encoder(self.config), load_adapter(self.config)
        self.replay = Replay(self.adapter)
        self.pipeline = case.pipeline(self.folder)
        self.pipeline.set_progress_bar_config(disable=True)
        self.denoiser = getattr(self.pipeline, "transformer", None) or self.pipeline.unet
        self._pipelines = cache(self._other_pipeline)
        self.primed = cache(self._primed)
        self.expected = cache(self._expected)

    def config_with(self, **sections: Settings) -> Config:
        """The row's configuration, with further keys by section."""
        names = {*self.case.sections, *sections}
        return config_of(
            self.folder,
            **{name: {**self.case.sections.get(name, {}), **sections.get(name, {})}
               for name in names},
        )  # fmt: skip

    @property
    def several(self) -> list[EditKind]:
        """Kinds of its edits with references beside the source."""
        return list(self.case.references)

    def edit(
        self, seed: int, kind: EditKind = "inpaint", *, several: bool = False, **settings: Any
    ) -> Case:
        edit = self.case.edit(seed, kind, several=several, **settings)
        return replace(edit, mask=mask_for_model(edit.mask, self.adapter.spec))

    def job(
        self, seed: int, kind: EditKind = "inpaint", *, several: bool = False, **settings: Any
    ) -> EditJob:
        edit = self.edit(seed, kind, several=several, **settings)
        return self.encoded(edit, f"{kind}-{seed}" + "-several" * several)

    def encoded(self, edit: Case, name: str = "edit") -> EditJob:
        return encode_case(self.encoder, edit, name)

    def oracle(self, edit: Case) -> Latents:
        oracle = self.case.oracle if edit.kind == "inpaint" else self.case.wholes[edit.kind]
        return oracle(self, edit)

    def _expected(self, seed: int, kind: EditKind = "inpaint", *, several: bool = False) -> Latents:
        """The pipeline's result of the edit of a seed."""
        return self.oracle(self.edit(seed, kind, several=several))

    def sibling(self, name: str) -> Any:
        """Another pipeline of diffusers over the same parts; it takes small pictures, too."""
        pipeline = self._pipelines(name)
        pipeline.scheduler = self.pipeline.scheduler  # which a test may have replaced
        return pipeline

    def _other_pipeline(self, name: str) -> Any:
        import diffusers

        dtype = self.denoiser.dtype
        pipeline = getattr(diffusers, name).from_pipe(self.pipeline, torch_dtype=dtype)
        pipeline.set_progress_bar_config(disable=True)
        if "_prepare_attention_mask" in vars(self.pipeline):
            pipeline._prepare_attention_mask = self.pipeline._prepare_attention_mask
        if hasattr(pipeline.image_processor, "check_image_input"):
            pipeline.image_processor.check_image_input = lambda image: None
        return pipeline

    def _primed(self, seed: int) -> Primed:
        """The template of the edit of a seed."""
        return Primed(self.adapter, self.encoder, self.job(seed), stride=self.case.stride)

    @contextmanager
    def with_lora(self, file: Path, scale: float) -> Iterator[None]:
        """Let the pipeline load a LoRA of the denoiser while the context lasts."""
        self.pipeline.load_lora_weights(str(file), adapter_name="x")
        self.pipeline.set_adapters("x", scale)
        try:
            yield
        finally:
            self.pipeline.unload_lora_weights()


# Pipelines, and their results.


def _pipeline(folder: Path) -> Any:
    from diffusers import DiffusionPipeline

    return DiffusionPipeline.from_pretrained(folder)


def _chroma_pipeline(folder: Path) -> Any:
    """The pipeline asks its transformer for `guidance_embeds`, which no transformer of Chroma has.
    Its mask adds 1 where a token is seen, which leaves nothing out; here attention leaves out the
    padding.
    """
    pipeline = _pipeline(folder)
    pipeline.transformer.register_to_config(guidance_embeds=False)
    published = pipeline._prepare_attention_mask

    def boolean(**inputs: Any) -> Any:
        mask = published(**inputs)
        return None if mask is None else mask > 0

    pipeline._prepare_attention_mask = boolean
    return pipeline


def _klein_pipeline(folder: Path) -> Any:
    """The pipeline refuses pictures as small as those here."""
    pipeline = _pipeline(folder)
    if hasattr(pipeline.image_processor, "check_image_input"):
        pipeline.image_processor.check_image_input = lambda image: None
    return pipeline


def unet_pipeline(folder: Path) -> Any:
    from diffusers import StableDiffusionInpaintPipeline, StableDiffusionXLInpaintPipeline

    if (folder / "text_encoder_2").exists():
        return StableDiffusionXLInpaintPipeline.from_pretrained(folder)
    return StableDiffusionInpaintPipeline.from_pretrained(folder, safety_checker=None)


Read = Callable[["FamilyModel", Case, Any], Latents]
"""Returns [C, h, w] from a pipeline's `images`."""


def _whole(
    model: FamilyModel,
    edit: Case,
    name: str,
    read: Read,
    run: Callable[..., Any] = whole_picture,
    **arguments: Any,
) -> Latents:
    """Latents of the pipeline of this name, which has no mask."""
    return read(model, edit, run(model.sibling(name), edit, **arguments))


def _wholes(
    edit: str,
    generate: str | None,
    read: Read,
    run: Callable[..., Any] = whole_picture,
    **arguments: Any,
) -> Mapping[EditKind, Callable[[FamilyModel, Case], Latents]]:
    """`FamilyCase.wholes`, by the names of the pipelines."""
    names: dict[EditKind, str | None] = {"edit": edit, "generate": generate}
    return {
        kind: partial(_whole, name=name, read=read, run=run, **arguments)
        for kind, name in names.items()
        if name is not None
    }


def _first(model: FamilyModel, edit: Case, images: Any) -> Latents:
    latents: Latents = images[0].float().numpy()
    return latents


def _tokens(model: FamilyModel, edit: Case, images: Any) -> Latents:
    return _unpacked(model, edit, images, frames=False)


def _frames(model: FamilyModel, edit: Case, images: Any) -> Latents:
    return _unpacked(model, edit, images, frames=True)


def _of_vae(model: FamilyModel, edit: Case, images: Any) -> Latents:
    """Latents that the pipeline has scaled for the VAE."""
    latents: Latents = to_model(images, model.adapter.spec.latents)[0].numpy()
    return latents


def _squares(model: FamilyModel, edit: Case, images: Any) -> Latents:
    """Four latents of a token that lie in one place are a square of 2x2 here."""
    unpacked = model.pipeline._unpack_latents(images, *edit.mask.shape, 16)[:, :, 0]
    latents: Latents = torch.nn.functional.pixel_shuffle(unpacked, 2)[0].numpy()
    return latents


def _of_squares(model: FamilyModel, edit: Case, images: Any) -> Latents:
    """Latents of Flux2Pipeline: a token has four of a square of 2x2."""
    grid = [side // model.adapter.spec.size_multiple for side in edit.mask.shape]
    squares = images[0].T.unflatten(1, grid)
    latents: Latents = torch.nn.functional.pixel_shuffle(squares, 2).float().numpy()
    return latents


def _plain(model: FamilyModel, edit: Case, **arguments: Any) -> Latents:
    """Latents that the pipeline has in the shape of a picture."""
    images = diffusers_edit(
        model.pipeline, edit.pixels, edit.mask, edit.prompt, edit.settings, edit.seed,
        output_type="latent", **arguments,
    )  # fmt: skip
    latents: Latents = images[0].float().numpy()
    return latents


def _packed(model: FamilyModel, edit: Case, *, frames: bool = False, **arguments: Any) -> Latents:
    """Latents that the pipeline has as tokens; with `frames` they have an axis of time."""
    tokens = diffusers_edit(
        model.pipeline, edit.pixels, edit.mask, edit.prompt, edit.settings, edit.seed,
        output_type="latent", **arguments,
    )  # fmt: skip
    return _unpacked(model, edit, tokens, frames=frames)


def _unpacked(model: FamilyModel, edit: Case, tokens: Any, *, frames: bool) -> Latents:
    factor = model.pipeline.vae_scale_factor
    [unpacked] = model.pipeline._unpack_latents(tokens, *edit.mask.shape, factor)
    latents: Latents = (unpacked[:, 0] if frames else unpacked).float().numpy()
    return latents


def _flux(model: FamilyModel, edit: Case) -> Latents:
    return diffusers_latents(model.pipeline, edit)


def _qwen_edit(model: FamilyModel, edit: Case) -> Latents:
    return _unpacked(model, edit, _qwen_tokens(model, edit), frames=True)


def _qwen_tokens(model: FamilyModel, edit: Case) -> Any:
    return qwen_edit(
        model.pipeline, edit.pixels, edit.mask, edit.prompt, edit.settings, edit.seed,
        edit.references, output_type="latent",
    )  # fmt: skip


def _qwen21(model: FamilyModel, edit: Case) -> Latents:
    return _squares(model, edit, _qwen_tokens(model, edit))


def _klein(model: FamilyModel, edit: Case) -> Latents:
    reference = Image.fromarray(edit.references[0]) if edit.references else None
    latents = model.pipeline(
        prompt=edit.prompt,
        image=Image.fromarray(edit.pixels),
        image_reference=reference,
        mask_image=Image.fromarray(edit.mask),
        num_inference_steps=edit.settings.num_inference_steps,
        strength=edit.settings.strength,
        guidance_scale=edit.settings.guidance_scale or 4.0,
        generator=torch.Generator("cpu").manual_seed(edit.seed),
        max_sequence_length=48,
        output_type="latent",
    ).images
    return _of_vae(model, edit, latents)


def _flux2_blended(model: FamilyModel, edit: Case, **arguments: Any) -> Any:
    return blended_edit(
        model.pipeline, edit.pixels, edit.mask, edit.prompt, edit.settings, edit.seed,
        edit.references, output_type="latent", **arguments,
    )  # fmt: skip


def _klein_kv(model: FamilyModel, edit: Case) -> Latents:
    return _of_vae(model, edit, _flux2_blended(model, edit, max_sequence_length=48))


def _flux2_dev(model: FamilyModel, edit: Case) -> Latents:
    arguments = {"max_sequence_length": 96, "guidance_scale": edit.settings.guidance_scale}
    return _of_squares(model, edit, _flux2_blended(model, edit, **arguments))


def _flux3_pipeline(folder: Path) -> Any:
    """The pipeline without the language model that rewrites prompts. The tokenizer stands for its
    processor, which needs torchvision.
    """
    from diffusers.modular_pipelines.flux3 import Flux3AutoBlocks, Flux3DistilledAutoBlocks

    distilled = read_model_index(folder)["_class_name"] == "Flux3DistilledModularPipeline"
    blocks = (Flux3DistilledAutoBlocks if distilled else Flux3AutoBlocks)()
    blocks.sub_blocks.pop("prompt_upsampler")
    pipeline = blocks.init_pipeline(folder)
    pipeline.load_components()
    pipeline.tokenizer.tokenizer = pipeline.tokenizer
    return pipeline


def _flux3(model: FamilyModel, edit: Case) -> Latents:
    return flux3_edit(model.pipeline, edit)


def _flux3_whole(model: FamilyModel, edit: Case) -> Latents:
    return flux3_whole_picture(model.pipeline, edit)


def _longcat_pipeline(folder: Path) -> Any:
    """The pipeline, with the tokens of a prompt that the tiny model has."""
    pipeline = longcat_pipeline(folder)
    pipeline.tokenizer_max_length = LENGTH
    return pipeline


def _longcat(model: FamilyModel, edit: Case) -> Latents:
    return _tokens(model, edit, longcat_edit(model.pipeline, edit))


def _longcat_whole(model: FamilyModel, edit: Case) -> Latents:
    run = qwen_whole_picture if edit.kind == "edit" else whole_picture
    return _tokens(model, edit, run(model.pipeline, edit, enable_prompt_rewrite=False))


def _joyimage(model: FamilyModel, edit: Case) -> Latents:
    latents: Latents = joyimage_edit(model.pipeline, edit)
    return latents


def _qwen_whole(model: FamilyModel, edit: Case) -> Latents:
    pipeline = model.pipeline
    if hasattr(pipeline, "mask_processor"):
        pipeline = model.sibling("QwenImageEditPipeline")
    return _frames(model, edit, qwen_whole_picture(pipeline, edit))


def _qwen21_whole(model: FamilyModel, edit: Case) -> Latents:
    return _squares(model, edit, qwen_whole_picture(model.pipeline, edit))


def _kontext_whole(model: FamilyModel, edit: Case) -> Latents:
    """The pipeline fits any size into an area; here it is the picture's."""
    arguments = {"max_sequence_length": 16, "_auto_resize": False, "max_area": edit.mask.size}
    return _whole(model, edit, "FluxKontextPipeline", _tokens, **arguments)


def _scaled(
    rng: np.random.Generator, low: float, high: float, negatives: Sequence[str]
) -> Settings:
    """A guidance_scale between two numbers, and a negative prompt."""
    scale = float(rng.uniform(low, high))
    return {"guidance_scale": scale, "negative_prompt": str(rng.choice(negatives))}


# The table.

_CFG = partial(_scaled, low=1.5, high=6.0, negatives=WORDS)
_BOTH = ("project", "kv")
_KV = ("kv",)
_COMFY = "diffusion_model.{}.lora_A.weight"
_LIGHTNING = "{}.lora_down.weight"
_KOHYA = "lora_unet_{}.lora_down.weight"
_PEFT = "transformer.{}.lora_A.weight"


def _text(tokens: int) -> dict[str, Settings]:
    return {"model": {"max_sequence_length": tokens}}


_SEVERAL: Mapping[EditKind, int] = {"inpaint": 2, "edit": 2}
_EDIT_NOISE = {"model": {"outside_noise": "edit"}}
"""The noise of the pipelines, also where rows have refresh steps."""

_FLUX = FamilyCase(
    "flux-fill",
    "flux",
    _flux,
    _pipeline,
    sections=_EDIT_NOISE,
    int8=None,
    lora_oracle=False,
    ranks=(),  # tests/unit/engine/batch/test_sequence_parallel.py, also of other numbers
    recorded=False,  # flux/test_flux_graphs.py, with LoRAs and ControlNets
)
_KLEIN = FamilyCase(
    "klein",
    "klein",
    _klein,
    _klein_pipeline,
    plain={"guidance_scale": None},
    sections=_text(48),
    all_tokens=("dense",),
    wholes=_wholes("Flux2KleinPipeline", "Flux2KleinPipeline", _of_vae, max_sequence_length=48),
    references={"inpaint": 1, "edit": 3},
    img2img=False,
)
_FLUX3 = FamilyCase(
    "flux3-klein",
    "flux3",
    _flux3,
    _flux3_pipeline,
    wholes={"edit": _flux3_whole, "generate": _flux3_whole},
    references=_SEVERAL,
    img2img=False,
    plain={"guidance_scale": None},
    sections=_text(160),
    long=24,
    sides=((64, 80), (64, 80)),  # the pipeline pads others
    all_tokens=("dense",),
    refresh_text=False,  # no token of its first blocks sees the text
)
_QWEN = FamilyCase(
    "qwen-image",
    "qwen-image",
    partial(_packed, frames=True, max_sequence_length=320),
    _pipeline,
    _wholes("QwenImageImg2ImgPipeline", "QwenImagePipeline", _frames, max_sequence_length=320),
    plain={"guidance_scale": None},
    guidance=guided,
    long=72,
    least_steps=2,
    lora_forms=(_PEFT, _LIGHTNING, _COMFY),
)
_QWEN_EDIT = replace(
    _QWEN,
    name="qwen-image-edit",
    sort="qwen-image-edit",
    oracle=_qwen_edit,
    pipeline=qwen_edit_pipeline,
    wholes={"edit": _qwen_whole},
    img2img=False,
    sections=_text(320),
    kinds=_KV,
    all_tokens=(),  # an edit's reference is drawn, a template's is not: test_qwen_edit.py
    no_anchor=False,  # its reference is drawn then, too
    lora_forms=(_LIGHTNING,),
    ranks=("tokens", "passes"),
)
_LONGCAT = FamilyCase(
    "longcat-image",
    "longcat-image",
    _longcat,
    _longcat_pipeline,
    {"edit": _longcat, "generate": _longcat_whole},
    plain={"guidance_scale": 1.0},
    guidance=_CFG,
    sections=_text(LENGTH),
    long=18,
    kinds=_BOTH,
)
_SD3 = FamilyCase(
    "sd3-large",
    "sd3-large",
    partial(_plain, max_sequence_length=16),
    _pipeline,
    _wholes(
        "StableDiffusion3Img2ImgPipeline",
        "StableDiffusion3Pipeline",
        _first,
        max_sequence_length=16,
    ),
    plain={"guidance_scale": 1.0},
    guidance=_CFG,
    sections=_text(16),
    long=24,
    kinds=_BOTH,
)
_UNET = FamilyCase(
    "sd21-base",
    "sd",
    _plain,
    unet_pipeline,
    plain={"guidance_scale": 1.0},
    guidance=partial(_scaled, low=7.5, high=7.5, negatives=("", "x", "a red star")),
    sections=_EDIT_NOISE,
    least_steps=4,
    sides=((48,), (40,)),
    stride=2,
    int8=None,
    lora_forms=("unet.{}.lora_A.weight",),
    lora_oracle=False,
    refresh_text=False,
    lines=False,  # maps and ends of stacks, too: unet/test_unet_refresh.py
    ranks=(),  # tests/unit/engine/batch/test_cfg_parallel.py
    recorded=False,  # unet/test_unet_graphs.py
)

CASES: Mapping[str, FamilyCase] = {
    case.name: case
    for case in (
        _FLUX,
        replace(
            _FLUX,
            name="flux-base",
            guidance=guided,
            wholes=_wholes("FluxImg2ImgPipeline", "FluxPipeline", _tokens, max_sequence_length=16),
        ),
        replace(
            _FLUX,
            name="flux-kontext",
            sort="kontext",
            guidance=guided,
            all_tokens=("dense",),
            wholes={"edit": _kontext_whole, "generate": _kontext_whole},
            img2img=False,
        ),
        _LONGCAT,
        replace(
            _LONGCAT,
            name="longcat-image-edit",
            sort="longcat-image-edit",
            wholes={"edit": _longcat_whole},
            img2img=False,
            kinds=_KV,
            all_tokens=(),  # of shown tokens there are keys and values alone: test_qwen_edit.py
            no_anchor=False,
            ranks=("tokens", "passes"),
        ),
        FamilyCase(
            "joyimage-edit",
            "joyimage-edit",
            _joyimage,
            joyimage_pipeline,
            {"edit": _joyimage},
            img2img=False,
            plain={"guidance_scale": 1.0},
            guidance=_CFG,
            sections=_text(LENGTH),
            long=18,
            kinds=_KV,
            all_tokens=(),  # of shown tokens there are keys and values alone: test_qwen_edit.py
            no_anchor=False,
            lora_oracle=False,  # diffusers has none that loads them
            ranks=("tokens", "passes"),
        ),
        FamilyCase(
            "chroma",
            "chroma",
            partial(_packed, max_sequence_length=64),
            _chroma_pipeline,
            _wholes("ChromaImg2ImgPipeline", "ChromaPipeline", _tokens, max_sequence_length=64),
            plain={"guidance_scale": 1.0},
            guidance=_CFG,
            sections=_text(64),
            long=24,
            kinds=_BOTH,
        ),
        _SD3,
        replace(
            _SD3,
            name="sd3-medium",
            sort="sd3-medium",
            sections={**_SD3.sections, "cache": {"enabled": False}},
            kinds=(),
            all_tokens=("dense",),
            no_anchor=False,
            refresh_text=None,
            lines=False,
            ranks=(),  # a rank's second attention has not the tokens of the other: test_sd3.py
            recorded=False,  # that attention has each picture's own length
        ),
        _KLEIN,
        replace(
            _KLEIN,
            name="klein-base",
            plain={"guidance_scale": 1.0},
            guidance=partial(_scaled, low=1.5, high=6.0, negatives=("",)),
        ),
        replace(
            _KLEIN,
            name="klein-kv",
            oracle=_klein_kv,
            references=_SEVERAL,
            recorded=False,  # rows see references that no step computes
            all_tokens=KINDS,
            wholes=_wholes(
                "Flux2KleinKVPipeline", "Flux2KleinKVPipeline", _of_vae, max_sequence_length=48
            ),
        ),
        replace(
            _KLEIN,
            name="flux2-dev",
            oracle=_flux2_dev,
            plain={},
            sections=_text(96),
            references=_SEVERAL,
            wholes=_wholes("Flux2Pipeline", "Flux2Pipeline", _of_squares, max_sequence_length=96),
        ),
        _FLUX3,
        replace(_FLUX3, name="flux3-base", plain={"guidance_scale": 1.0}, guidance=_CFG),
        _QWEN,
        _QWEN_EDIT,
        *(
            replace(
                _QWEN_EDIT,
                name=f"qwen-image-edit-{release}",
                sort=f"qwen-image-edit-{release}",
                references=_SEVERAL,
            )
            for release in (2509, 2511)
        ),
        replace(
            _QWEN_EDIT,
            name="qwen-image-21",
            sort="qwen-image-21",
            oracle=_qwen21,
            wholes={"edit": _qwen21_whole, "generate": _qwen21_whole},
            references=_SEVERAL,
            sections=_text(400),
            sides=((32, 64, 96, 128), (32, 64, 96, 128)),
            all_tokens=_KV,
            lora_forms=(_PEFT,),
            refresh_text=False,
            recorded=False,  # rows see words that no step computes
        ),
        FamilyCase(
            "z-image",
            "z-image",
            partial(_plain, max_sequence_length=320),
            _pipeline,
            _wholes("ZImageImg2ImgPipeline", "ZImagePipeline", _first, max_sequence_length=320),
            plain={"guidance_scale": 0.0},
            guidance=partial(_scaled, low=0.5, high=5.0, negatives=("", "a blue circle")),
            long=66,
            least_steps=2,
            lora_forms=(_PEFT, _LIGHTNING, _COMFY, _KOHYA),
            refresh_text=False,  # its first blocks do not see the text
            rank_tokens=32,  # other pictures are padded, and keep to one rank
        ),
        replace(
            _UNET,
            wholes=_wholes("StableDiffusionImg2ImgPipeline", "StableDiffusionPipeline", _first),
        ),
        replace(_UNET, name="sdxl-fill", sort="sdxl", kinds=_BOTH),
        replace(_UNET, name="sd21-fill", slow=True),
        replace(
            _UNET,
            name="sdxl-base",
            sort="sdxl",
            kinds=_BOTH,
            slow=True,
            wholes=_wholes("StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLPipeline", _first),
        ),
    )
}
