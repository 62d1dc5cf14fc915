"""Edits with LoRAs through a router and a real Triton, against diffusers with PEFT."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import NotFoundError, OpenAI

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_common.contracts.settings import EditSettings
from tests.fakes.loras import LAYERS, lora, write
from tests.fakes.pictures import blob_mask, encode, scene
from tests.fakes.pipelines import diffusers_edit
from tests.support.calls import (
    Grpc,
    InferenceServerException,
    Pixels,
    edit_inputs,
    eventually,
    pixels,
)
from tests.support.clone import Clone

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
DEMO = CHECKOUT / "assets" / "models" / "demo"
SIDE = 64
SOURCE, MASK = scene(SIDE, SIDE), blob_mask(SIDE, SIDE)
STEPS = 4

Loras = tuple[tuple[str, float], ...]
MIX: tuple[Loras, ...] = (
    (),
    (("warm", 1.0),),
    (("cold", 0.7),),
    (("warm", 0.5), ("cold", -0.4)),
    (("warm", 0.0),),
    (("words", 1.0),),
    (("words", 0.6), ("warm", 0.8)),
)
"""LoRAs of the edits of one batch."""


def lora_settings(loras: Loras, **more: Any) -> dict[str, Any]:
    return {
        "num_inference_steps": STEPS,
        "loras": [{"name": name, "scale": scale} for name, scale in loras],
        **more,
    }


class Site:
    """A worker and a router before it, with a folder of LoRAs drawn anew."""

    def __init__(self, folder: Path, grpc: Grpc, grpc_url: str, http: str) -> None:
        self.folder, self.grpc, self.grpc_url, self.http = folder, grpc, grpc_url, http

    def edited(self, name: str) -> Any:
        return self.grpc.edit(edit_inputs(SOURCE, MASK, **lora_settings(((name, 1.0),))))

    def refused(self, name: str, **more: Any) -> str:
        with pytest.raises(InferenceServerException) as caught:
            self.grpc.edit(edit_inputs(SOURCE, MASK, **lora_settings(((name, 1.0),), **more)))
        return str(caught.value)


def drawn(path: Path) -> None:
    """A LoRA that changes pictures visibly, and is another one in each run."""
    tensors = lora(LAYERS, rank=8)
    write(path, {name: array * np.float32(0.15) for name, array in tensors.items()})


TEXT: dict[str, tuple[int, int]] = {
    "text_model.encoder.layers.0.self_attn.q_proj": (64, 64),
    "text_model.encoder.layers.1.mlp.fc1": (64, 128),
}
"""Layers of the demo model's CLIP, inputs and outputs."""


def drawn_for_text(path: Path) -> None:
    """A LoRA of the text encoder alone."""
    tensors = lora(TEXT, rank=8, prefix="text_encoder.")
    write(path, {name: array * np.float32(0.5) for name, array in tensors.items()})


@pytest.fixture(scope="module")
def site(demo: Clone) -> Iterator[Site]:
    folder = demo.adapters
    for name in ("warm", "cold"):
        drawn(folder / f"{name}.safetensors")
    drawn_for_text(folder / "words.safetensors")
    grpc_url = f"127.0.0.1:{demo.router + 1}"
    with closing(Grpc(grpc_url)) as grpc:
        served = Site(folder, grpc, grpc_url, f"http://127.0.0.1:{demo.router}")
        for name in ("warm", "cold", "words"):
            eventually(f"{name} is listed", lambda name=name: _answer(lambda: served.edited(name)))
        yield served


@cache
def pipeline_of(folder: Path, loras: Loras) -> Any:
    from diffusers import FluxFillPipeline

    pipeline = FluxFillPipeline.from_pretrained(DEMO)
    pipeline.set_progress_bar_config(disable=True)
    for name, _ in loras:
        pipeline.load_lora_weights(folder / f"{name}.safetensors", adapter_name=name)
    if loras:
        pipeline.set_adapters([name for name, _ in loras], [scale for _, scale in loras])
    return pipeline


def expected(folder: Path, seed: int, loras: Loras) -> Pixels:
    pipeline = pipeline_of(folder, loras)
    settings = EditSettings(num_inference_steps=STEPS, guidance_scale=30.0)
    length = 16
    images = diffusers_edit(
        pipeline, SOURCE, MASK, "a red star", settings, seed, max_sequence_length=length
    )
    return np.asarray(images[0])


def test_a_mix_of_loras_in_one_batch_is_what_diffusers_makes_of_each_edit(site: Site) -> None:
    pending = [
        site.grpc.begin(edit_inputs(SOURCE, MASK, **lora_settings(loras, seed=seed)))
        for seed, loras in enumerate(MIX)
    ]
    edit = MASK > 0
    for seed, (loras, answer) in enumerate(zip(MIX, pending, strict=True)):
        image, meta = answer.wait(120)
        edited, reference = pixels(image), expected(site.folder, seed, loras)
        assert np.array_equal(edited[~edit], SOURCE[~edit])
        difference = np.abs(edited[edit].astype(int) - reference[edit])
        assert difference.max() <= 2, loras  # levels: rounding at another batch shape
        used = [(name, scale) for name, scale in loras if scale]
        if not used:
            assert "loras" not in meta
            continue
        assert [(lora["name"], lora["scale"]) for lora in meta["loras"]] == used
        assert meta["loras_from_step"] == 0
        plain = expected(site.folder, seed, ())
        assert np.abs(reference[edit].astype(int) - plain[edit]).max() > 8, "no visible LoRA"


def test_cached_activations_are_the_adapters_own(site: Site) -> None:
    """An edit's entries depend on its LoRAs: those of others are no hit, its own are."""
    loras: Loras = (("warm", 0.9),)
    _, plain = site.grpc.edit(edit_inputs(SOURCE, MASK, **lora_settings((), cache="require")))
    _, first = site.grpc.edit(edit_inputs(SOURCE, MASK, **lora_settings(loras, cache="auto")))
    image, hit = site.grpc.edit(edit_inputs(SOURCE, MASK, **lora_settings(loras, cache="require")))
    repeat_image, _ = site.grpc.edit(
        edit_inputs(SOURCE, MASK, **lora_settings(loras, cache="require"))
    )
    assert (plain["cache"], first["cache"], hit["cache"]) == ("hit", "own", "hit")
    assert hit["computed_tokens"] < first["computed_tokens"]
    assert image == repeat_image


def test_bad_files_are_refused_by_name_and_hurt_no_other_edit(site: Site) -> None:
    good = (site.folder / "warm.safetensors").read_bytes()
    (site.folder / "cut.safetensors").write_bytes(good[: len(good) // 2])
    (site.folder / "text.safetensors").write_bytes(b"no weights at all" * 100)
    write(site.folder / "other.safetensors", lora({"down_blocks.0.proj_in": (8, 8)}))
    concurrent_edit = site.grpc.begin(
        edit_inputs(SOURCE, MASK, **lora_settings((("cold", 1.0),), seed=9))
    )

    def lists_problem(name: str, text: str) -> bool:
        return text in site.refused(name)

    for name in ("cut", "text", "other"):
        eventually(f"{name} is listed", lambda name=name: lists_problem(name, "[INVALID_REQUEST]"))
        assert "SETTINGS.loras[0]" in site.refused(name)
    assert "[ADAPTER_NOT_FOUND] SETTINGS.loras[0].name" in site.refused("nobody")
    assert concurrent_edit.wait(60)[1]["loras"][0]["name"] == "cold"


def test_openai_s_clients_name_loras_too(site: Site) -> None:
    def body(loras: Loras) -> dict[str, Any]:
        settings = {**lora_settings(loras, seed=3, cache="off"), "cache": "off"}
        return {**settings, "loras": json.dumps(settings["loras"])}

    def openai_edit(loras: Loras) -> Pixels:
        with OpenAI(base_url=f"{site.http}/v1", api_key="none") as client:
            answer = client.images.edit(
                image=("a.png", encode(SOURCE)),
                mask=("m.png", png_of_alpha(MASK)),
                prompt="a red star",
                extra_body=body(loras),
            )
        assert answer.data
        return pixels(base64.b64decode(answer.data[0].b64_json or ""))

    loras: Loras = (("warm", 0.8),)
    image, _ = site.grpc.edit(edit_inputs(SOURCE, MASK, **lora_settings(loras, seed=3)))
    assert np.abs(openai_edit(loras).astype(int) - pixels(image)).max() <= 1
    with pytest.raises(NotFoundError, match=r"there is no adapter nobody"):
        openai_edit((("nobody", 1.0),))


def png_of_alpha(mask: Pixels) -> bytes:
    """Transparent where the edit is."""
    return encode(np.dstack([SOURCE, 255 - mask]))


def test_a_file_that_is_replaced_is_another_adapter(site: Site) -> None:
    path = site.folder / "turning.safetensors"
    drawn(path)
    inputs = edit_inputs(SOURCE, MASK, **lora_settings((("turning", 1.0),), seed=5))

    def edited() -> tuple[bytes, dict[str, Any]]:
        return site.grpc.edit(inputs)

    eventually("it is listed", lambda: _answer(edited))
    image_before, first = edited()
    drawn(path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)
    eventually("the new file is served", lambda: edited()[1]["loras"] != first["loras"])
    image_after, _ = edited()
    assert np.abs(pixels(image_after).astype(int) - pixels(image_before)).max() > 8


LISTING = ("[ADAPTER_NOT_FOUND]", "is still being listed")
"""In the messages of edits whose LoRA has just come."""
SENTENCES = (
    "has just been replaced", "cannot be fetched now", "is cut short", "is not a safetensors file",
    "too short for a safetensors file", "is gone", "there is no adapter",
)  # fmt: skip
"""In the messages of edits whose LoRA is being replaced, which end when it is listed again."""


def _answer(ask: Any, passing: tuple[str, ...] = LISTING) -> Any:
    """Return the result of `ask`; None while it fails with one of these messages."""
    try:
        return ask()
    except InferenceServerException as error:
        if any(part in str(error) for part in passing):
            return None
        raise


REPLACED_S = 180.0
"""For how long at most: until both files have been served, and each way was gone."""


def test_files_replaced_in_use_give_one_file_s_picture_or_a_sentence(site: Site) -> None:
    """By a rename, as files should be, and written over in place, half of it late; beside edits
    that never stop. No answer is of a mixture, and edits without the file notice nothing.
    """
    path, inputs = site.folder / "swapped.safetensors", {}
    drawn(path)
    files = [path.read_bytes()]
    drawn(path)
    files.append(path.read_bytes())
    digests = [hashlib.sha256(raw).hexdigest() for raw in files]
    for name in ("swapped", "warm"):
        more = lora_settings(((name, 1.0),), seed=5, reproducible=True)
        inputs[name] = edit_inputs(SOURCE, MASK, **more)
    eventually("it is listed", lambda: _answer(lambda: site.grpc.edit(inputs["swapped"])))
    warm_image, _ = site.grpc.edit(inputs["warm"])
    over, pictures, errors = threading.Event(), dict[str, set[bytes]](), list[str]()
    answers = Counter[str]()

    def ask(name: str) -> None:
        with closing(Grpc(site.grpc_url)) as grpc:
            while not over.is_set():
                try:
                    picture, meta = grpc.edit(inputs[name])
                except InferenceServerException as error:
                    errors.append(str(error))
                    continue
                [lora] = meta["loras"]
                pictures.setdefault(f"{name} {lora['digest']}", set()).add(picture)
                answers[lora["digest"]] += 1

    askers = [threading.Thread(target=ask, args=(n,)) for n in ("swapped", "swapped", "warm")]
    for item in askers:
        item.start()
    end, turn = time.monotonic() + REPLACED_S, 0
    while time.monotonic() < end and (turn < 8 or len(pictures) < 3):
        raw = files[turn % 2]
        if turn % 4 < 2:
            path.with_suffix(".new").write_bytes(raw)
            os.replace(path.with_suffix(".new"), path)
        else:
            with path.open("wb") as file:
                file.write(raw[: len(raw) // 2])
                file.flush()
                time.sleep(0.3)
                file.write(raw[len(raw) // 2 :])
        digest = digests[turn % 2]
        turn += 1
        if turn % 4 > 1:
            time.sleep(0.7)
            continue
        count, stays_until = answers[digest], time.monotonic() + 8.0  # or until it is served
        while answers[digest] == count and time.monotonic() < stays_until:
            time.sleep(0.1)
    over.set()
    for item in askers:
        item.join()
    wrong = [line for line in errors if not any(part in line for part in SENTENCES)]
    assert not wrong, wrong[:3]
    assert pictures.pop(next(key for key in pictures if key.startswith("warm"))) == {warm_image}
    assert {key.removeprefix("swapped ") for key in pictures} <= set(digests)
    assert all(len(item) == 1 for item in pictures.values()), "one file, one picture"
    assert len(pictures) == 2 == len(set.union(*pictures.values())), "both files were served"
    last = digests[(turn - 1) % 2]

    def settled() -> bool:
        meta: Any = site.grpc.edit(inputs["swapped"])[1]
        return bool(meta["loras"][0]["digest"] == last)

    eventually("the last file is served", lambda: _answer(settled, LISTING + SENTENCES))
