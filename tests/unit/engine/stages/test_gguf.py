"""GGUF files in the transformer's place: against diffusers' own reader of the same file."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maskserve_common.config import Config, ConfigError
from maskserve_common.errors import InvalidRequest
from maskserve_common.files.digests import file_digest
from maskserve_engine.adapters.lora_file import read_lora
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.fitting.card_table import Shapes, check_fits
from maskserve_engine.fitting.memory import denoiser_bytes
from maskserve_engine.layers.linear import linear
from maskserve_engine.stages.quantise import form_in_words
from maskserve_engine.stages.revision import model_revision
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.lora_header import BadAdapter
from maskserve_lora.store import AdapterStore, describe_file
from tests.fakes.gguf_file import write_gguf
from tests.fakes.jobs import config_of, encode_case, random_case, tolerance
from tests.fakes.loras import OTHER_MODEL, lora, of_model, write
from tests.fakes.pipelines import diffusers_latents
from tests.support.draws import fresh_rng

gguf: Any = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def file(tiny_fill: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tiny_fill, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def config(tiny_fill: Path, file: Path) -> Config:
    return config_of(tiny_fill, model={"gguf": str(file), "outside_noise": "edit"})


def of_diffusers(folder: Path, file: Path) -> Any:
    from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig

    return FluxTransformer2DModel.from_single_file(
        str(file),
        config=str(folder),
        subfolder="transformer",
        quantization_config=GGUFQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32,
    )


@torch.inference_mode()
def test_products_equal_diffusers_layers(tiny_fill: Path, file: Path) -> None:
    model = of_diffusers(tiny_fill, file)
    attention = model.transformer_blocks[0].attn
    layers = attention.to_q, attention.to_k, attention.to_v
    x = torch.randn(7, attention.to_q.in_features)
    expected = torch.cat([layer(x) for layer in layers], -1)
    joined = linear(*layers)
    torch.testing.assert_close(joined(x), expected)
    torch.testing.assert_close(joined.columns(30, 70)(x), expected[:, 30:70])
    assert tuple(joined.columns(30, 70)(x[:0]).shape) == (0, 40)


def test_dense_rows_equal_the_pipeline_with_the_same_file(
    tiny_fill: Path, file: Path, config: Config
) -> None:
    from diffusers import FluxFillPipeline

    pipeline: Any = FluxFillPipeline.from_pretrained(
        tiny_fill, transformer=of_diffusers(tiny_fill, file)
    )
    pipeline.set_progress_bar_config(disable=True)
    encoder, adapter = load_encoder(config), load_adapter(config)
    case = random_case(fresh_rng(), num_inference_steps=3)
    row: Any = adapter.dense_row(encode_case(encoder, case, "r"))
    while row.step < row.steps:
        adapter.step([row], None)
    expected = diffusers_latents(pipeline, case)
    assert np.abs(row.result().array() - expected).max() <= tolerance(expected)


def test_bytes_are_counted_as_they_are_held(tiny_fill: Path, config: Config) -> None:
    adapter = load_adapter(config)
    assert denoiser_bytes(config, ["bf16", "int8"]) == {
        "bf16": pytest.approx(adapter.weight_bytes, rel=0.01)
    }
    assert adapter.weight_bytes < 0.7 * load_adapter(config_of(tiny_fill)).weight_bytes
    shapes = Shapes(config)
    assert list(shapes.weights) == ["bf16"]
    with pytest.raises(ConfigError, match="does not fit the device"):
        check_fits(config, 2**16)


@pytest.fixture
def bare(tiny_fill: Path, tmp_path: Path) -> Path:
    """The model's folder without its transformer's weights."""

    def ignored(at: str, _: list[str]) -> list[str]:
        return ["diffusion_pytorch_model.safetensors"] if Path(at).name == "transformer" else []

    return Path(shutil.copytree(tiny_fill, tmp_path / "bare", ignore=ignored))


def test_the_folders_own_weights_need_not_be_there(bare: Path, file: Path) -> None:
    assert load_adapter(config_of(bare, model={"gguf": str(file)})).weight_bytes


def test_a_file_with_its_publishers_names_has_the_folders_layers(
    tiny_fill: Path, bare: Path, tmp_path: Path
) -> None:
    """Diffusers reads these names in files of FLUX.1's own width alone, so shapes are compared."""
    folder = BaseLayers.of_folder(tiny_fill)
    file = write_gguf(tiny_fill, tmp_path / "x.gguf", published=folder.published)
    assert BaseLayers.of_folder(bare, str(file)).shapes == folder.shapes


def test_loras_are_for_the_files_layers(
    tiny_fill: Path, bare: Path, file: Path, tmp_path: Path
) -> None:
    """At all doors: `check`, the catalogue by which edits are accepted, and what runs them."""
    from diffusers import FluxTransformer2DModel

    folder = BaseLayers.of_folder(tiny_fill)
    read = of_diffusers(tiny_fill, file)
    net = FluxTransformer2DModel.from_pretrained(tiny_fill / "transformer")
    base = BaseLayers.of_folder(bare, str(file))
    layers = {name for name, module in read.named_modules() if isinstance(module, torch.nn.Linear)}
    assert base.shapes == {
        **folder.shapes,
        "denoiser": {name: folder.shape("denoiser", name) for name in layers},
    }
    write(tmp_path / "store" / "fits.safetensors", of_model(net, 3))
    write(tmp_path / "store" / "other.safetensors", lora(OTHER_MODEL))
    config = config_of(
        bare,
        model={"gguf": str(file)},
        adapters={"store": str(tmp_path / "store")},
        runtime_dir=str(tmp_path),
    )
    store = AdapterStore(config)
    store.catalogue.scan()
    checked = describe_file(tmp_path / "store" / "fits.safetensors", bare, str(file))
    assert list(store.catalogue.find("fits").parts) == checked["parts"] == ["denoiser"]
    with pytest.raises(InvalidRequest, match="is for another model"):
        store.catalogue.find("other")
    fetched = store.fetch("fits", store.catalogue.find("fits").version)
    factors = read_lora(fetched.path, base, str(bare))["denoiser"]
    assert factors.keys() == layers
    load_adapter(config).low_rank(factors)
    store.close()


def test_a_folder_without_a_denoiser_has_no_lora(bare: Path, tmp_path: Path) -> None:
    """It cannot be told what fits, so that no door takes one."""
    write(tmp_path / "store" / "x.safetensors")
    with pytest.raises(BadAdapter, match="has no safetensors files of a transformer"):
        describe_file(tmp_path / "store" / "x.safetensors", bare)
    config = config_of(bare, adapters={"store": str(tmp_path / "store")}, runtime_dir=str(tmp_path))
    store = AdapterStore(config)
    store.catalogue.scan()
    with pytest.raises(InvalidRequest, match="has no safetensors files of a transformer"):
        store.catalogue.find("x")
    store.close()


def test_entries_of_one_file_are_not_anothers(tiny_fill: Path, file: Path, tmp_path: Path) -> None:
    other = write_gguf(tiny_fill, tmp_path / "other.gguf", ("Q8_0",))
    path = Path(shutil.copy(other, tmp_path / "same.gguf"))
    words = [
        form_in_words(config_of(tiny_fill, model={"gguf": str(gguf_file)} if gguf_file else {}))
        for gguf_file in (None, file, other, path)
    ]
    assert words[2] == words[3]
    assert len({model_revision(tiny_fill, form) for form in words}) == 3
    # A file that lies in the model folder and what is kept of the folder's own leave one another.
    folder = tmp_path / "model"
    shutil.copytree(tiny_fill, folder)
    inside = Path(shutil.copy(other, folder / "t.gguf"))
    digest, before = file_digest(folder, inside.name), model_revision(folder)
    st_mtime_ns = (folder / ".maskserve-digests.json").stat().st_mtime_ns
    assert (file_digest(folder, inside.name), model_revision(folder)) == (digest, before)
    assert (folder / ".maskserve-digests.json").stat().st_mtime_ns == st_mtime_ns
    write_gguf(tiny_fill, inside, ("Q4_0",))
    assert file_digest(folder, inside.name) != digest


def test_what_cannot_be_is_said(
    tiny_fill: Path,
    tiny_unets: dict[str, Path],
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(folder: Path = tiny_fill, **model: Any) -> str:
        with pytest.raises(ConfigError) as error:
            load_adapter(config_of(folder, model={"gguf": str(file), **model}))
        return str(error.value)

    assert "[model] gguf: a setting of FLUX models" in refused(tiny_unets["sdxl-base"])
    assert '[model] gguf: not with weights = "nf4"' in refused(weights="nf4")
    assert "[model] gguf: not with fuse_loras" in refused(fuse_loras=["a.safetensors"])
    check_fits(config_of(tiny_fill, model={"gguf": str(file), "weights": "nf4"}), 0)
    none = tmp_path / "none.gguf"
    assert f"{none} is not a file that ends in .gguf" in refused(gguf=str(none))
    none.write_bytes(b"nothing of the sort")
    assert f"{none} is not a GGUF file of this model: " in refused(gguf=str(none))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:4000])
    assert f"{cut} is not a GGUF file of this model: " in refused(gguf=str(cut))
    writer = gguf.GGUFWriter(tmp_path / "few.gguf", "flux")
    writer.add_tensor("x_embedder.bias", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "few.gguf" in refused(gguf=str(tmp_path / "few.gguf"))
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    assert "needs gguf: in the checkout, pip install -e '.[quantised]'" in refused()


def named(
    file: Path, tensors: int = 0, values: bytes = b"", count: int = 0, rest: bytes = b""
) -> Path:
    """A file with a header that says so."""
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + values + rest)
    return file


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def tensor(sides: list[int], form: int, offset: int, name: bytes = b"x") -> bytes:
    shape = struct.pack(f"<I{len(sides)}Q", len(sides), *sides)
    return struct.pack("<Q", len(name)) + name + shape + struct.pack("<IQ", form, offset)


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "an array without end": (
        {"values": key(b"a", 9, struct.pack("<IQ", 8, 2**60)), "count": 1}, "than 4194304 values",
    ),
    "numbers without end": (
        {"values": key(b"a", 9, struct.pack("<IQ", 6, 2**21)), "count": 1}, "cut short",
    ),
    "values without end": ({"count": 2**62}, "more than 4194304 values"),
    "tensors without end": ({"tensors": 2**40}, "names 1099511627776 tensors"),
    "a name without end": ({"tensors": 1, "rest": struct.pack("<Q", 2**50)}, "a name of"),
    "arrays in arrays": (
        {"values": key(b"a", 9, struct.pack("<IQ", 9, 1) * 9), "count": 1}, "metadata of type 9",
    ),
    "an unknown type": ({"values": key(b"a", 77, b""), "count": 1}, "metadata of type 77"),
    "an alignment of 3": (
        {"values": key(b"general.alignment", 4, struct.pack("<I", 3)), "count": 1},
        "alignment of 3",
    ),
    "an unknown form": ({"tensors": 1, "rest": tensor([4], 99, 0)}, "in form 99"),
    "sides beyond all numbers": (
        {"tensors": 1, "rest": tensor([2**62] * 4, 0, 0)}, "a tensor is not whole",
    ),
    "five sides": ({"tensors": 1, "rest": tensor([1] * 5, 0, 0)}, "of 5 sides"),
    "a tensor beyond the end": ({"tensors": 1, "rest": tensor([4], 0, 2**40)}, "not whole"),
    "blocks that are not whole": ({"tensors": 1, "rest": tensor([33], 8, 0)}, "in form 8"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_that_says_too_much_is_refused_in_a_sentence(
    name: str, tiny_fill: Path, tmp_path: Path
) -> None:
    """The library would go by it, for ever."""
    header, why = HOSTILE[name]
    file = named(tmp_path / "x.gguf", **header)
    config = config_of(tiny_fill, model={"gguf": str(file)})
    with pytest.raises(ConfigError, match=rf"\[model\] gguf: .*is not a GGUF file.*{why}"):
        denoiser_bytes(config, ("bf16",))
    with pytest.raises(ConfigError, match=why):
        load_adapter(config)
