"""Rows with ControlNets of a flow-matching model of the family contract, and the pipelines that
diffusers has for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from maskserve_benchmarks.steps.replay import refreshed_every
from maskserve_common.contracts.request import EditKind
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.families.control import RowControl
from tests.fakes.jobs import Case
from tests.fakes.pipelines import whole_picture
from tests.support.family_cases import FamilyModel


@dataclass(frozen=True)
class NetCase:
    """A model with ControlNets."""

    model: str
    """Key of `tests.support.family_cases.CASES`."""
    nets: Mapping[str, Any]
    pipeline: str
    """Name of diffusers' pipeline with ControlNets."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline."""
    spans: bool = True
    """Whether the pipeline lets a net act in some steps only."""


class NetModel:
    """A model and its ControlNets."""

    def __init__(self, case: NetCase, plain: FamilyModel) -> None:
        self.case, self.plain = case, plain
        self.adapter, self.replay = plain.adapter, plain.replay
        self.parts = {
            name: plain.pipeline.components[name]
            for name in inspect.signature(self._pipeline_class.__init__).parameters
            if name in plain.pipeline.components
        }
        self.nets = {name: self.adapter.control_net(net) for name, net in case.nets.items()}

    @property
    def _pipeline_class(self) -> Any:
        import diffusers

        return getattr(diffusers, self.case.pipeline)

    def guided(self, rng: np.random.Generator) -> Mapping[str, Any]:
        """Random settings of two passes."""
        assert self.plain.case.guidance is not None
        return self.plain.case.guidance(rng)

    def edit(self, rng: np.random.Generator, kind: EditKind = "inpaint", **settings: Any) -> Case:
        seed = 2 * int(rng.integers(100))  # of one pass
        steps = {"num_inference_steps": 5, "strength": 1.0, "mask_ring": 0}
        return self.plain.edit(seed, kind, **{**steps, **settings})

    def job(self, rng: np.random.Generator, case: Case, *names: str, **changes: Any) -> EditJob:
        """With a random picture for each net, black where it fills the mask."""
        controls = []
        for name in names:
            picture = rng.integers(0, 256, case.pixels.shape, dtype=np.uint8)
            if self.fills(name):
                picture[case.mask > 127] = 0
            moments = self.plain.encoder.moments(picture)
            scale = float(rng.choice([0.4, 0.7, 1.3]))
            control = ControlInput(
                name, picture, scale=scale, moments=moments, fills=self.fills(name)
            )
            controls.append(replace(control, **changes))
        return replace(self.plain.encoded(case), controls=tuple(controls))

    def fills(self, name: str) -> bool:
        control_spec = self.adapter.spec.control
        return control_spec is not None and control_spec.fills(self.case.nets[name].config)

    def controlled(self, row: Any, job: EditJob, refresh: int = 1) -> Any:
        self.adapter.control(row, job, self.nets)
        if isinstance(row.residuals, RowControl):
            row.residuals.schedule = refreshed_every(refresh, row.steps)
        return row

    def dense(self, job: EditJob) -> Any:
        return self.controlled(self.adapter.dense_row(job), job)

    @contextmanager
    def positions(self, name: str) -> Iterator[None]:
        """Lend the base's positions to a net that has none, as its pipeline does."""
        net = self.case.nets[name]
        lends = not net.config.get("use_pos_embed", True)
        if lends:
            net.pos_embed = self.plain.denoiser.pos_embed
        yield
        if lends:
            net.pos_embed = None

    def oracle(self, case: Case, control: ControlInput) -> NDArray[np.float32]:
        """[C, h, w] of diffusers' pipeline without a mask."""
        pipeline = self._pipeline_class(**self.parts, controlnet=self.case.nets[control.net])
        pipeline.set_progress_bar_config(disable=True)
        with self.positions(control.net), encoded_to_the_mean():
            images = whole_picture(
                pipeline,
                case,
                control_image=Image.fromarray(control.picture),
                controlnet_conditioning_scale=control.scale,
                control_guidance_start=control.start,
                control_guidance_end=control.end,
                **self.case.options,
            )
        if images.ndim == 3:
            factor = self.plain.pipeline.vae_scale_factor
            images = self.plain.pipeline._unpack_latents(images, *case.mask.shape, factor)[:, :, 0]
        return np.asarray(images[0].float().numpy())


@contextmanager
def encoded_to_the_mean() -> Iterator[None]:
    """Let the VAE's distributions give their mean where a pipeline draws without a generator."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    draw = DiagonalGaussianDistribution.sample

    def sample(self: Any, generator: Any = None) -> Any:
        return self.mode() if generator is None else draw(self, generator)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DiagonalGaussianDistribution, "sample", sample)
        yield
