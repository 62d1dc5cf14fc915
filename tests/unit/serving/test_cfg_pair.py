"""`--cfg-devices`: what a pair of devices is, and what it does not go with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maskserve_serving.cfg_pair import gpus_of_pair, pair_of, with_pair
from maskserve_serving.errors import ServeError
from maskserve_serving.options import ServeOptions


@pytest.mark.parametrize("devices", ["0,1", "cuda:0, cuda:1", "3,1"])
def test_two_gpus_are_a_pair(devices: str) -> None:
    assert sorted(set(pair_of(devices))) == sorted(pair_of(devices))
    assert all(name.isdecimal() for name in pair_of(devices))


@pytest.mark.parametrize(
    "devices", ["", "0", "0,0", "0,00", "0,1,2", "cpu", "cpu,0", "a,b", "-1,0"]
)
def test_what_is_no_pair_is_a_sentence(devices: str) -> None:
    with pytest.raises(ServeError, match=r"--cfg-devices: .* is not two different GPUs"):
        pair_of(devices)


def test_gpus_are_counted_over_those_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-a,6")
    assert gpus_of_pair("2,1") == "6,GPU-a"
    assert gpus_of_pair("cpu,cpu") is None
    with pytest.raises(ServeError, match="there is no GPU 3; this host has 3"):
        gpus_of_pair("0,3")


def options(**fields: Any) -> ServeOptions:
    return replace(ServeOptions("m", cfg_devices="cpu,cpu"), **fields)


def test_a_pair_is_laid_over_the_configuration(tiny_unets: dict[str, Path]) -> None:
    tables = {"model": {"path": str(tiny_unets["sd-fill"])}, "engine": {"max_rows": 3}}
    config_tables = with_pair(options(devices_per_worker=2), tables)
    assert config_tables["engine"] == {"max_rows": 3, "devices": 2, "policy": "cfg"}
    assert config_tables["model"]["device"] == "cpu"


def test_a_flux_model_with_true_cfg_may_have_one(tiny_inpaint: Path) -> None:
    with_pair(options(), {"model": {"path": str(tiny_inpaint)}})


def test_what_a_pair_does_not_go_with_is_named(tiny_fill: Path, tmp_path: Path) -> None:
    fill = {"model": {"path": str(tiny_fill)}}
    with pytest.raises(ServeError, match="leave --workers out"):
        with_pair(options(workers=2), fill)
    with pytest.raises(ServeError, match="leave --service out"):
        with_pair(options(services=("controlnet@cpu",)), fill)
    for count in (1, 4, "auto"):
        with pytest.raises(ServeError, match="leave --devices-per-worker out"):
            with_pair(options(devices_per_worker=count), fill)
    with pytest.raises(ServeError, match="edits of this model have one pass"):
        with_pair(options(), fill)
    with pytest.raises(ServeError, match="is not a model folder"):
        with_pair(options(), {"model": {"path": str(tmp_path)}})
