"""Files of IP-Adapters that fit the served model are found; others are refused by name and key."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from safetensors.numpy import load_file, save_file

from maskserve_common.config import Config, ConfigError
from maskserve_common.contracts.request import ResolvedIpAdapter
from maskserve_common.contracts.settings import EditSettings, IpAdapterSetting, parse_settings
from maskserve_common.errors import AdapterNotFound, EngineFailed, InvalidRequest
from maskserve_engine.adapters.ip_adapter import IpAdapterEncoder
from maskserve_engine.batch.picture_tokens import PICTURE_KEYS
from maskserve_engine.families.specs import load_spec
from maskserve_engine.spec.ip_adapters import LAYOUTS, IpAdapters
from maskserve_triton.accept import accept_edit
from maskserve_triton.preprocess import prepare_edit
from tests.fakes.ip_adapters import PROJECTED, SIDE, build_image_encoder, build_ip_adapter
from tests.fakes.jobs import config_of
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.pictures import encode, scene


class Site:
    def __init__(self, model: Path, folder: Path) -> None:
        self.spec, self.folder = load_spec(str(model), 0), folder
        self.config = config_of(model, ip_adapters={"folder": str(folder)})
        build_image_encoder(folder / "image_encoder")
        assert self.spec.ip_adapters is not None
        for form in LAYOUTS[self.spec.ip_adapters.layout].forms:
            build_ip_adapter(folder / f"{form}.safetensors", self.spec, form)
        self.files = IpAdapters(self.config, self.spec)

    def changed(self, **arrays: tuple[int, ...] | None) -> str:
        """Write the plain file with other shapes, or without tensors, and return its name."""
        tensors = load_file(self.folder / "plain.safetensors")
        for name, shape in arrays.items():
            name = name.replace("__", ".")
            if shape is None:
                del tensors[name]
            else:
                tensors[name] = np.zeros(shape, np.float32)
        save_file(tensors, self.folder / "changed.safetensors")
        return "changed"


@pytest.fixture
def site(tiny_unets: dict[str, Path], tmp_path: Path) -> Site:
    return Site(tiny_unets["sd-base"], tmp_path)


def test_both_forms_are_found(site: Site) -> None:
    assert [site.files.find(name).problem for name in ("plain", "plus")] == ["", ""]
    assert site.files.sizes.side == SIDE


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"ip_adapter__1__to_k_ip__weight": None}, "has no ip_adapter.1.to_k_ip.weight"),
        (
            {"ip_adapter__3__to_v_ip__weight": (7, 32)},
            r"its ip_adapter.3.to_v_ip.weight is \(7, 32",
        ),
        (
            {"ip_adapter__1__to_k_ip__weight": (32, 64)},
            r"is for another model: .* expected \(32, 32",
        ),
        ({"ip_adapter__99__to_k_ip__weight": (32, 32)}, "has ip_adapter.99.to_k_ip.weight, which"),
        ({"image_proj__proj__weight": (128, 99)}, r"its image_proj.proj.weight is \(128, 99\)"),
        ({"image_proj__proj__weight": None}, "has no image_proj.proj.weight"),
        ({"image_proj__proj__weight": ()}, r"its image_proj.proj.weight is \(\)"),
        ({"image_proj__latents": ()}, "has no image_proj.proj_in.weight"),
    ],
)
def test_a_file_for_another_model_is_refused_by_its_key(
    site: Site, arrays: dict[str, tuple[int, ...] | None], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"SETTINGS.ip_adapter.name: .*changed.*{message}"):
        site.files.find(site.changed(**arrays))


FACES = {
    "FaceID": ("proj.0.weight", "proj.2.weight"),
    "FaceID plus": ("proj.0.weight", "perceiver_resampler.proj_in.weight"),
    "full face": ("proj.0.weight", "proj.3.weight"),
}


@pytest.mark.parametrize("form", FACES)
def test_a_form_for_faces_is_refused_by_its_name(site: Site, form: str) -> None:
    tensors = load_file(site.folder / "plain.safetensors")
    del tensors["image_proj.proj.weight"]
    tensors |= {f"image_proj.{name}": np.zeros((4, 4), np.float32) for name in FACES[form]}
    save_file(tensors, site.folder / "face.safetensors")
    sentence = f"face.safetensors has the form {form}, which is not served .*; served: plain and"
    with pytest.raises(InvalidRequest, match=sentence):
        site.files.find("face")


@pytest.fixture
def flux(tiny_inpaint: Path, tmp_path: Path) -> Site:
    return Site(tiny_inpaint, tmp_path / "flux")


def test_unets_and_flux_refuse_each_others_files(site: Site, flux: Site) -> None:
    assert flux.files.find("plain").problem == ""
    for mine, other in ((site, flux), (flux, site)):
        build_ip_adapter(mine.folder / "other.safetensors", other.spec, "plain")
        with pytest.raises(InvalidRequest, match=r"no IP-Adapter for this model: it has no .*proj"):
            mine.files.find("other")
    name = "double_blocks__0__processor__ip_adapter_double_stream_k_proj__bias"
    with pytest.raises(InvalidRequest, match=f"has no {name.replace('__', '.')}"):
        flux.files.find(flux.changed(**{name: None}))


def test_a_file_of_flux_may_have_16_tokens(flux: Site) -> None:
    takes = flux.spec.ip_adapters
    assert takes is not None
    shapes = {"weight": (16 * takes.text, PROJECTED), "bias": (16 * takes.text,)}
    changes = {f"ip_adapter_proj_model__proj__{part}": shape for part, shape in shapes.items()}
    file = flux.files.find(flux.changed(**changes))
    encoder = IpAdapterEncoder(flux.config, flux.spec)
    [arrays, _] = encoder.encode(file, np.zeros((SIDE, SIDE, 3), np.uint8))
    assert arrays[PICTURE_KEYS].shape == (16, 2 * sum(takes.widths))
    bad = {"ip_adapter_proj_model__proj__weight": (8 * takes.text, PROJECTED)}
    with pytest.raises(InvalidRequest, match="is for another model: its ip_adapter_proj_model"):
        flux.files.find(flux.changed(**bad))


def test_a_file_that_is_cut_short_is_refused_and_served_once_it_is_whole(site: Site) -> None:
    whole = (site.folder / "plain.safetensors").read_bytes()
    file = site.folder / "short.safetensors"
    for content in (b"", whole[:5], whole[:200], whole[:-1], struct.pack("<Q", 2**60) + b"{}"):
        file.write_bytes(content)
        with pytest.raises(InvalidRequest, match=r"IP-Adapter short\.safetensors "):
            site.files.find("short")
    file.write_bytes(whole)
    assert site.files.find("short").name == "short"


@pytest.mark.parametrize("name", ["other", "..", "image_encoder"])
def test_an_unknown_name_is_not_found(site: Site, name: str) -> None:
    with pytest.raises(AdapterNotFound, match=f"there is no IP-Adapter {name}"):
        site.files.find(name)


def test_an_edits_picture_is_prepared_without_a_look_at_the_folder(site: Site) -> None:
    settings = EditSettings(ip_adapter=IpAdapterSetting(name="plus", scale=0.5), request_id="r")
    accepted = accept_edit(settings, b"", site.spec, site.config, ip_adapters=site.files)
    assert accepted.ip_adapter == ResolvedIpAdapter(name="plus", scale=0.5, side=SIDE)
    shutil.rmtree(site.folder)
    source, mask = scene(64, 64), np.full((64, 64), 255, np.uint8)
    ready = prepare_edit(
        encode(source), encode(mask), accepted, site.spec, site.config, references=[encode(source)]
    )
    assert ready.request.ip_adapter == accepted.ip_adapter
    assert ready.request.ip_picture is not None
    assert ready.request.ip_picture.size == (SIDE, SIDE)


def test_a_stage_service_with_another_file_of_the_name_says_so(site: Site) -> None:
    """A worker without a service reads no file for a digest."""
    assert site.files.find("plain").content == ""
    stages = structs.replace(site.config.stages, service="localhost:1")
    worker = IpAdapters(structs.replace(site.config, stages=stages), site.spec)
    service = IpAdapterEncoder(site.config, site.spec)
    content = worker.find("plain").content
    edit = ResolvedIpAdapter(name="plain", content=content)
    assert service.find(edit).name == "plain"
    build_ip_adapter(site.folder / "plain.safetensors", site.spec, "plain", seed=1)
    assert worker.find("plain").content not in ("", content)
    with pytest.raises(EngineFailed, match="the stage service has another IP-Adapter plain"):
        service.find(edit)


def test_a_worker_without_them_and_another_family_refuse_the_setting(site: Site) -> None:
    settings = EditSettings(ip_adapter=IpAdapterSetting(name="plain"))
    with pytest.raises(InvalidRequest, match="IP-Adapters are not served here"):
        accept_edit(settings, b"", FILL_SPEC, Config())
    with pytest.raises(InvalidRequest, match="IP-Adapters are not served here"):
        IpAdapters(Config(), site.spec).find("plain")
    with pytest.raises(InvalidRequest, match="the served model takes no IP-Adapters"):
        IpAdapters(site.config, FILL_SPEC).find("plain")


@pytest.mark.parametrize("scale", ["11", "-10.5", '"x"'])
def test_a_scale_outside_is_refused(scale: str) -> None:
    raw = f'{{"ip_adapter": {{"name": "x", "scale": {scale}}}}}'.encode()
    with pytest.raises(InvalidRequest, match=r"SETTINGS\.ip_adapter\.scale: "):
        parse_settings(raw)


def test_a_folder_without_an_image_encoder_is_named(site: Site) -> None:
    adapters = structs.replace(site.config.ip_adapters, image_encoder=str(site.folder / "none"))
    config = structs.replace(site.config, ip_adapters=adapters)
    with pytest.raises(ConfigError, match=r"\[ip_adapters\] image_encoder: cannot load .*none"):
        IpAdapterEncoder(config, site.spec)
