"""Count what edits cost at a model's native size, from the shapes of its folder: FLOPs of steps and
of whole edits, and bytes of entries. docs/models.md has their ranges. A folder needs no weights.

    python scripts/bench model_counts
    python scripts/bench model_counts --model DIR --words 64 --passes 2

A whole edit, dense or cached, counts its text encoders once for each pass of guidance, and its VAE
once each way; results that stages keep are not subtracted. The encoders' heads and tables and the
words of prompt templates are not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.reports import table
from maskserve_common.config import Config
from maskserve_common.config_file import config_of
from maskserve_common.contracts.reuse_levels import refresh_count
from maskserve_engine.families.flux2.encode import first_layers
from maskserve_engine.families.specs import counted_work, load_spec
from maskserve_engine.planning.entry_bytes import FORMATS, entry_bytes, still_bytes
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.planning.refresh_steps import REFRESH_RULE, step_cache_bytes
from maskserve_engine.spec.model_index import read_model_index
from maskserve_engine.spec.model_spec import ModelSpec, anchor_stride
from maskserve_engine.stages.loader import load_part
from maskserve_engine.stages.vae import images_of, load_vae, moments_of

ENABLED_STRIDE = 0.35
"""`[cache] own_anchors` that docs/models.md names for families whose refresh steps are off."""
RATIOS = (0.05, 0.11, 0.2, 0.35)
EDIT_RATIOS = (0.11, 0.35)
_RATIO = 0.11
"""Mask ratio for bytes and single figures."""
_CLIP_TOKENS = 77


class ModelCase(NamedTuple):
    """A model and the settings of its edits."""

    folder: Path
    words: int = 512
    """Text tokens of a prompt, without the shown tokens."""
    passes: int = 1
    """Passes of a step: two if the model is meant to be guided."""


def _shapes(name: str, words: int = 512, passes: int = 1) -> ModelCase:
    return ModelCase(CHECKOUT / "assets" / "models" / f"{name}-shapes", words, passes)


MODELS = {
    "FLUX.1 Fill, for comparison": _shapes("flux1-fill"),
    "FLUX.1 Kontext": _shapes("flux1-kontext"),
    "FLUX.2 klein 4B": _shapes("flux2-klein-4b"),
    "FLUX.2 klein 9B": _shapes("flux2-klein-9b"),
    "FLUX.2 klein 9B-KV": _shapes("flux2-klein-9b-kv"),
    "Qwen-Image": _shapes("qwen-image", 64, 2),
    "Qwen-Image-Edit": _shapes("qwen-image-edit", 64, 2),
    "Qwen-Image-Edit-2509 and -2511": _shapes("qwen-image-edit-2511", 64, 2),
    "Qwen-Image-2.1": _shapes("qwen-image-2.1", 64),
    "LongCat-Image-Edit": _shapes("longcat-image-edit", passes=2),
    "Z-Image": _shapes("z-image", 64, 2),
}
"""Models by name."""


@dataclass(frozen=True)
class Counted:
    """A model at its native size."""

    case: ModelCase

    @cached_property
    def spec(self) -> ModelSpec:
        return load_spec(self.case.folder)

    @property
    def latents(self) -> int:
        """Latents along a side."""
        return self.spec.native_resolution // self.spec.vae_scale_factor

    @cached_property
    def work(self) -> ModelWork:
        return counted_work(self.spec, self.latents, self.latents)

    @property
    def steps(self) -> int:
        return self.spec.defaults.num_inference_steps

    @property
    def dense(self) -> float:
        """Return the FLOPs of a dense step with one pass."""
        words = self.case.words
        return self.work.step_flops([self.work.row_at(1.0, words)], "dense")

    def cached(
        self,
        ratio: float,
        *,
        text: bool = True,
        reads_shown_tokens: bool = True,
        outside: bool = True,
    ) -> float:
        """Return the FLOPs of a cached step.

        Args:
            ratio: mask ratio.
            text: whether the step computes the words of its prompt.
            reads_shown_tokens: whether the step reads the shown tokens; else it also computes them.
            outside: whether the step reads the picture outside the mask; else only the reference.
        """
        work, words, image_tokens = self.work, self.case.words, self._shown_tokens
        if image_tokens and not reads_shown_tokens:
            work, words = (
                replace(work, tokens=(work.tokens[0] - image_tokens,)),
                words + image_tokens,
            )
            work = replace(work, context=work.context - image_tokens)
        row = work.row_at(ratio, words)
        if not text:
            row = replace(row, text=0.0, text_read=float(words))
        if not outside:
            work = replace(work, tokens=(round(row.active[0]) + work.context,))
        return work.step_flops([row], "kv")

    @property
    def _shown_tokens(self) -> int:
        """Return the number of shown tokens of a prompt."""
        return self.spec.encoder_picture_tokens(self.latents, self.latents)

    def entry(self, *, reads_shown_tokens: bool = True, outside: bool = True) -> float:
        """Return the bytes of an anchor in int4, for the part that `cached` reads."""
        whole, context = self.work.tokens[0], self.work.context
        entry_tokens = (
            whole
            - (0 if reads_shown_tokens else self._shown_tokens)
            - (0 if outside else whole - context)
        )
        return entry_bytes(self.work, "kv", FORMATS["int4"]) * entry_tokens / whole

    @property
    def anchors(self) -> int:
        """Return the default number of anchors of a template."""
        return -(-self.steps // min(self.steps, anchor_stride(Config().cache.stride, self.spec)))

    @property
    def refresh_steps(self) -> int:
        """Return the number of refresh steps of an edit that has any."""
        return refresh_count(self.steps, self.spec.refresh.stride or ENABLED_STRIDE)

    @cached_property
    def stage_flops(self) -> float:
        """Return the FLOPs of an edit's encoders and VAE."""
        return self.case.passes * sum(self._text_encoders()) + self._vae()

    def edit(self, dense_steps: int, ratio: float = 1.0, *, template: bool = True) -> float:
        """Return the FLOPs of a whole edit.

        Args:
            dense_steps: number of its steps that compute all tokens.
            ratio: mask ratio.
            template: whether cached steps read a template, which also holds exact references; else
                they read the edit's step cache.
        """
        text = template or not self.spec.refresh.leaves_text
        reads = self.steps - dense_steps
        if reads and not template:
            reads = self.steps - 1  # later refresh steps are computed beside such a step
        cached_flops = reads * self.cached(ratio, text=text)
        whole = self.case.passes * (dense_steps * self.dense + cached_flops) + self.stage_flops
        return whole if template else whole + self.work.still_flops

    def gains(self, dense_steps: int, *, template: bool) -> list[float]:
        """Return a dense edit's FLOPs over those of an edit with `dense_steps` dense steps, by mask
        ratio.
        """
        whole = self.edit(self.steps, template=False)
        return [whole / self.edit(dense_steps, ratio, template=template) for ratio in EDIT_RATIOS]

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of the step cache for one pass."""
        stored_tokens = self.work.tokens[0] - _RATIO * (self.work.tokens[0] - self.work.context)
        stored_tokens += self.case.words * self.spec.refresh.leaves_text
        return step_cache_bytes(
            self.work,
            [(stored_tokens,)],
            FORMATS[REFRESH_RULE.format],
            1 + self.spec.refresh.second_order,
        )

    @property
    def _config(self) -> Config:
        return config_of({"model": {"path": str(self.case.folder), "device": "meta"}})

    def _text_encoders(self) -> Iterator[float]:
        """Yield the FLOPs of each text encoder; a vision model counts separately."""
        side, image_view = self.spec.native_resolution, self.spec.encoder_picture
        for name, part in read_model_index(self.case.folder).items():
            if not name.startswith("text_encoder") or part[1] is None:
                continue
            load = first_layers if self.spec.family == "flux2" else load_part
            model = load(self._config, name, None)
            tokens = _CLIP_TOKENS if part[1].startswith("CLIP") else self.case.words
            model = getattr(model, "model", model)
            if image_view is not None:
                rows, columns = (
                    round(length / image_view.cell) for length in image_view.size(side, side)
                )
                tokens += rows * columns
                yield _vision_flops(model.visual, rows * columns)
                model = model.language_model
            yield _flops_of(model, tokens)

    def _vae(self) -> float:
        """Return the FLOPs of encoding and decoding one picture, as torch counts them."""
        side, latents = self.spec.native_resolution, (self.spec.latent_channels, self.latents)
        vae, space = load_vae(self._config, self.spec).float(), self.spec.latents
        counter = FlopCounterMode(display=False)
        # The counter's registry lacks the fused attention kernel.
        with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), counter:
            moments_of(vae, torch.zeros(1, 3, side, side, device="meta"), space)
            images_of(vae, torch.zeros(1, *latents, latents[1], device="meta"), space)
        return float(counter.get_total_flops())


def _flops_of(model: Any, tokens: int, window: int = 0) -> float:
    """Return the FLOPs of linear layers and attention over `tokens` tokens. Each token attends to
    `window` tokens; 0: to all.
    """
    flops = 0.0
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            flops += 2.0 * tokens * layer.weight.numel()
            projections = {"q": 1, "q_proj": 1, "qkv": 3}.get(name.rpartition(".")[2])
            if projections is not None:
                flops += 4.0 * tokens * (window or tokens) * layer.out_features / projections
    return flops


def _vision_flops(model: Any, tokens: int) -> float:
    """Return the FLOPs of the vision model for `tokens` tokens of a picture. Each token is four
    patches, which attend to a window or to all.
    """
    config, patches = model.config, 4 * tokens
    window = (getattr(config, "window_size", 0) // config.patch_size) ** 2
    whole = getattr(config, "fullatt_block_indexes", range(config.depth))
    blocks = enumerate(model.blocks)
    flops = sum(_flops_of(block, patches, 0 if n in whole else window) for n, block in blocks)
    return flops + _flops_of(model.merger, tokens)


def _joined(numbers: Sequence[float]) -> str:
    return " / ".join(f"{number:.1f}" for number in numbers)


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f}"


def steps_table(models: dict[str, Counted]) -> str:
    """Return the table of steps and of an anchor's bytes."""
    rows = []
    for name, model in models.items():
        limits = [model.dense / model.cached(ratio) for ratio in RATIOS]
        constant_bytes = still_bytes(model.work, FORMATS["int4"])
        nbytes = _gib(model.entry()) + (f" + {_gib(constant_bytes)} once" if constant_bytes else "")
        rows.append((name, f"{model.dense / 1e12:.1f}", _joined(limits), nbytes))
    ratios = " / ".join(f"{ratio:g}"[1:] for ratio in RATIOS)
    columns = ["model", "TFLOP of a dense step", f"dense over cached at m {ratios}"]
    return table([*columns, "int4 `kv`, one anchor, GiB"], rows)


def edits_table(models: dict[str, Counted]) -> str:
    """Return the table of whole edits."""
    rows = []
    for name, model in models.items():
        dense_start = model.spec.dense_steps.of(model.steps, prompt=True, side=False)
        refreshes = model.refresh_steps
        steps = model.case.passes * model.steps * model.dense
        rows.append(
            (
                f"{name}, {model.steps}" + (f" x {model.case.passes}" * (model.case.passes > 1)),
                f"{steps / 1e12:,.0f} + {model.stage_flops / 1e12:.0f}",
                f"{dense_start}: {_joined(model.gains(dense_start, template=True))}",
                f"{refreshes}: {_joined(model.gains(refreshes, template=False))}",
                _gib(model.cache_bytes),
            )
        )
    columns = ["model, steps", "TFLOP of a dense edit", "from a template", "with refresh steps"]
    return table([*columns, "step cache of a pass, GiB"], rows)


def bytes_table(models: dict[str, Counted]) -> str:
    """Return the table of parts that could be left out of entries with a reference."""
    rows = []
    for name, model in models.items():
        if not model.work.context:
            continue

        def cell(model: Counted = model, **options: bool) -> str:
            limit = model.dense / model.cached(_RATIO, **options)
            return f"{_gib(model.entry(**options))}, {limit:.1f}"

        without_image = cell(reads_shown_tokens=False) if model._shown_tokens else ""
        pair_gib = _gib(2 * model.anchors * model.entry()) if model.case.passes > 1 else ""
        whole = f"{model.anchors}: {_gib(model.anchors * model.entry())}"
        rows.append((name, cell(), without_image, cell(outside=False), whole, pair_gib))
    columns = ["model", "an anchor", "source in the text computed", "reference alone"]
    return table([*columns, "all anchors of a template", "a set for each pass"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="a folder (default: eleven published models)")
    parser.add_argument("--words", type=int, default=512, help="text tokens of a prompt")
    parser.add_argument("--passes", type=int, default=1, help="of a step, 2 with guidance")
    args = parser.parse_args()
    targets = MODELS
    if args.model is not None:
        targets = {args.model.name: ModelCase(args.model, args.words, args.passes)}
    models = {name: Counted(case) for name, case in targets.items()}
    for make_table in (steps_table, edits_table, bytes_table):
        print(make_table(models), end="\n\n", flush=True)
    return 0
