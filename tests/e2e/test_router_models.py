"""One router in front of workers of two families, and of three: SETTINGS.model chooses."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from maskserve_benchmarks.router_site import RouterSite
from maskserve_client import Client
from maskserve_serving.worker import WorkerProcess
from tests.fakes.pictures import blob_mask, encode, scene
from tests.support.calls import (
    Grpc,
    InferenceServerException,
    edit_inputs,
    eventually,
    pixels,
    plain_edit,
)

MODELS = ("sdxl-base", "klein-kv")


@pytest.fixture(scope="module")
def workers(unet_worker: WorkerProcess, klein_worker: WorkerProcess) -> dict[str, WorkerProcess]:
    """By the model that each serves."""
    return dict(zip(MODELS, (unet_worker, klein_worker), strict=True))


@pytest.fixture(scope="module")
def router(
    workers: dict[str, WorkerProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RouterSite]:
    with _before(workers, tmp_path_factory.mktemp("router")) as site:
        yield site


@contextmanager
def _before(workers: dict[str, WorkerProcess], folder: Path) -> Iterator[RouterSite]:
    """A router of them, from when they all serve."""
    with RouterSite([worker.grpc_url for worker in workers.values()], folder) as site:
        eventually("all serve", lambda: _states(site) == ["ready"] * len(workers))
        yield site


def _states(site: RouterSite) -> list[str]:
    return [worker["state"] for worker in json.loads(site.read("/workers"))["workers"].values()]


@pytest.fixture
def grpc(router: RouterSite) -> Iterator[Grpc]:
    with closing(Grpc(router.grpc_url)) as client:
        yield client


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # by the SDK
def test_a_variation_is_the_base_models_edit_without_words(
    router: RouterSite, workers: dict[str, WorkerProcess]
) -> None:
    source = encode(scene(64, 64))
    settings = {"seed": 5, "num_inference_steps": 4, "reproducible": True}
    url = f"http://{router.http_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
        answer = sdk.images.create_variation(image=("a.png", source), n=2, extra_body=settings)
        with pytest.raises(openai.BadRequestError, match="klein-kv needs a prompt") as refused:
            sdk.images.create_variation(image=("a.png", source), model="klein-kv")
    assert refused.value.param == "model"
    assert answer.data is not None
    with Client(workers["sdxl-base"].grpc_url) as client:
        for number, image in enumerate(answer.data):
            alone = client.edit(source, prompt="", strength=0.6, **{**settings, "seed": 5 + number})
            variation = pixels(base64.b64decode(image.b64_json or ""))
            assert np.array_equal(variation, np.asarray(alone.image))


@pytest.mark.parametrize("named", MODELS)
@pytest.mark.parametrize("settings", [{}, {"cache": "require"}], ids=["dense", "cached"])
def test_an_edit_runs_on_the_model_that_it_names(
    grpc: Grpc, workers: dict[str, WorkerProcess], named: str, settings: dict[str, Any]
) -> None:
    _check_an_edit(grpc, workers, named, settings)


@pytest.mark.slow  # it starts a third worker
def test_one_router_serves_three_families(
    unet_worker: WorkerProcess,
    klein_worker: WorkerProcess,
    worker: WorkerProcess,
    model: Path,
    tmp_path: Path,
) -> None:
    workers = {"sdxl-base": unet_worker, "klein-kv": klein_worker, model.name: worker}
    with _before(workers, tmp_path) as site, closing(Grpc(site.grpc_url)) as client:
        for cache in ("off", "require"):
            for named in workers:
                _check_an_edit(client, workers, named, {"cache": cache})


def _check_an_edit(
    client: Grpc, workers: dict[str, WorkerProcess], named: str, settings: dict[str, Any]
) -> None:
    """Asked of the router, it is the one that the model's own worker answers."""
    source, mask = scene(96, 128), blob_mask(96, 128)
    edit_settings = {"reproducible": True, "num_inference_steps": 4, **settings}
    picture, meta = client.edit(edit_inputs(source, mask, model=named, **edit_settings))
    with closing(Grpc(workers[named].grpc_url)) as direct:
        expected, _ = direct.edit(edit_inputs(source, mask, **edit_settings))
    assert (meta["model"], meta["worker"]) == (named, workers[named].name)
    assert np.array_equal(pixels(picture), pixels(expected))
    assert np.array_equal(pixels(picture)[mask == 0], source[mask == 0])


@pytest.mark.parametrize("named", MODELS)
def test_openais_model_is_the_one_that_edits(
    router: RouterSite, workers: dict[str, WorkerProcess], named: str
) -> None:
    source, mask = scene(64, 64), blob_mask(64, 64)
    extra_body: dict[str, Any] = {"seed": 5, "num_inference_steps": 2, "mask_mode": "white"}
    url = f"http://{router.http_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert {model.id for model in client.models.list()} == set(MODELS)
        answer = client.images.edit(
            image=("a.png", encode(source)),
            mask=("m.png", encode(mask)),
            prompt="a red star",
            model=named,
            extra_body=extra_body,
        )
    assert answer.data is not None
    assert answer.model_extra is not None
    [meta] = answer.model_extra["maskserve"]
    assert (meta["model"], meta["worker"]) == (named, workers[named].name)
    edited = pixels(base64.b64decode(answer.data[0].b64_json or ""))
    assert np.array_equal(edited[mask == 0], source[mask == 0])
    assert not np.array_equal(edited, source)


def test_each_model_has_its_own_settings(grpc: Grpc) -> None:
    guided = {"negative_prompt": "a blue circle", "guidance_scale": 5.0}
    grpc.edit(plain_edit(model="sdxl-base", **guided))
    with pytest.raises(InferenceServerException, match=r"\[INVALID_REQUEST\] SETTINGS"):
        grpc.edit(plain_edit(model="klein-kv", **guided))


@pytest.mark.parametrize("settings", [{"model": "demo-video"}, {}])
def test_a_model_that_nobody_serves_or_none_is_refused_with_those_there_are(
    grpc: Grpc, settings: dict[str, str]
) -> None:
    with pytest.raises(InferenceServerException) as refused:
        grpc.edit(plain_edit(**settings))
    assert "[INVALID_REQUEST] SETTINGS.model" in refused.value.message()
    assert "accepted: klein-kv, sdxl-base" in refused.value.message()


def test_the_command_line_shows_all(router: RouterSite, workers: dict[str, WorkerProcess]) -> None:
    command = [sys.executable, "-m", "maskserve_client.cli", "status", "--url", router.grpc_url]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "2 of 2 workers answer" in output
    for name, worker in workers.items():
        assert f"{worker.grpc_url} {worker.name}: {name}, ready" in output


def test_a_registered_picture_serves_edits_of_all(router: RouterSite) -> None:
    mask = encode(blob_mask(64, 64))
    with Client(router.grpc_url) as client:
        name = client.register(encode(scene(64, 64)))
        for model in MODELS:
            meta = client.edit(None, mask, "a red star", template_id=name, model=model).meta
            assert (meta["model"], meta["template_id"]) == (model, name)
