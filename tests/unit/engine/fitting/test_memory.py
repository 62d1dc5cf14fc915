"""The memory table: what it counts is what there is, and it adds up."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from diffusers import AutoencoderKL
from msgspec import structs
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    masking_utils,
)

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.published_models import T5_XXL
from maskserve_benchmarks.steps.unet_rig import TEXT, UNETS, UnetBench, build_unet
from maskserve_client import commands
from maskserve_common.config_file import read_json
from maskserve_common.contracts.memory_table import MemoryTable
from maskserve_common.liveness import sign_in
from maskserve_engine.adapters.ip_adapter import IpAdapterEncoder
from maskserve_engine.batch.graphs import MOST_RECORDED, Graphs
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.families.control import RowControl
from maskserve_engine.families.encoder import RECORDED_PROMPTS, TextEncoder
from maskserve_engine.families.flux.encode import FluxEncoder
from maskserve_engine.families.flux.spec import control_work as flux_control_work
from maskserve_engine.families.flux2.encode import LayerStates
from maskserve_engine.families.mmdit import controlled
from maskserve_engine.families.qwen_image.encode import LastStates
from maskserve_engine.families.registry import load_adapter, load_decoder, load_encoder
from maskserve_engine.families.specs import load_spec, recorded_rows
from maskserve_engine.families.unet.spec import control_work as unet_control_work
from maskserve_engine.fitting import memory
from maskserve_engine.fitting.entry_store import estimated_costs, template_layout
from maskserve_engine.planning.entry_bytes import FORMATS
from maskserve_engine.planning.refresh_steps import step_cache_bytes
from maskserve_engine.spec.ip_adapters import IpAdapters
from maskserve_engine.spec.model_spec import one_scale
from maskserve_engine.stages.loader import module_bytes
from maskserve_engine.start.assembly import assemble
from maskserve_studies.kernels.fake_cuda import DEVICE, FakeCuda, fake_weights
from maskserve_studies.kernels.kernel_counts import (
    MIXED,
    Case,
    fake_bench,
    kinds_of,
    make_rows,
)
from maskserve_studies.kernels.live_bytes import LiveBytes
from tests.fakes.control_nets import (
    PICTURE_ONLY,
    random_net,
    random_sd3_net,
    random_z_image_net,
)
from tests.fakes.ip_adapters import build_image_encoder, build_ip_adapter
from tests.fakes.jobs import config_of
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.tiny_chroma import build_tiny_chroma
from tests.fakes.tiny_families import FAMILIES
from tests.fakes.tiny_sd3 import build_tiny_sd3
from tests.support.model_configs import TINY_SD21

pytestmark = pytest.mark.each_value

FLUX_VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
FREE = 1000 * 2**20


def table(folder: Path, tmp_path: Path, **sections: Any) -> MemoryTable:
    """On a host whose memory is known."""
    config = structs.replace(config_of(folder, **sections), runtime_dir=str(tmp_path))
    adapter = load_adapter(config)
    _, size = template_layout(config, adapter, estimated_costs(config))
    return memory.memory_table(config, adapter, size, (2 * FREE, FREE))


def test_the_parts_add_up_to_the_whole(tiny_fill: Path, tmp_path: Path) -> None:
    budget = table(tiny_fill, tmp_path)
    parts = (
        budget.weights,
        budget.encoder,
        budget.decoder,
        budget.step,
        budget.cache,
        budget.others,
    )
    assert min(parts) > 0
    assert sum(parts) + budget.left == budget.total
    # What is there already is no longer free; what is still to come is.
    encoder = budget.encoder + budget.decoder + budget.step
    assert budget.cache == int(0.25 * (FREE - encoder))


def test_step_caches_of_an_edits_passes_are_counted(
    tiny_kontext: Path, tiny_unets: dict[str, Path], tmp_path: Path
) -> None:
    for folder, passes in ((tiny_kontext, 1), (tiny_unets["sdxl-base"], 2)):
        config = config_of(folder)
        nbytes = memory.refresh_bytes(config, load_adapter(config), "cpu")
        assert table(folder, tmp_path).own == passes * nbytes > 0
    without = table(tiny_kontext, tmp_path, cache={"fidelity": 0.0})
    assert without.own == 0


def test_what_is_loaded_already_is_not_taken_twice(tiny_fill: Path, tmp_path: Path) -> None:
    before = table(tiny_fill, tmp_path)
    sign_in(tmp_path, "encoder")
    after = table(tiny_fill, tmp_path)
    config = config_of(tiny_fill)
    assert after.encoder == before.encoder
    assert after.cache - before.cache == pytest.approx(
        memory.weight_bytes(config, "encoder", load_spec(config.model.path)) / 4, abs=1
    )


def test_loras_have_their_budget(tiny_fill: Path, tmp_path: Path) -> None:
    without = table(tiny_fill, tmp_path)
    store = tmp_path / "loras"
    store.mkdir()
    with (store / "large.safetensors").open("wb") as file:
        file.truncate(FREE // 5)
    where = {"store": str(store), "device_bytes": FREE // 10}
    budget = table(tiny_fill, tmp_path, adapters=where)
    assert (without.adapters, budget.adapters) == (0, FREE // 10)
    assert without.cache - budget.cache == pytest.approx(FREE / 40, abs=1)
    parts = (
        budget.weights,
        budget.encoder,
        budget.decoder,
        budget.step,
        budget.adapters,
        budget.cache,
    )
    assert sum(parts) + budget.others + budget.left == budget.total


def test_a_cpu_reserves_no_more_than_the_files_of_a_folder(tiny_fill: Path, tmp_path: Path) -> None:
    """Its budgets are larger than the memory that is free, and a template has room."""
    nets, store = tmp_path / "nets", tmp_path / "loras"
    net = random_net(0, 2, 1)
    net.save_pretrained(nets / "edges")
    store.mkdir()
    with (store / "small.safetensors").open("wb") as file:
        file.truncate(2**20)
    folders = {"controls": {"folder": str(nets)}, "adapters": {"store": str(store)}}
    budget, without = table(tiny_fill, tmp_path, **folders), table(tiny_fill, tmp_path)
    assert budget.adapters == 2 * 2**20  # its half precision in float32
    without_nets = table(tiny_fill, tmp_path, controls={"folder": str(tmp_path / "none")})
    assert without_nets.controls == 0
    weights = sum(parameter.nbytes for parameter in net.parameters())
    assert weights < budget.controls < FREE // 10
    assert budget.cache > 0.9 * without.cache > budget.template


def test_ip_adapters_are_counted_with_the_encoder(
    tiny_fill: Path, tiny_unets: dict[str, Path], tmp_path: Path
) -> None:
    folder, unet = tmp_path / "ip", tiny_unets["sdxl-fill"]
    build_image_encoder(folder / "image_encoder")
    sections = {"ip_adapters": {"folder": str(folder), "device_bytes": 2**21}}
    config = config_of(unet, **sections)
    spec = load_spec(str(unet))
    encoder = IpAdapterEncoder(config, spec)
    image_encoder = sum(weight.nbytes for weight in encoder.model.parameters())
    assert memory.image_encoder_bytes(config, spec) == image_encoder > 0
    without = table(unet, tmp_path).encoder
    assert table(unet, tmp_path, **sections).encoder - without == image_encoder
    file = build_ip_adapter(folder / "plus.safetensors", spec, "plus")
    known = IpAdapters(config, spec).find(file.stem)
    loaded = encoder.load(known)
    assert table(unet, tmp_path, **sections).encoder - without == image_encoder + loaded.nbytes
    assert memory.ip_adapter_bytes(config, spec, "cuda") == 2**21
    other = table(tiny_fill, tmp_path, **sections)  # its model takes none
    assert other.encoder == table(tiny_fill, tmp_path).encoder


@pytest.mark.parametrize("store", ["memory://loras", "large"])
def test_a_cpu_reserves_no_more_than_a_share_of_what_is_free(
    tiny_fill: Path, tmp_path: Path, store: str
) -> None:
    """For a store that is no folder, or more files than the memory holds."""
    folder = tmp_path / "large"
    folder.mkdir()
    for name in "abc":
        with (folder / f"{name}.safetensors").open("wb") as file:
            file.truncate(FREE)
    where = str(folder) if store == "large" else store
    budget = table(tiny_fill, tmp_path, adapters={"store": where})
    assert budget.adapters == FREE // 4
    assert budget.cache > budget.template


def test_a_gpu_reserves_its_budgets(tiny_fill: Path, tmp_path: Path) -> None:
    config = config_of(
        tiny_fill, adapters={"store": str(tmp_path)}, controls={"folder": str(tmp_path)}
    )
    adapter = load_adapter(config)
    assert memory.adapter_bytes(config) == config.adapters.device_bytes
    assert memory.control_bytes(config, adapter) == config.controls.device_bytes


def test_a_stage_elsewhere_takes_nothing_here(tiny_fill: Path, tmp_path: Path) -> None:
    where = {"encoder_device": "meta"}
    budget = table(tiny_fill, tmp_path, model=where)
    assert budget.encoder == 0
    assert budget.decoder > 0
    served = table(tiny_fill, tmp_path, stages={"service": "127.0.0.1:9015"})
    assert (served.encoder, served.decoder) == (0, 0)
    assert served.cache == int(0.25 * (FREE - served.step))


def test_a_budget_beyond_what_there_is_is_told(
    tiny_fill: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def table_with(cache: dict[str, Any]) -> MemoryTable:
        config = config_of(tiny_fill, cache=cache)
        with caplog.at_level(logging.INFO):
            return assemble(config, load_adapter(config)).memory

    all_there_is, _ = memory.device_memory(torch.device("cpu"))
    beyond = table_with({"budget_bytes": 2 * all_there_is})
    assert beyond.cache == 2 * all_there_is
    assert beyond.left < 0
    assert "budgets exceed the device's memory" in caplog.text
    caplog.clear()
    assert table_with({"enabled": False}).cache == 0
    assert "promised" not in caplog.text
    assert "memory of cpu: " in caplog.text
    assert "memory of cpu: 1.95 GiB\n  weights" in table(tiny_fill, tmp_path).text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_are_those_that_are_loaded(tiny_fill: Path, dtype: str) -> None:
    config = config_of(tiny_fill, model={"dtype": dtype})
    adapter = load_adapter(config)
    total = sum(p.nbytes for p in adapter.model.parameters())  # type: ignore[attr-defined]
    assert adapter.weight_bytes == pytest.approx(total, rel=0.01)
    encoder, decoder = load_encoder(config), load_decoder(config)
    assert isinstance(encoder, FluxEncoder)
    parts = (encoder.vae, encoder.clip.model, encoder.t5.model)
    weights = sum(p.nbytes for part in parts for p in part.parameters())
    assert memory.weight_bytes(config, "encoder", load_spec(config.model.path)) == pytest.approx(
        weights, rel=0.01
    )
    weights = sum(p.nbytes for p in decoder.vae.parameters())
    assert memory.weight_bytes(config, "decoder", load_spec(config.model.path)) == pytest.approx(
        weights, rel=0.01
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["sdxl-base", "sd-base"])
def test_a_vae_is_counted_in_the_dtype_in_which_it_runs(
    tiny_unets: dict[str, Path], variant: str, dtype: str
) -> None:
    """In half precision SDXL's overflows when it encodes, and in float16 also when it decodes."""
    config = config_of(tiny_unets[variant], model={"dtype": dtype})
    exact = config_of(tiny_unets[variant], model={"dtype": "float32"})
    spec, encoder = load_spec(tiny_unets[variant]), cast(Any, load_encoder(config))
    stages: dict[memory.Stage, list[Any]] = {
        "encoder": [encoder.vae, *(text.model for text in encoder.encoders)],
        "decoder": [load_decoder(config).vae],
    }
    for stage, parts in stages.items():
        weights = sum(p.nbytes for part in parts for p in part.parameters())
        assert memory.weight_bytes(config, stage, spec) == pytest.approx(weights, rel=0.01)
        ratio = memory.image_bytes(exact, stage, spec) / memory.image_bytes(config, stage, spec)
        assert ratio == (1 if parts[0].dtype == torch.float32 else 2)
    assert stages["encoder"][0].dtype == (
        torch.float32 if variant == "sdxl-base" else getattr(torch, dtype)
    )


@pytest.mark.parametrize("build", [build_tiny_sd3, build_tiny_chroma])
def test_a_t5_is_counted_whichever_text_encoder_it_is(
    build: Callable[[Path], Path], tmp_path: Path
) -> None:
    config = config_of(build(tmp_path / "model"), model={"t5_weights": "int8"})
    encoder = load_encoder(config)
    texts = [text_encoder.model for text_encoder in encoder.text_encoders.values()]
    total = sum(map(module_bytes, (encoder.vae, *texts)))
    assert memory.weight_bytes(config, "encoder", load_spec(config.model.path)) == pytest.approx(
        total, rel=0.01
    )


def test_the_status_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    memory_table = MemoryTable("cpu", 80, 20, 10, 2, 5, 30, 3, 10, rows=8, template=6)
    values = json.loads(msgspec.json.encode(memory_table)) | {"of a later version": 1}
    commands._show_worker("w", {"max_rows": 8, "memory": values, "state": "ready"})
    assert memory_table.text() in capsys.readouterr().out
    assert "cache       0.00  reserved: 5 templates of 0.0 MiB" in memory_table.text()
    assert "adapters" not in memory_table.text()
    assert "\n  weights     0.00  taken: the denoiser\n" in memory_table.text()
    assert "\n  step        0.00  reserved: 8 rows\n" in memory_table.text()
    with_loras = structs.replace(memory_table, adapters=2**31)
    assert "\n  adapters    2.00  reserved: LoRAs of edits\n" in with_loras.text()


CASES = (
    Case("dense, 1 row", (None,)),
    Case("dense, 4 rows", (None,) * 4),
    Case("kv, 4 rows, mixed", MIXED[:4]),
    Case("kv beside a dense row", (0.1, 0.2, None)),
    Case("project, 4 rows, mixed", MIXED[:4], "project"),
    Case("mixed plan, 4 rows, mixed", MIXED[:4], "mixed"),
    Case("dense, guided", (None,), guided=True),
    Case("priming beside a row", (0.1,), primes=True),
)


@pytest.mark.parametrize("with_kernels", [True, False], ids=["kernels", "plain"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_flux_step_holds_no_more_than_was_counted(case: Case, with_kernels: bool) -> None:
    """FLUX.1-dev at 1024x1024 in bfloat16, on a CUDA device that computes nothing."""
    blocks = (3, 3) if case.kind == "mixed" else (1, 1)
    with FakeCuda(triton=with_kernels):
        bench = fake_bench(blocks, case.format)
        bench.fill_entry({"mixed": "both"}.get(case.kind, case.kind))
        rows = make_rows(bench, case)
        with LiveBytes("cuda") as live:
            bench.step(rows, kinds_of(case, bench.blocks))
    passes = len(rows) * (2 if case.guided else 1)
    entry = bench.entry.nbytes if case.primes else 0
    counted = 2 * memory.peak_values(bench.work, passes, bench.text) + entry
    assert live.peak <= counted
    if case.ratios[0] is None:
        # What is counted is what plain operations hold, the activation apart from its product.
        least = 0.35 if with_kernels else 0.6
        assert live.peak >= least * counted, "counted far too much"


def test_what_both_passes_of_a_row_read_is_counted_once() -> None:
    """Exact references, of enough blocks to tell."""
    with FakeCuda():
        bench = fake_bench((12, 0), "int8", "qwen-2.1-1024")
        with LiveBytes("cuda") as live:
            bench.step(make_rows(bench, Case("", (None,), guided=True)), "kv")
    peak_values, read = (
        memory.peak_values(bench.work, 2, bench.text),
        memory.still_values(bench.work),
    )
    assert 0.65 * 2 * (peak_values + read) <= live.peak <= 2 * (peak_values + read)
    assert live.peak < 0.65 * 2 * (peak_values + 2 * read)


def test_recorded_flux_steps_hold_no_more_than_a_rows_beside_the_others() -> None:
    """A dense row, and as many mixes of cached ones as are kept."""
    rows, tried = 1, 3
    with FakeCuda():
        bench = fake_bench((1, 1), "int8")
        bench.fill_entry("kv")
        recorder = Graphs.on(DEVICE, torch.bfloat16)
        assert recorder is not None
        bench.weights = replace(bench.weights, graphs=recorder, placed_bytes=0)

        def step(ratio: float | None) -> None:
            batch = make_rows(bench, Case("", (ratio,) * rows, recorded=True))
            for _ in range(2):  # the second one is recorded
                bench.step(batch, "kv")
            bench.batch = None

        with LiveBytes("cuda") as live:
            step(None)
            step(0.3)
            before = live.now
            for number in range(tried):
                step(0.25 - 0.05 * number)
            of_mix = (live.now - before) / tried
    assert (
        len(
            [
                recorded_step
                for recorded_step in recorder._steps.values()
                if recorded_step is not None
            ]
        )
        == 2 + tried
    )
    assert of_mix > 0
    count = 2 * memory.peak_values(bench.work, rows, bench.text)
    assert live.peak + (MOST_RECORDED - tried) * of_mix <= 2 * count


def test_the_buffers_of_a_recorded_refresh_step_of_a_unet_are_counted() -> None:
    """Those that captures read between its pieces, of one row."""
    with FakeCuda():
        model = fake_weights(build_unet("sd21-768", torch.bfloat16, torch.device("meta")))
        bench = UnetBench("sd21-768", torch.bfloat16, DEVICE, "int8", model=model, steps=9)
        recorder = Graphs.on(DEVICE, torch.bfloat16)
        assert recorder is not None
        bench.weights, bench.buckets = replace(bench.weights, graphs=recorder), True
        schedule = RefreshSchedule(frozenset({0}), "int8", text=False)
        row = bench.row(0.11, 0, guided=True, schedule=schedule)
        for _ in range(2):
            bench.step([row], "kv")
        buffer_bytes = sum(buffer.nbytes for buffer in recorder._memory.buffers._buffers.values())
    counted = 2 * 2 * bench.work.opened_row
    assert 0.9 * counted <= buffer_bytes <= counted


def test_the_table_counts_recorded_flux_steps(
    tiny_fill: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the longest besides, and no room for keys and values that stay in place."""
    adapter = load_adapter(config_of(tiny_fill))
    monkeypatch.setattr(memory, "device_of", lambda config: torch.device("cuda", 0))
    monkeypatch.setattr(memory, "_name", str)
    steps = []
    for on in (False, True):
        config = config_of(tiny_fill, engine={"cuda_graphs": on})
        _, size = template_layout(config, adapter, estimated_costs(config))
        memory_table = memory.memory_table(config, adapter, size, (2 * FREE, FREE))
        steps.append(memory_table.step - size.anchor_bytes)
    side = adapter.spec.native_resolution // adapter.spec.vae_scale_factor
    text = adapter.spec.text_tokens(config.model.max_sequence_length)
    rows = recorded_rows(adapter.spec, config)
    values = memory.peak_values(adapter.work(side, side), rows, text)
    more = values * adapter.dtype.itemsize
    assert steps[1] == steps[0] - config.cache.placed_on("cuda") + more


@pytest.mark.parametrize("masks", [(0.1,), (0.2, 0.5)])
def test_a_step_on_tiles_holds_no_more_than_was_counted(
    monkeypatch: pytest.MonkeyPatch, masks: tuple[float, ...]
) -> None:
    """The rows are dense, with the surroundings that rows with tiles keep."""
    monkeypatch.setitem(UNETS, "tiny", {**TINY_SD21, "in_channels": 4, "sample_size": 64})
    bench = UnetBench("tiny", torch.float32, torch.device("cpu"), "int8", halo=4)
    bench.fill_entry("kv")
    rows = [bench.row(mask, seed) for seed, mask in enumerate(masks)]
    with LiveBytes("cpu") as live:
        bench.step(rows, "kv")
    counted = 4 * memory.peak_values(bench.work, len(rows), TEXT)
    assert live.peak <= counted


@pytest.mark.parametrize("preset", ["sd21-768", "sdxl-1024"])
def test_a_unet_step_holds_no_more_than_was_counted(preset: str) -> None:
    device = torch.device("meta")  # a sampler reads its own timesteps, which are no shapes
    bench = UnetBench(preset, torch.bfloat16, device, "int8")
    rows = [bench.row(None, seed) for seed in range(2)]
    with LiveBytes("meta") as live:
        bench.step(rows, "kv")
    counted = 2 * memory.peak_values(bench.work, len(rows), TEXT)
    assert 0.75 * counted <= live.peak <= counted


@pytest.mark.parametrize("stage", ["encoder", "decoder"])
def test_an_image_takes_no_more_than_was_counted(stage: memory.Stage, tmp_path: Path) -> None:
    """The VAE is that of FLUX in bfloat16."""
    with torch.device("meta"):
        vae = AutoencoderKL(**FLUX_VAE).bfloat16()
        vae.save_config(tmp_path / "vae")
        with torch.inference_mode(), LiveBytes("meta") as live:
            if stage == "encoder":
                vae.encode(torch.empty(1, 3, 512, 512, dtype=torch.bfloat16))
            else:
                vae.decode(torch.empty(1, 16, 64, 64, dtype=torch.bfloat16))
    config = config_of(tmp_path, model={"dtype": "bfloat16"})
    spec = replace(FILL_SPEC, native_resolution=512, latents=one_scale(tmp_path))
    counted = memory.image_bytes(config, stage, spec)
    assert 0.95 * counted <= live.peak <= counted


@pytest.mark.parametrize("length", [64, 512])
def test_a_recorded_t5_keeps_no_more_than_was_counted(length: int, tmp_path: Path) -> None:
    """The T5 is that of FLUX in bfloat16, with fewer layers, which follow one another."""
    about = T5Config(**{**T5_XXL, "num_layers": 2})
    about.save_pretrained(tmp_path / "text_encoder_2")
    peaks = []
    with torch.device("meta"), torch.inference_mode():
        t5 = T5EncoderModel(about).bfloat16().eval()
        for prompts in range(1, RECORDED_PROMPTS + 1):
            with LiveBytes("meta") as live:
                t5(torch.empty(prompts, length, dtype=torch.long))
            peaks.append(live.peak)
    model = {"dtype": "bfloat16", "max_sequence_length": length}
    config = config_of(tmp_path, model=model)
    spec = replace(FILL_SPEC, recorded_text="text_encoder_2")
    counted = memory.recorded_text_bytes(config, spec)
    assert 0.95 * counted <= max(peaks) <= counted
    for unrecorded in ({"model": {**model, "t5_offload": True}},
                       {"model": model, "engine": {"cuda_graphs": False}}):  # fmt: skip
        assert memory.recorded_text_bytes(config_of(tmp_path, **unrecorded), spec) == 0


@pytest.mark.parametrize("length", [64, 512])
def test_a_recorded_qwen3_keeps_no_more_than_was_counted(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of FLUX.2 klein 4B in bfloat16, with fewer layers."""
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)  # as it is recorded
    folder = CHECKOUT / "assets" / "models" / "flux2-klein-4b-shapes"
    shape = read_json(folder / "text_encoder" / "config.json")
    about = Qwen3Config(**{**shape, "num_hidden_layers": 4})
    about.save_pretrained(tmp_path / "text_encoder")
    with torch.device("meta"), torch.inference_mode():
        model = Qwen3Model(about).bfloat16().eval()
        model.norm = torch.nn.Identity()
        text = TextEncoder(None, model, length)
        inputs = torch.empty(2, RECORDED_PROMPTS, length, dtype=torch.long)
        with LiveBytes("meta") as live:
            text.answer(LayerStates(text, (1, 2, 3)).states_of, inputs)
    config = config_of(tmp_path, model={"dtype": "bfloat16", "max_sequence_length": length})
    spec = replace(FILL_SPEC, recorded_text="text_encoder", text_layers=4)
    counted = memory.recorded_text_bytes(config, spec)
    assert 0.95 * counted <= live.peak <= counted


def test_recorded_calls_of_a_qwen_vl_keep_no_more_than_was_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of Qwen-Image in bfloat16, with fewer layers: the longest call, and all answers."""
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)  # as it is recorded
    folder = CHECKOUT / "assets" / "models" / "qwen-image-shapes"
    shape = read_json(folder / "text_encoder" / "config.json")
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "text_encoder" / "config.json").write_text(json.dumps(shape))
    about = Qwen2_5_VLConfig(**shape)
    about.text_config.num_hidden_layers = 3
    about.text_config.layer_types = about.text_config.layer_types[:3]
    about.vision_config.depth = 1
    length, lengths, answers = 512, range(64, 577, 64), 0
    with torch.device("meta"), torch.inference_mode():
        model = Qwen2_5_VLForConditionalGeneration(about).bfloat16().eval()
        text = TextEncoder(None, model, length)
        for tokens in lengths:
            for prompts in range(1, RECORDED_PROMPTS + 1):
                inputs = torch.empty(2, prompts, tokens, dtype=torch.long)
                with LiveBytes("meta") as live:
                    answers += text.answer(LastStates(text).states_of, inputs).nbytes
    config = config_of(tmp_path, model={"dtype": "bfloat16", "max_sequence_length": length})
    facts = replace(FILL_SPEC, recorded_text="text_encoder", text_layers=2, template_tokens=34)
    counted = memory.recorded_text_bytes(config, facts)
    assert 0.9 * counted <= live.peak + answers <= counted


def test_two_pictures_are_counted_where_they_share_a_call(
    tiny_fill: Path, tiny_inpaint: Path
) -> None:
    config, spec = config_of(tiny_fill), load_spec(tiny_fill)
    one = memory.image_bytes(config, "encoder", spec)
    for total, device, pictures in ((50 * one, "cuda", 2), (49 * one, "cuda", 1),
                                    (50 * one, "cpu", 1)):  # fmt: skip
        assert memory.encoded_at_once(config, spec, device, total) == pictures
    without = config_of(tiny_fill, stages={"vae_batches": "off"})
    assert memory.encoded_at_once(without, spec, "cuda", 50 * one) == 1
    # This model takes no masked picture.
    config, spec = config_of(tiny_inpaint), load_spec(tiny_inpaint)
    assert memory.encoded_at_once(config, spec, "cuda", 2**40) == 1


@pytest.mark.parametrize("mask", [None, 0.05])
def test_what_a_unet_row_keeps_of_a_control_net_is_counted(
    monkeypatch: pytest.MonkeyPatch, mask: float | None
) -> None:
    """A dense row keeps the net's residuals, a cached one also those of the cached tokens."""
    monkeypatch.setitem(UNETS, "tiny", {**TINY_SD21, "in_channels": 4, "sample_size": 64})
    bench = UnetBench("tiny", torch.float32, torch.device("cpu"), "int8")
    bench.fill_entry("kv")
    row, net = bench.row(mask, 0), bench.net()
    bench.control(row, net, 7)
    bench.step([row], "kv")
    control = row.control
    assert isinstance(control, RowControl)
    nbytes = tensor_bytes((control.passes[0].added, control.inputs[0].hint))
    work = unet_control_work(dict(net.weights.model.config), bench.side, bench.side)
    assert nbytes == 4 * work.carried_numbers
    if mask is not None:
        total = sum(token.nbytes for token in control.residuals[0].tokens)
        counted = step_cache_bytes(work, [work.tokens], FORMATS["float32"], 0)
        assert 0.8 * counted <= total <= counted


def test_what_a_flux_row_keeps_of_a_control_net_is_counted() -> None:
    net = random_net(0, 2, 1)
    work = flux_control_work(dict(net.config), 12, 16)
    tokens, width = 6 * 8, 32
    # What is read of the picture, and what three blocks say; keys and values of them.
    assert work.carried_numbers == tokens * width * (1 + 3)
    nbytes = step_cache_bytes(work, [(float(tokens),)], FORMATS["float32"], 0)
    assert nbytes == 4 * 2 * tokens * width * 3


def test_rows_with_control_nets_are_in_the_table(tiny_fill: Path, tmp_path: Path) -> None:
    folder = tmp_path / "nets"
    random_net(0, 2, 1).save_pretrained(folder / "edges")
    (tmp_path / "run").mkdir()
    budget = {"folder": str(folder), "device_bytes": 2**17}

    def controls(rows: int, **more: Any) -> int:
        options = {"controls": {**budget, **more}, "engine": {"max_rows": rows}}
        return table(tiny_fill, tmp_path / "run", **options).controls

    one, two, three = map(controls, (1, 2, 3))
    assert three - two == two - one < one - 2**17  # one of them looks ahead
    assert 0 < controls(1, service="127.0.0.1:1") < one - 2**17
    config = config_of(tiny_fill, controls={**budget, "ipc_bytes": 2**21}, engine={"max_rows": 2})
    adapter = load_adapter(config)
    # A service has what it lends besides; what a step of its own takes, too.
    assert two + 2**21 < memory.service_bytes(config, adapter) < two + 2**21 + 2**23
    (folder / "edges" / "config.json").write_text("{}")
    assert controls(3) == 0
    bare = load_adapter(config)
    assert memory.service_bytes(config, bare) == 2**17 + 2**21


@pytest.mark.parametrize("family", ["z-image", "sd3-large"])
def test_modules_of_the_model_that_a_service_reads_are_counted(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: Z-Image's blocks of the picture, and the positions of a net of Stable Diffusion 3.5
    that has none.
    """
    folder = FAMILIES[family](tmp_path / "model")
    nets = {
        "z-image": [random_z_image_net(seed) for seed in (1, 2)],
        "sd3-large": [random_sd3_net(seed, 2, **PICTURE_ONLY) for seed in (1, 2)],
    }[family]
    adapter: Any = load_adapter(config_of(folder, model={"device": "meta"}))
    read, calls = list[Any](), controlled.read_modules

    def reads(*of: Any) -> Any:
        read.append(calls(*of))
        return read[-1]

    monkeypatch.setattr(controlled, "read_modules", reads)
    for net in nets:
        adapter.control_net(net)
    [modules] = read
    nbytes = sum(map(module_bytes, modules.values()))
    counted = memory.service_bytes(config_of(folder), adapter)
    monkeypatch.setattr(type(adapter), "net_modules", ())
    assert counted - memory.service_bytes(config_of(folder), adapter) == nbytes > 0


def tensor_bytes(tree: object) -> int:
    """Bytes of all tensors in containers and dataclasses."""
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    if isinstance(tree, dict):
        return sum(map(tensor_bytes, tree.values()))
    if isinstance(tree, (list, tuple)):
        return sum(map(tensor_bytes, tree))
    if is_dataclass(tree):
        return sum(tensor_bytes(getattr(tree, field.name)) for field in fields(tree))
    return 0
