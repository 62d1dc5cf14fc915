"""`maskserve check`: what people have on their disks, and the sentences with which serve refuses
the same.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from maskserve_client.cli import main
from maskserve_common.config import ConfigError
from maskserve_engine.checkpoints.folder import make_folder
from maskserve_engine.checkpoints.request import CheckpointRequest
from maskserve_engine.families.licences import published_licence
from maskserve_engine.families.specs import FAMILIES as SERVED
from maskserve_engine.families.specs import load_spec
from maskserve_engine.families.unserved import UNSERVED
from maskserve_engine.fitting.model_report import report
from maskserve_engine.spec.ip_adapters import shapes_of
from maskserve_serving import check as module
from maskserve_serving.check import checked
from maskserve_serving.checkpoint import CheckpointParts
from maskserve_serving.errors import ServeError
from maskserve_serving.source import with_model
from tests.fakes.checkpoint_files import weights_of, write_checkpoint
from tests.fakes.control_nets import made_nets
from tests.fakes.ip_adapters import HIDDEN, PROJECTED, build_ip_adapter
from tests.fakes.loras import OTHER_MODEL, lora, write
from tests.fakes.tiny_families import FAMILIES


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["z-image"](tmp_path_factory.mktemp("models") / "z-image")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are made here: a process for each takes seconds to import its libraries."""
    monkeypatch.setattr(module, "report_of", report)


def test_a_folder_is_checked_by_the_command(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(base), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["served"]
    assert "of Z-Image models" in values["it"]
    assert values["jobs"] == ["inpaint", "edit", "generate"]
    assert values["bytes"].keys() == {"transformer", "text_encoder", "vae"}
    assert [card["gigabytes"] for card in values["cards"]] == [16, 24, 40, 48, 80]
    assert values["cards"][0]["rows"] > 0
    assert values["licence"].startswith("Apache 2.0")


def test_a_folder_with_weights_is_reported_without_slow_imports(base: Path, tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_bytes(msgspec.json.encode(CheckpointRequest("", str(base))))
    code = """
import sys
from maskserve_engine.fitting.model_report import main
assert main(sys.argv) == 0
assert sys.modules["transformers"] is None
assert "torch._dynamo.convert_frame" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(request)], check=True)


@pytest.mark.usefixtures("in_process")
def test_a_folder_without_a_part_is_refused_as_serve_does(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(base, folder, symlinks=True)
    for file in (folder / "vae").glob("*.safetensors"):
        file.unlink()
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    check = checked(str(folder), CheckpointParts())
    [sentence] = check.missing
    with pytest.raises(ServeError) as refusal:
        with_model({}, str(folder))
    assert str(refusal.value) == sentence
    assert "has no weights of its vae (AutoencoderKL)" in sentence
    assert check.licence == "apache-2.0 (by its README.md)"


@pytest.mark.usefixtures("in_process")
def test_a_checkpoint_says_what_is_missing_and_which_flag_names_it(
    base: Path, tmp_path: Path
) -> None:
    file = write_checkpoint("z-image", base, tmp_path / "z.safetensors", "fp8 scaled")
    alone = checked(str(file), CheckpointParts())
    assert alone.it == "ZImageTransformer2DModel, a checkpoint file"
    assert alone.form == "fp8 scaled"
    assert alone.missing[0].startswith("--base: the folder or hub id")
    bare = tmp_path / "bare"
    shutil.copytree(base, bare)
    for weights in (bare / "vae").glob("*.safetensors"):
        weights.unlink()
    [sentence] = checked(str(file), CheckpointParts(str(bare))).missing
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError) as refusal:
        make_folder(CheckpointRequest(str(file), str(bare), folder=str(tmp_path / "out")))
    assert str(refusal.value) == sentence
    whole = checked(str(file), CheckpointParts(str(bare), vae=str(base / "vae")))
    assert whole.served
    assert whole.jobs == ["inpaint", "edit", "generate"]
    assert len(whole.cards) == 5


@pytest.mark.parametrize("pipeline", UNSERVED)
def test_a_model_that_is_not_served_says_why_as_serve_does(tmp_path: Path, pipeline: str) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    check = checked(str(tmp_path), CheckpointParts())
    with pytest.raises(ServeError) as refusal:
        with_model({}, str(tmp_path))
    assert str(refusal.value) == check.problem
    assert check.problem.endswith(UNSERVED[pipeline])


def test_a_part_of_a_model_names_its_flag_as_serve_does(base: Path, tmp_path: Path) -> None:
    for part, flag in (("vae", "--vae"), ("text_encoder", "--text-encoder")):
        file = tmp_path / f"{part}.safetensors"
        save_file(weights_of(base / part), file)
        check = checked(str(file), CheckpointParts(str(base)))
        assert f"with {flag} {file}" in check.problem
        with pytest.raises(ServeError) as refusal:
            with_model({}, str(file), parts=CheckpointParts(str(base), cache=tmp_path))
        assert str(refusal.value) == check.problem


def test_adapters_and_control_nets(base: Path, tmp_path: Path) -> None:
    write(tmp_path / "flux.safetensors")
    check = checked(str(tmp_path / "flux.safetensors"), CheckpointParts())
    assert check.served
    names = "FLUX.1, FLUX.2, Chroma or LongCat-Image"
    assert check.it == f"a LoRA of rank 4, 3 layers, by its names for {names}"
    other = checked(str(tmp_path / "flux.safetensors"), CheckpointParts(str(base)))
    assert "is for another model: the served one's denoiser has no layer" in other.problem
    write(tmp_path / "unet.safetensors", lora(OTHER_MODEL))
    assert "SDXL or SD 2.1" in checked(str(tmp_path / "unet.safetensors"), CheckpointParts()).it
    with pytest.raises(ServeError, match=r"is an adapter; accepted: .*--fuse-lora"):
        with_model({}, str(tmp_path / "flux.safetensors"), parts=CheckpointParts(str(base)))
    made_nets()["plain"].save_pretrained(tmp_path / "net")
    net = checked(str(tmp_path / "net"), CheckpointParts())
    assert net.served
    assert net.it.startswith("FluxControlNetModel")
    checked_net = checked(str(tmp_path / "net"), CheckpointParts(str(base)))
    assert checked_net.problem.endswith("the served model takes ZImageControlNetModel")


@pytest.mark.usefixtures("in_process")
def test_ip_adapters(base: Path, tiny_unets: dict[str, Path], tmp_path: Path) -> None:
    unet = tiny_unets["sdxl-fill"]
    assert checked(str(base), CheckpointParts()).ip_adapters == "none"
    model = checked(str(unet), CheckpointParts())
    assert model.ip_adapters.startswith("plain and plus, in [ip_adapters] folder; a file's layers")
    spec = load_spec(str(unet), 0)
    for form, width in (("plain", f"an output of width {PROJECTED}"), ("plus", f"{HIDDEN}")):
        file = build_ip_adapter(tmp_path / f"{form}.safetensors", spec, form)
        assert spec.ip_adapters is not None
        assert spec.ip_adapters.numbers == sum(
            math.prod(shape) for name, shape in shapes_of(file).items() if "_ip." in name
        )
        check = checked(str(file), CheckpointParts(str(unet)))
        assert check.served
        assert check.it.startswith(f"an IP-Adapter of the form {form}")
        assert check.ip_adapters.endswith(width)
        other = checked(str(file), CheckpointParts(str(base)))
        assert "takes no IP-Adapters" in other.problem
        other = checked(str(file), CheckpointParts(str(tiny_unets["sd-base"])))
        assert "is for another model: its image_proj." in other.problem
        with pytest.raises(ServeError, match=r"is an IP-Adapter; accepted: .*\[ip_adapters\]"):
            with_model({}, str(file), parts=CheckpointParts(str(base)))


def test_an_ip_adapter_of_flux(tiny_inpaint: Path, tiny_fill: Path, tmp_path: Path) -> None:
    spec = load_spec(str(tiny_inpaint), 0)
    file = build_ip_adapter(tmp_path / "flux.safetensors", spec, "plain")
    check = checked(str(file), CheckpointParts(str(tiny_inpaint)))
    assert check.served
    assert check.it.startswith("an IP-Adapter of the form plain")
    assert "takes no IP-Adapters" in checked(str(file), CheckpointParts(str(tiny_fill))).problem
    save_file({"image_proj.proj.0.weight": torch.ones(2, 2)}, tmp_path / "face.safetensors")
    face = checked(str(tmp_path / "face.safetensors"), CheckpointParts())
    assert face.problem.endswith("has the form FaceID, which is not served; served: plain and plus")


def test_every_served_class_has_a_published_licence() -> None:
    for name, family in SERVED.items():
        for pipeline in family.PIPELINES:
            assert published_licence(name, pipeline), pipeline
