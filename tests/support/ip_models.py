"""A tiny model with IP-Adapters of random weights, and its edits as a worker's stages make them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from PIL import Image

from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.contracts.settings import IpAdapterSetting
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.spec.ip_adapters import LAYOUTS
from maskserve_triton.accept import accept_edit
from maskserve_triton.encoder import EditEncoder
from maskserve_triton.encoder_input import EncoderInput
from maskserve_triton.preprocess import prepare_edit
from tests.fakes.ip_adapters import build_image_encoder, build_ip_adapter
from tests.fakes.jobs import Case, config_of, tolerance
from tests.fakes.pictures import encode
from tests.support.cached_rows import assert_equal, result, run
from tests.support.lora_oracle import read

Pixels = NDArray[np.uint8]
LORA = 0.7


class IpModel:
    """A model with an IP-Adapter of each form that it takes, named like the form."""

    def __init__(self, folder: Path, ip_folder: Path) -> None:
        self.folder, self.ip_folder = folder, ip_folder
        sections = {
            "model": {"outside_noise": "edit"},
            "ip_adapters": {"folder": str(ip_folder)},
            "stages": {"encode_halo": 0},
        }
        runtime = str(ip_folder / "runtime")
        self.config = structs.replace(config_of(folder, **sections), runtime_dir=runtime)
        self.adapter = load_adapter(self.config)
        self.spec, self.replay = self.adapter.spec, Replay(self.adapter)
        build_image_encoder(ip_folder / "image_encoder")
        assert self.spec.ip_adapters is not None
        self.forms = LAYOUTS[self.spec.ip_adapters.layout].forms
        for form in self.forms:
            build_ip_adapter(ip_folder / f"{form}.safetensors", self.spec, form)
        self.encoder = load_encoder(self.config)
        self.stage = EditEncoder(self.encoder, self.config)

    def job(
        self, case: Case, picture: Pixels | None = None, name: str = "plain", scale: float = 1.0
    ) -> EditJob:
        """Return an edit as preprocess and encoder make it; with a picture, an IP-Adapter's."""
        setting = None if picture is None else IpAdapterSetting(name=name, scale=scale)
        settings = structs.replace(
            case.settings, ip_adapter=setting, seed=case.seed, crop_to_mask="off", request_id="r"
        )
        if case.kind != "inpaint":
            size = "x".join(map(str, reversed(case.mask.shape)))
            settings = structs.replace(settings, mask_ring=None, crop_to_mask="auto", size=size)
        if case.kind == "generate":
            settings = structs.replace(settings, strength=1.0)
        prompt = case.prompt.encode()
        ready = prepare_edit(
            b"" if case.kind == "generate" else encode(case.pixels),
            encode(case.mask) if case.kind == "inpaint" else b"",
            accept_edit(settings, prompt, self.spec, self.config, kind=case.kind),
            self.spec,
            self.config,
            references=[] if picture is None else [encode(picture)],
        )
        edit = EncoderInput(
            ready.request, ready.pixels, ready.edit_mask, references=ready.references
        )
        [encoded] = self.stage.encode_all([edit])
        assert not isinstance(encoded, Exception), encoded
        arrays, _ = encoded
        return EditJob(
            ready.request,
            ready.edit_mask,
            arrays.moments,
            arrays.masked_moments,
            arrays.conditioning,
            arrays.negative,
        )

    def alone(self, job: EditJob) -> NDArray[np.float32]:
        return result(self.replay, self.adapter.dense_row(job))

    def row(self, job: EditJob, lora: Path | None, nets: Mapping[str, Any]) -> Any:
        """Return a dense row, with the job's ControlNets of `nets` and a LoRA of scale `LORA`."""
        row = self.adapter.dense_row(job)
        if job.controls:
            self.adapter.control(row, job, nets)
        if lora is not None:
            factors = read(lora, self.folder)["denoiser"]
            self.adapter.attach(row, job, ((self.adapter.low_rank(factors), LORA),))
        return row

    def check_together(
        self,
        adapted: EditJob,
        plain: EditJob,
        controls: tuple[ControlInput, ...],
        lora: Path,
        nets: Mapping[str, Any],
        expected: NDArray[np.float32],
    ) -> None:
        """Check that an edit with an IP-Adapter, ControlNets and a LoRA is the expected one, that
        edits without some of them are others, and that a batch of all of them changes none.

        Args:
            adapted: the edit with the IP-Adapter alone.
            plain: the same edit without.
            controls: its ControlNets.
            lora: file of its LoRA.
            nets: the ControlNets by name.
            expected: [C, h, w] of the edit with all three.
        """
        jobs = [
            (replace(adapted, controls=controls), lora),
            (plain, None),
            (adapted, None),
            (replace(plain, controls=controls), None),
            (plain, lora),
        ]
        alone = [result(self.replay, self.row(*job, nets)) for job in jobs]
        assert_equal(alone[0], expected)
        for other in alone[1:]:
            assert np.abs(other - expected).max() > 10 * tolerance(expected)
        together = [self.row(*job, nets) for job in jobs]
        run(self.replay, together, "dense")
        for row, one in zip(together, alone, strict=True):
            assert_equal(row.result().array(), one)


def picture_of(rng: np.random.Generator) -> Pixels:
    """A picture of any shape, coarse enough to differ from others once it is small."""
    cells = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    width, height = (int(side) for side in rng.integers(33, 90, 2))
    return np.asarray(Image.fromarray(cells).resize((width, height), Image.Resampling.NEAREST))
