"""`adapters check`, the catalogue that accepts edits and the engine that runs them read the same
layers of a LoRA file, for each family. The layers are diffusers' own.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from safetensors.torch import save_file

from maskserve_common.errors import InvalidRequest
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.spec.model_index import read_model_index
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.lora_header import BadAdapter
from maskserve_lora.store import AdapterStore, describe_file
from tests.fakes.jobs import config_of
from tests.fakes.loras import Arrays, lora, of_model, write
from tests.fakes.tiny_chroma import build_tiny_chroma
from tests.fakes.tiny_flux2 import build_tiny_flux2, build_tiny_flux2_dev
from tests.fakes.tiny_flux3 import build_tiny_flux3
from tests.fakes.tiny_model import build_tiny_model
from tests.fakes.tiny_qwen_image import build_tiny_qwen_image
from tests.fakes.tiny_qwen_image21 import build_tiny_qwen_image21
from tests.fakes.tiny_sd3 import build_tiny_sd3
from tests.fakes.tiny_unet import build_tiny_unet
from tests.fakes.tiny_z_image import build_tiny_z_image
from tests.support.lora_oracle import read

CLIPS = {"FLUX.1": ("text_encoder",), "SD 2.1": ("text_encoder",),
         "SDXL": ("text_encoder", "text_encoder_2"),
         "SD 3.5 large": ("text_encoder", "text_encoder_2"),
         "SD 3.5 medium": ("text_encoder", "text_encoder_2")}  # fmt: skip
"""To which diffusers' pipelines apply LoRAs, by the model."""
MODELS: dict[str, Any] = {
    "FLUX.1": partial(build_tiny_model, semantics="fill"),
    "FLUX.2": build_tiny_flux2,
    "FLUX.2 dev": build_tiny_flux2_dev,
    "FLUX.3": build_tiny_flux3,
    "Qwen-Image": build_tiny_qwen_image,
    "Qwen-Image-2.1": build_tiny_qwen_image21,
    "Z-Image": build_tiny_z_image,
    "Chroma": build_tiny_chroma,
    "SD 3.5 large": build_tiny_sd3,
    "SD 3.5 medium": partial(build_tiny_sd3, medium=True),
    "SD 2.1": partial(build_tiny_unet, xl=False, fill=False),
    "SDXL": partial(build_tiny_unet, xl=True, fill=True),
}
TOOLS = {
    "PEFT": "base_model.model.{}.lora_A.weight",
    "diffusers, of transformers": "transformer.{}.lora_A.weight",
    "diffusers, of UNets": "unet.{}.lora_A.weight",
    "ai-toolkit and ComfyUI": "diffusion_model.{}.lora_A.weight",
    "ComfyUI, of checkpoints": "model.diffusion_model.{}.lora_down.weight",
    "kohya and musubi": "lora_unet_{}.lora_down.weight",
    "OneTrainer": "lora_transformer_{}.lora_down.weight",
    "LyCORIS": "lycoris_{}.lora_down.weight",
    "Lightning": "{}.lora_down.weight",
}
"""Names of the first factor of a layer, by the tools that write them. Those of tools that keep the
publishers' names are in test_published_names.py."""
CLIP_Q = "text_model.encoder.layers.0.self_attn.q_proj"


class Served:
    """A model with what encodes and steps for it, and diffusers' denoiser of the same folder."""

    def __init__(self, name: str, folder: Path) -> None:
        import diffusers

        self.name, self.folder = name, folder
        self.config = config_of(folder, cache={"enabled": name != "SD 3.5 medium"})
        self.encoder, self.adapter = load_encoder(self.config), load_adapter(self.config)
        self.part = "transformer" if (folder / "transformer").is_dir() else "unet"
        kind = getattr(diffusers, read_model_index(folder)[self.part][1])
        self.net = kind.from_pretrained(folder, subfolder=self.part)

    def files(self) -> Arrays:
        """A LoRA of every layer of the denoiser."""
        return of_model(self.net, 3, f"{self.part}.{{}}.lora_A.weight")

    def store(self, folder: Path) -> AdapterStore:
        adapters = structs.replace(self.config.adapters, store=str(folder / "store"))
        store = AdapterStore(
            structs.replace(self.config, adapters=adapters, runtime_dir=str(folder))
        )
        store.catalogue.scan()
        return store


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("models") / "model"
    MODELS[request.param](folder)
    return Served(request.param, folder)


def words(part: str, model: Any) -> Arrays:
    """A LoRA of a text encoder's first layer, as the text encoder's own library names it."""
    names = [name for name, _ in model.named_modules() if name.endswith((".q_proj", ".q"))]
    width = getattr(model.get_submodule(names[0]), "in_features", 32)
    out = getattr(model.get_submodule(names[0]), "out_features", 32)
    return lora({names[0]: (width, out)}, prefix=f"{part}.", seed=2)


def test_edits_apply_to_every_layer_that_diffusers_has(served: Served, tmp_path: Path) -> None:
    base = BaseLayers.of_folder(served.folder)
    clips = CLIPS.get(served.name, ())
    assert base.parts == {"denoiser", *clips}
    assert tuple(served.encoder.text_models) == clips
    write(tmp_path / "x.safetensors", served.files())
    factors = read(tmp_path / "x.safetensors", served.folder)["denoiser"]
    assert len(factors) == len(served.files()) // 2
    served.adapter.low_rank(factors)


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_s_names_of_diffusers_layers_are_those_layers(
    served: Served, tool: str, tmp_path: Path
) -> None:
    form = TOOLS[tool]
    write(tmp_path / "x.safetensors", of_model(served.net, 3, form))
    factors = read(tmp_path / "x.safetensors", served.folder)["denoiser"]
    write(tmp_path / "plain.safetensors", served.files())
    plain = read(tmp_path / "plain.safetensors", served.folder)["denoiser"]
    assert factors.keys() == plain.keys()
    alpha = 0.5 if "lora_down" in form else 1.0  # 1, of rank 2
    for name, (down, up) in plain.items():
        assert np.array_equal(factors[name].down, down)
        assert np.array_equal(factors[name].up, alpha * up)


def test_what_no_edit_can_apply_is_noted_at_every_door(served: Served, tmp_path: Path) -> None:
    """Text encoders' parts, beside the denoiser's and alone."""
    clips = CLIPS.get(served.name, ())
    for part, encoder in served.encoder.text_encoders.items():
        tensors = words(part, encoder.model)
        store = tmp_path / part / "store"
        write(store / "both.safetensors", {**served.files(), **tensors})
        write(store / "alone.safetensors", tensors)
        adapters = served.store(tmp_path / part)
        known = adapters.catalogue.find("both")
        checked = describe_file(store / "both.safetensors", served.folder)
        assert (list(known.parts), list(known.notes)) == (checked["parts"], checked["notes"])
        if part in clips:
            assert known.parts == ("denoiser", part)
            assert known.notes == ()
            assert adapters.catalogue.find("alone").parts == (part,)
        else:
            assert known.parts == ("denoiser",)
            assert "diffusers applies no LoRA to" in known.notes[0]
            with pytest.raises(BadAdapter, match="changes nothing that is served"):
                describe_file(store / "alone.safetensors", served.folder)
            with pytest.raises(InvalidRequest, match="changes nothing that is served"):
                adapters.catalogue.find("alone")
        adapter_file = adapters.fetch("both", known.version)
        parts = read(adapter_file.path, served.folder)
        assert set(parts) == set(known.parts)
        served.adapter.low_rank(parts["denoiser"])
        adapters.close()


def test_a_folder_in_4_bits_has_the_layers_of_the_plain_one(served: Served, tmp_path: Path) -> None:
    """As bitsandbytes writes it: a weight is one column of bytes, its shape stands beside it."""
    config = structs.replace(
        served.config, model=structs.replace(served.config.model, weights="nf4")
    )
    adapter: Any = load_adapter(config)
    packed = {name: x.contiguous() for name, x in adapter.model.state_dict().items()}
    if not any("quant_state" in name for name in packed):
        pytest.skip("a model as narrow has no such layer")
    folder = Path(shutil.copytree(served.folder, tmp_path / "model"))
    for file in (folder / served.part).glob("*.safetensors"):
        file.unlink()
    save_file(packed, folder / served.part / "diffusion_pytorch_model.safetensors")
    quantised, plain = BaseLayers.of_folder(folder), BaseLayers.of_folder(served.folder)
    write(tmp_path / "x.safetensors", served.files())
    result, expected = (
        read(tmp_path / "x.safetensors", model_folder) for model_folder in (folder, served.folder)
    )
    assert result["denoiser"].keys() == expected["denoiser"].keys()
    assert quantised.shapes["denoiser"] == plain.shapes["denoiser"]
    adapter.low_rank(result["denoiser"])


def test_alphas_in_metadata_are_those_of_a_training(served: Served, tmp_path: Path) -> None:
    """Tools leave them there after they multiplied them into the matrices; diffusers reads none."""
    plain, with_metadata = tmp_path / "plain.safetensors", tmp_path / "said.safetensors"
    write(plain, served.files())
    write(with_metadata, served.files(), ss_network_alpha="1", ss_network_dim="2")
    first, second = (read(path, served.folder)["denoiser"] for path in (plain, with_metadata))
    for name, (_, up) in first.items():
        assert np.array_equal(up, second[name].up)
    [note] = describe_file(with_metadata, served.folder)["notes"]
    assert "ss_network_alpha in its metadata is" in note
