"""diffusers' pipeline as a Triton model with dynamic batching: the usual first solution.

A request has the tensors of maskserve's `edit`; without picture and mask it asks for a new picture.
Triton passes on the waiting requests, up to the model's `max_batch_size`. Requests of one size run
as one call of the pipeline, and the results of edits are pasted into their sources. Parameters of
config.pbtxt:

- `model`: folder; `threads`: of torch; `loras`, `nets`: folders of LoRAs and ControlNets, which
  all stay in memory.
- `mode`: `whole` computes the whole picture; `first_block_cache` does so with diffusers'
  FirstBlockCache at `threshold`, with one decision for a batch; `crop` computes only a square round
  the mask, which editors call "only masked" or crop and stitch.
"""

from __future__ import annotations

import inspect
import io
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomllib
import torch
from PIL import Image

_STEP = 4
"""The sides of crops are multiples of a quarter of the picture's side, so that some crops can share
a batch."""
_MARGIN = 0.25
"""Margin around the mask's box, as a share of the box's longer side: the context that the model
sees."""
_OPTIONS = ("guidance_scale", "max_sequence_length")
_OF_EDITS = {"Flux2KleinPipeline": "Flux2KleinInpaintPipeline"}
"""Pipelines of folders → those that take masks."""
_OF_PICTURES = {"Flux2KleinInpaintPipeline": "Flux2KleinPipeline"}
"""Pipelines that take masks → those of the same parts for text to image."""


class PipelineEdit(NamedTuple):
    """An edit, or a new picture."""

    image: Image.Image | None
    """None: a new picture."""
    mask: Image.Image | None
    prompt: str
    seed: int
    steps: int
    box: tuple[int, int, int, int]
    """The computed part of the picture: left, upper, right, lower."""
    loras: tuple[tuple[str, float], ...]
    """Names and scales of the LoRAs."""
    nets: tuple[str, ...] = ()
    """Names of the ControlNets, for new pictures."""
    control: tuple[Image.Image, ...] = ()
    """Their pictures."""

    @property
    def computed_size(self) -> tuple[int, int]:
        """Width and height of the computed part."""
        left, upper, right, lower = self.box
        return right - left, lower - upper


class Pipeline:
    """diffusers' pipeline of a folder: in float32 on a CPU, in bfloat16 on a GPU.

    Args:
        model: folder.
        mode: see the module's docstring.
        threshold: of FirstBlockCache.
        loras: files of LoRAs.
        nets: folders of ControlNets.
        weights: a pipeline of the same folder, whose weights are shared; None: load them.
    """

    def __init__(
        self,
        model: str,
        mode: str,
        threshold: float = 0.0,
        loras: Sequence[Path] = (),
        nets: Sequence[Path] = (),
        weights: Pipeline | None = None,
    ) -> None:
        import diffusers

        folder = Path(model)
        name = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
        cls = getattr(diffusers, _OF_EDITS.get(name, name))
        self.mode = mode
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        if weights is None:
            self.pipe = cls.from_pretrained(model, torch_dtype=dtype).to(self.device)
        else:
            self.pipe = cls.from_pipe(
                weights.pipe, transformer=weights.transformer_copy(), torch_dtype=dtype
            )
        self.pipe.set_progress_bar_config(disable=True)
        tables = tomllib.loads((folder / "maskserve.toml").read_text(encoding="utf-8"))
        self.defaults = tables["model"]
        self.loras = bool(loras)
        for file in loras:
            self.pipe.load_lora_weights(file, adapter_name=file.stem)
        load_net = diffusers.ControlNetModel.from_pretrained
        self._nets = {net.name: load_net(net, torch_dtype=dtype).to(self.device) for net in nets}
        self._controlled: dict[tuple[str, ...], Any] = {}
        if mode == "first_block_cache":
            _add_cache(self.pipe.transformer, threshold)

    def transformer_copy(self) -> Any:
        """Return a copy of the transformer that shares its weights."""
        transformer = self.pipe.transformer
        tensors = chain(transformer.parameters(), transformer.buffers())
        return deepcopy(transformer, {id(tensor): tensor for tensor in tensors})

    @cached_property
    def picture_pipe(self) -> Any:
        """The pipeline of the same parts that makes new pictures."""
        import diffusers

        name = type(self.pipe).__name__
        return self._of_parts(getattr(diffusers, _OF_PICTURES.get(name, name)))

    def controlled_pipe(self, nets: tuple[str, ...]) -> Any:
        """Return the pipeline of the same parts that makes new pictures by ControlNets."""
        from diffusers import StableDiffusionControlNetPipeline

        if nets not in self._controlled:
            chosen = [self._nets[name] for name in nets]
            net = chosen if len(chosen) > 1 else chosen[0]
            self._controlled[nets] = self._of_parts(
                StableDiffusionControlNetPipeline, controlnet=net
            )
        return self._controlled[nets]

    def _of_parts(self, cls: Any, **parts: Any) -> Any:
        pipe = cls.from_pipe(self.pipe, torch_dtype=self.pipe.dtype, **parts)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def read(self, texts: Mapping[str, bytes], control: Sequence[bytes] = ()) -> PipelineEdit:
        """Return an edit from the tensors of maskserve's `edit`."""
        settings = json.loads(texts["SETTINGS"])
        steps = settings.get("num_inference_steps") or self.defaults["num_inference_steps"]
        image = mask = None
        if texts["IMAGE"]:
            image = Image.open(io.BytesIO(texts["IMAGE"])).convert("RGB")
            mask = Image.open(io.BytesIO(texts["MASK"])).convert("L")
            box = crop_box(mask) if self.mode == "crop" else (0, 0, *image.size)
        else:
            width, height = (int(side) for side in settings["size"].split("x"))
            box = (0, 0, width, height)
        loras = tuple([(lora["name"], lora["scale"]) for lora in settings.get("loras", ())])
        nets = tuple([net["name"] for net in settings.get("controls", ())])
        pictures = tuple([Image.open(io.BytesIO(png)).convert("RGB") for png in control])
        prompt, seed = texts["PROMPT"].decode(), int(settings["seed"])
        return PipelineEdit(image, mask, prompt, seed, steps, box, loras, nets, pictures)

    def pictures(self, edits: Sequence[PipelineEdit]) -> list[tuple[bytes, dict[str, Any]]]:
        """Return a PNG file for each edit, and how it was computed. Edits of one size, the same
        LoRAs and the same ControlNets are one call of diffusers' pipeline.
        """
        groups: dict[Any, list[int]] = defaultdict(list)
        for number, edit in enumerate(edits):
            group = edit.computed_size, edit.image is None, edit.loras, edit.nets
            groups[group].append(number)
        answers: list[Any] = [None] * len(edits)
        for (size, _, loras, _), numbers in groups.items():
            self._adapt(loras)
            for number, picture in zip(
                numbers, self._run([edits[n] for n in numbers]), strict=True
            ):
                answers[number] = (picture, {"batch": len(numbers), "side": size[0]})
        return answers

    def _adapt(self, loras: tuple[tuple[str, float], ...]) -> None:
        """Set the LoRAs. Adapters are state of the whole pipeline."""
        if not self.loras:
            return
        if loras:
            self.pipe.enable_lora()
            self.pipe.set_adapters([name for name, _ in loras], [scale for _, scale in loras])
        else:
            self.pipe.disable_lora()

    def _run(self, edits: list[PipelineEdit]) -> list[bytes]:
        width, height = edits[0].computed_size
        cuts = [
            (edit.image.crop(edit.box), edit.mask.crop(edit.box))
            for edit in edits
            if edit.image is not None and edit.mask is not None
        ]
        nets, sources = edits[0].nets, dict[str, Any]()
        if cuts:
            pipe = self.pipe
            images, masks = map(list, zip(*cuts, strict=True))
            sources = {"image": images, "mask_image": masks, "strength": 1.0}
        elif nets:
            pipe = self.controlled_pipe(nets)
            controls = [list(edit.control) for edit in edits]
            sources = {"image": controls if len(nets) > 1 else [one for [one] in controls]}
        else:
            pipe = self.picture_pipe
        pictures = pipe(
            prompt=[edit.prompt for edit in edits],
            **sources,
            height=height,
            width=width,
            num_inference_steps=edits[0].steps,
            **self._options(pipe),
            generator=[torch.Generator("cpu").manual_seed(edit.seed) for edit in edits],
        ).images
        return [_paste(edit, picture) for edit, picture in zip(edits, pictures, strict=True)]

    def _options(self, pipe: Any) -> dict[str, Any]:
        """Return the folder's defaults that the pipeline takes."""
        parameters = inspect.signature(pipe.__call__).parameters.keys() & self.defaults.keys()
        return {name: self.defaults[name] for name in _OPTIONS if name in parameters}


class PipelineModel:
    """Triton model of the module's docstring: diffusers' pipeline, tuned.

    Args:
        utils: Triton's module of the Python backend, which only a model can import.
    """

    def __init__(self, utils: Any) -> None:
        self.utils = utils

    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        settings = {name: value["string_value"] for name, value in parameters.items()}
        torch.set_num_threads(int(settings["threads"]))
        self.pipeline = Pipeline(
            settings["model"],
            settings["mode"],
            float(settings["threshold"]),
            sorted(Path(settings["loras"]).glob("*.safetensors")) if settings["loras"] else (),
            sorted(Path(settings["nets"]).iterdir()) if settings["nets"] else (),
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Serve requests; the interface is that of Triton's Python backend."""
        begin = time.perf_counter()
        edits = [self.pipeline.read(*_inputs(request, self.utils)) for request in requests]
        answers = self.pipeline.pictures(edits)
        # Answers leave together, so this is the working time of each.
        call_ms = 1e3 * (time.perf_counter() - begin)
        return [self._answer(picture, meta | {"call_ms": call_ms}) for picture, meta in answers]

    def _answer(self, picture: bytes, meta: dict[str, Any]) -> Any:
        values = {"IMAGE": picture, "META": json.dumps(meta).encode()}
        tensors = [
            self.utils.Tensor(name, np.array([[value]], object)) for name, value in values.items()
        ]
        return self.utils.InferenceResponse(tensors)


def crop_box(mask: Image.Image) -> tuple[int, int, int, int]:
    """Return a square around the white pixels with a margin. Its side is a multiple of a quarter of
    the picture's shorter side. With eighths fewer crops share a batch, and it was slower.
    """
    left, upper, right, lower = mask.getbbox() or (0, 0, *mask.size)
    longest, shorter = max(right - left, lower - upper), min(mask.size)
    crop_side = min(longest * (1 + 2 * _MARGIN), shorter)
    unit = shorter // _STEP
    side = unit * max(1, -(-int(crop_side) // unit))
    x = min(max((left + right - side) // 2, 0), mask.size[0] - side)
    y = min(max((upper + lower - side) // 2, 0), mask.size[1] - side)
    return x, y, x + side, y + side


def _paste(edit: PipelineEdit, picture: Image.Image) -> bytes:
    out = picture
    if edit.image is not None and edit.mask is not None:
        out = edit.image.copy()
        out.paste(picture, edit.box[:2], edit.mask.crop(edit.box).point(lambda v: 255 * (v > 127)))
    file = io.BytesIO()
    out.save(file, "PNG")
    return file.getvalue()


def _inputs(request: Any, utils: Any) -> tuple[dict[str, bytes], list[bytes]]:
    """Return the tensors of one element, and the control pictures."""
    names = ("IMAGE", "MASK", "PROMPT", "SETTINGS")
    texts = {
        name: utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0]
        for name in names
    }
    control = utils.get_input_tensor_by_name(request, "CONTROL")
    return texts, [] if control is None else control.as_numpy().reshape(-1).tolist()


def _add_cache(transformer: Any, threshold: float) -> None:
    """Add a cache context: FluxFillPipeline does not name one, and forgets it at the end of every
    call.
    """
    from diffusers.hooks import FirstBlockCacheConfig

    transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    forward = transformer.forward

    def in_context(*args: Any, **kwargs: Any) -> Any:
        with transformer.cache_context("edit"):
            return forward(*args, **kwargs)

    transformer.forward = in_context
