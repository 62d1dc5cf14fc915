"""Memory of cards, counted as the engine counts it, from shapes alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_common.config import WEIGHT_FORMS, ConfigError
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.fitting import card_table
from maskserve_engine.fitting.card_table import CARDS, Shapes, check_fits, text
from maskserve_engine.fitting.entry_store import estimated_costs, template_layout
from maskserve_engine.fitting.memory import call_bytes, memory_table
from maskserve_serving.cards import print_cards
from maskserve_serving.options import ServeOptions
from tests.fakes.control_nets import random_net
from tests.fakes.jobs import config_of

FLUX_FILL = CHECKOUT / "assets" / "models" / "flux1-fill-shapes"
GIB = 2**30


@pytest.fixture(scope="module")
def flux_fill() -> Shapes:
    return Shapes(config_of(FLUX_FILL))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_counts_what_the_memory_table_counts(tiny_fill: Path, dtype: str) -> None:
    # As on a GPU, whose default it is: the memory table here is that of a CPU, which encodes one
    # picture at a time and records nothing.
    config = config_of(
        tiny_fill,
        model={"dtype": dtype},
        cache={"placed_bytes": 2**26},
        engine={"cuda_graphs": False},
        stages={"vae_batches": "off"},
    )
    shapes, adapter = Shapes(config), load_adapter(config)
    size = template_layout(config, adapter, estimated_costs(config))[1]
    expected = memory_table(config, adapter, size)
    fit = shapes.fit_with("bf16", (), config.engine.max_rows, 10 * GIB)
    assert (fit.weights, fit.step, shapes.size) == (expected.weights, expected.step, size)
    assert (fit.encoder, fit.decoder) == (expected.encoder, expected.decoder)


def test_a_folder_without_weights_is_told_by_its_classes(
    tiny_fill: Path, tiny_unets: dict[str, Path], tmp_path: Path
) -> None:
    for number, folder in enumerate((tiny_fill, tiny_unets["sdxl-base"])):
        bare = tmp_path / str(number)
        shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
        with_weights, without = (Shapes(config_of(model_folder)) for model_folder in (folder, bare))
        assert with_weights.weights == without.weights
        fits = [model_shapes.fit("bf16", GIB) for model_shapes in (with_weights, without)]
        assert fits[0].encoder == pytest.approx(fits[1].encoder, rel=0.02)  # but for buffers
        assert fits[0].decoder == fits[1].decoder


@pytest.mark.parametrize(
    ("name", "numbers", "template"),
    [("flux2-klein-4b-shapes", 3.9e9, 4 * 0.66), ("flux2-klein-9b-kv-shapes", 9.1e9, 5 * 0.56)],
)
def test_klein_has_its_published_size_and_exact_references_stand_once(
    name: str, numbers: float, template: float
) -> None:
    shapes = Shapes(config_of(CHECKOUT / "assets" / "models" / name))
    assert shapes.weights["bf16"] / 2 == pytest.approx(numbers, rel=0.01)
    assert shapes.size.nbytes / GIB == pytest.approx(template, rel=0.02)
    assert (shapes.size.anchors, shapes.spec.defaults.num_inference_steps) == (4, 4)
    work = shapes.adapter.work(128, 128)
    if shapes.spec.semantics.exact:  # of a row in the model's format, for as long as it runs
        count = 2 * 2 * 4096 * 4096 * len(work.blocks)
        assert shapes.fit("bf16", 200 * GIB).step > shapes.configured.engine.max_rows * count


def test_flux_fill_has_its_published_size(flux_fill: Shapes) -> None:
    assert flux_fill.weights["bf16"] == pytest.approx(23.8e9, rel=0.01)
    encoder = flux_fill.fit("bf16", 200 * GIB).encoder
    encoder -= call_bytes(flux_fill.config, "encoder", flux_fill.spec, "cuda", 200 * GIB)
    assert encoder == pytest.approx(2 * (4.76e9 + 0.12e9 + 0.08e9), rel=0.05)


def test_a_card_of_24_gb_holds_flux_fill(flux_fill: Shapes) -> None:
    usable = int(0.98 * 24 * GIB)
    assert flux_fill.fit("bf16", usable).missing
    for form in ("int8", "fp8", "nf4"):
        fit = flux_fill.fit(form, usable)
        assert fit.rows >= 4
        assert fit.templates >= 8
        weights = fit.weights + fit.encoder + fit.decoder + fit.step
        assert weights + fit.templates * flux_fill.size.nbytes < usable


def test_stages_elsewhere_leave_their_room_to_templates_with_nothing_on_the_cpu() -> None:
    shapes = Shapes(config_of(FLUX_FILL, stages={"service": "127.0.0.1:9015"}))
    small, large = (int(0.98 * card * GIB) for card in (24, 80))
    fit = shapes.fit("fp8", small)
    assert (fit.rows, fit.templates, fit.settings) == (4, 8, ())
    assert (fit.encoder, fit.decoder) == (0, 0)
    assert shapes.fit_with("fp8", (), 5, small).templates == 7
    fit = shapes.fit("bf16", large)
    assert fit.rows == 8
    assert fit.templates >= 50
    fits = config_of(FLUX_FILL, model={"weights": "int8"}, stages={"service": "127.0.0.1:9015"})
    check_fits(fits, small)
    with pytest.raises(ConfigError, match="does not fit the device"):
        check_fits(config_of(FLUX_FILL, model={"weights": "int8"}), small)


def test_more_memory_never_holds_less(flux_fill: Shapes) -> None:
    for form in WEIGHT_FORMS:
        worths = [flux_fill.fit(form, 4 * GIB * n).worth[0] for n in range(1, 24)]
        enough = [worth >= 32 for worth in worths]
        assert enough == sorted(enough)


def test_the_document_has_the_table(flux_fill: Shapes) -> None:
    lines = text(flux_fill).splitlines()
    # int8 and FP8 are of one size; behind the table stands what a step cache takes.
    assert len(lines) == 4 + len(CARDS) * 3 + 2
    assert "\n".join(lines[2:]) in (CHECKOUT / "docs" / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["qwen-image-edit", "flux2-klein-9b-kv", "qwen-image"])
def test_it_tells_what_refresh_steps_by_error_keep(name: str) -> None:
    folder = CHECKOUT / "assets" / "models" / f"{name}-shapes"
    by_default = Shapes(config_of(folder))
    lines = text(by_default), text(Shapes(config_of(folder, cache={"fidelity": 40.0})))
    has_line = ["A pass of an edit with refresh steps keeps" in line for line in lines]
    assert has_line == [True, True]
    assert "By default an edit has two." not in lines[1]  # negative prompts are optional


def test_a_start_that_cannot_fit_names_what_would(tiny_fill: Path) -> None:
    config = config_of(FLUX_FILL)
    with pytest.raises(ConfigError) as refused:
        check_fits(config, 23 * GIB)
    message = str(refused.value)
    assert "does not fit the device, of which 23.0 GiB are free: weights 22.2" in message
    assert 'weights = "int8"' in message
    fit = Shapes(config).fit("int8", 23 * GIB, running=True)
    assert fit.rows >= 4
    assert message.endswith(f"would: rows {fit.rows}, templates {fit.templates}")
    with pytest.raises(ConfigError, match=r"GiB are missing with weights = .nf4."):
        check_fits(config, 5 * GIB)
    named = config_of(FLUX_FILL, model={"weights": "nf4", "encoder_device": "cpu"})
    check_fits(named, 23 * GIB)
    check_fits(config_of(tiny_fill), 4 * GIB)


def test_it_tells_what_a_controlnet_service_takes_of_its_card(
    tmp_path: Path, tiny_fill: Path
) -> None:
    random_net(0, 2, 1).save_pretrained(tmp_path / "nets" / "edges")

    def service_line(**controls: str) -> str:
        options = {"folder": str(tmp_path / "nets"), "device_bytes": GIB, "ipc_bytes": 3 * GIB}
        config = config_of(tiny_fill, controls={**options, **controls})
        return text(Shapes(config)).partition("The ControlNet service takes ")[2]

    assert service_line() == service_line(service="127.0.0.1:1", folder="") == ""
    line = service_line(service="127.0.0.1:1")
    assert 4.0 <= float(line.split()[0]) < 4.05
    assert "1.00 of ControlNets, 3.00 lent ([controls] ipc_bytes)" in line


@pytest.mark.slow
def test_the_command_prints_it_and_says_what_is_wrong(
    tmp_path: Path, tiny_fill: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nets").mkdir()
    nets = {"controlnets": str(tmp_path / "nets"), "services": ("controlnet@cuda:1",)}
    assert print_cards(ServeOptions(str(tiny_fill), weights="nf4", **nets)) == 0
    out, err = capfd.readouterr()
    assert out.count("\n| 24 GB | ") >= 1
    assert "\nThe ControlNet service takes 8.00 GiB of its own device" in out
    assert err == ""
    bad = tmp_path / "bad"
    shutil.copytree(FLUX_FILL, bad)
    (bad / "text_encoder_2" / "config.json").write_text("[]")
    assert print_cards(ServeOptions(str(bad))) == 1
    out, err = capfd.readouterr()
    assert err.startswith("maskserve serve: [model] path: ")
    assert err.endswith("/text_encoder_2/config.json is not a JSON object\n")
    assert print_cards(ServeOptions(str(tmp_path / "none"))) == 1
    assert "there is no folder" in capfd.readouterr().err


def test_main_is_told_a_file(
    tmp_path: Path, tiny_fill: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    assert card_table.main(["card_table", str(config)]) == 1
    assert capsys.readouterr().err.startswith("maskserve serve: ")
    config.write_text(f'[model]\npath = "{tiny_fill}"\nweights = "nf4"\n')
    assert card_table.main(["card_table", str(config)]) == 0
    assert "\n| 24 GB | bf16" in capsys.readouterr().out
