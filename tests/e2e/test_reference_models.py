"""Models with references, and families of which no other file starts a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from maskserve_common.contracts.settings import EditSettings
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.worker import WorkerProcess
from tests.fakes.pictures import blob_mask, scene
from tests.fakes.pipelines import (
    blended_edit,
    diffusers_edit,
    qwen_edit,
    qwen_edit_pipeline,
)
from tests.fakes.tiny_flux2 import build_tiny_flux2
from tests.fakes.tiny_qwen_image import EDIT, build_tiny_qwen_image
from tests.fakes.tiny_qwen_image21 import build_tiny_qwen_image21
from tests.fakes.tiny_z_image import build_tiny_z_image
from tests.support.calls import (
    Grpc,
    InferenceServerException,
    Pixels,
    edit_inputs,
    pixels,
)
from tests.support.one_worker import one_worker

TOKENS = 8
"""Along each side of the source."""
STEPS = 4
SIGMAS = [1.0, 0.9, 0.66, 0.3]
"""The schedule of a distilled model."""


class Model(NamedTuple):
    """A model, the settings of its edits, and those that it refuses."""

    build: Callable[[Path], Path] | None
    """Writes its folder; None: a fixture does."""
    length: int
    """`max_sequence_length` of its configuration."""
    guidance: float | None
    """Guidance of an edit that names none; distilled models and Qwen-Image ignore it."""
    refused: dict[str, Any]
    cell: int = 8
    """Pixels along a token's side."""

    @property
    def source(self) -> Pixels:
        return scene(TOKENS * self.cell, TOKENS * self.cell)

    @property
    def mask(self) -> Pixels:
        """Covers whole tokens: the server grows masks to these, pipelines blend within tokens."""
        return np.kron(blob_mask(TOKENS, TOKENS), np.ones((self.cell, self.cell), np.uint8))


MODELS = {
    "tiny-kontext": Model(None, 16, 3.0, {"reuse": "elastic", "reuse_floor": 30.0}),
    "klein": Model(build_tiny_flux2, 48, 4.0, {"negative_prompt": "x"}),
    "klein-kv": Model(partial(build_tiny_flux2, exact=True), 48, 4.0, {"guidance_scale": 4.0}),
    "qwen-image": Model(build_tiny_qwen_image, 320, None, {"guidance_scale": 4.0}),
    "qwen-edit": Model(
        partial(build_tiny_qwen_image, edits=EDIT), 320, None, {"guidance_scale": 4.0}
    ),
    "qwen-2.1": Model(build_tiny_qwen_image21, 320, None, {"guidance_scale": 4.0}, 16),
    "qwen-2.1-turbo": Model(
        partial(build_tiny_qwen_image21, sigmas=SIGMAS),
        320,
        None,
        {"num_inference_steps": STEPS + 1},
        16,
    ),
    "z-image": Model(build_tiny_z_image, 320, 5.0, {"true_cfg_scale": 2.0}),
}
QUICK = ("klein-kv",)
"""With a row of the references' own. tests/unit holds each model beside its pipeline, a VAE of a
fifth axis too; what Triton carries is told by the family's adapter in one way.
"""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in MODELS],
)
def served(
    request: pytest.FixtureRequest,
    klein_worker: WorkerProcess,
    tiny_kontext: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, Grpc]]:
    """A model's folder, and a client of its worker."""
    root, name = tmp_path_factory.mktemp("serving"), request.param
    if name == "klein-kv":
        with closing(Grpc(klein_worker.grpc_url)) as client:
            yield Path(klein_worker.spec.options.model), client
        return
    build = MODELS[name].build
    folder = tiny_kontext if build is None else build(root / name)
    config = root / "worker.toml"
    config.write_text('[model]\noutside_noise = "edit"  # as the pipelines draw it\n')
    options = ServeOptions(
        config=config, model=str(folder), base_port=free_base_port(), log_dir=root
    )
    with one_worker(options) as worker, closing(Grpc(worker.grpc_url)) as client:
        yield folder, client


def expected(folder: Path, settings: EditSettings) -> Pixels:
    """The pipeline's own picture, over the source where it is transparent."""
    from diffusers import DiffusionPipeline

    edits = (folder / "processor").is_dir()
    load = qwen_edit_pipeline if edits else DiffusionPipeline.from_pretrained
    pipeline: Any = load(folder)
    pipeline.set_progress_bar_config(disable=True)
    model = MODELS[folder.name]
    call_options: dict[str, Any] = {"max_sequence_length": model.length}
    if type(pipeline).__name__ == "QwenImage21Pipeline":
        call_options = {}
    run = blended_edit if type(pipeline).__name__.endswith("KVPipeline") else diffusers_edit
    run = qwen_edit if edits else run
    if type(pipeline).__name__.startswith("FluxKontext"):
        call_options["_auto_resize"] = False
    [image] = run(pipeline, model.source, model.mask, "a red star", settings, 1, **call_options)
    if image.mode == "RGBA":
        under = Image.fromarray(model.source)
        under.paste(image.convert("RGB"), mask=image.getchannel("A"))
        image = under
    return np.asarray(image)


def test_an_edit_is_the_pipelines_and_spares_the_outside(served: tuple[Path, Grpc]) -> None:
    folder, client = served
    model, edit_settings = MODELS[folder.name], {"num_inference_steps": STEPS, "strength": 1.0}
    picture, meta = client.edit(edit_inputs(model.source, model.mask, **edit_settings))
    scale = model.guidance
    edited, at = pixels(picture), model.mask > 0
    expected_image = expected(folder, EditSettings(guidance_scale=scale, **edit_settings))
    assert np.array_equal(edited[~at], model.source[~at])
    assert np.abs(edited[at].astype(int) - expected_image[at]).max() <= 1
    assert (meta["model"], meta["cache"], meta["steps"]) == (folder.name, "off", STEPS)


def test_a_cached_edit_computes_its_mask_and_repeats_itself(served: tuple[Path, Grpc]) -> None:
    """The edit uses all defaults, steps and guidance among them."""
    folder, client = served
    model, edit_settings = MODELS[folder.name], {"cache": "require", "num_inference_steps": None}
    first, meta = client.edit(edit_inputs(model.source, model.mask, **edit_settings))
    second, _ = client.edit(edit_inputs(model.source, model.mask, **edit_settings))
    assert (meta["cache"], meta["steps"]) == ("hit", STEPS)
    assert meta["active_tokens"] < meta["total_tokens"] == TOKENS**2
    assert np.array_equal(pixels(first), pixels(second))
    outside = model.mask == 0
    assert np.array_equal(pixels(first)[outside], model.source[outside])


def test_what_a_model_does_not_take_is_refused(served: tuple[Path, Grpc]) -> None:
    folder, client = served
    model = MODELS[folder.name]
    refused = model.refused
    with pytest.raises(InferenceServerException) as error:
        client.edit(edit_inputs(model.source, model.mask, **refused))
    [field] = refused
    assert f"[INVALID_REQUEST] SETTINGS.{field}" in error.value.message()
