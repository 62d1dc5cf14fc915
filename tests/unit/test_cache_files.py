"""An engine whose entries lie in files: warm after a restart, and right when a file is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_engine.engine import Engine
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_encoder
from tests.fakes.jobs import config_of, tolerance
from tests.support.engines import edit, job, make_engine


@pytest.fixture(scope="module")
def encoder(tiny_fill: Path) -> Encoder:
    return load_encoder(config_of(tiny_fill))


def engine_at(folder: Path, encoder: Encoder, files: Path, **cache: Any) -> Engine:
    return make_engine(
        folder, encoder, host_dir=str(files / "host"), disk_dir=str(files / "disk"), **cache
    )


def close(engine: Engine) -> None:
    engine.cache.store.settle()
    engine.close(10.0)
    engine.cache.store.check_integrity()


def test_a_restarted_worker_is_warm_from_disk(
    tiny_fill: Path, encoder: Encoder, tmp_path: Path
) -> None:
    first = engine_at(tiny_fill, encoder, tmp_path)
    expected = edit(first, job(encoder, 50, "a", reproducible=True))
    close(first)
    for path in (tmp_path / "host").glob("*/*"):
        path.unlink()
    again = engine_at(tiny_fill, encoder, tmp_path)
    final = edit(again, job(encoder, 50, "b", reproducible=True))
    assert final.meta["cache"] == "hit"
    assert final.meta["cache_tier"] == "disk"
    assert final.meta["cache_bytes"]["disk"] > 0
    assert np.abs(final.latents - expected.latents).max() <= tolerance(expected.latents)
    assert again.counters["priming_rows_total"] == 0
    listed = again.templates().result(30)
    assert {"host", "disk"} <= {str(t["tier"]) for t in listed}
    close(again)


def test_a_damaged_file_costs_its_template_the_cache_and_no_pixel(
    tiny_fill: Path, encoder: Encoder, tmp_path: Path
) -> None:
    first = engine_at(tiny_fill, encoder, tmp_path)
    dense = edit(first, job(encoder, 51, "dense", cache="off"))
    edit(first, job(encoder, 51, "a", cache="require"))
    close(first)
    for path in tmp_path.glob("*/*/*.safetensors"):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 16
        path.write_bytes(raw)
    again = engine_at(tiny_fill, encoder, tmp_path)
    final = edit(again, job(encoder, 51, "b", num_inference_steps=3))
    again.cache.store.settle()
    assert again.cache.counters()["cache_corrupt_total.disk"] > 0
    after = edit(again, job(encoder, 51, "dense", cache="off"))
    assert np.abs(after.latents - dense.latents).max() <= tolerance(dense.latents)
    assert final.meta["kinds"].keys() == {"dense"}  # its steps computed all tokens
    primed = edit(again, job(encoder, 51, "c", cache="require"))  # and it can be had again
    assert primed.meta["cache"] == "hit"
    close(again)


def test_the_planned_step_stays_near_the_fixed_one(
    tiny_fill: Path, encoder: Encoder, tmp_path: Path
) -> None:
    """Kinds differ from step to step; entries in the model's dtype say the same either way."""
    engine = engine_at(tiny_fill, encoder, tmp_path, plan="auto", entry_kind="both")
    fixed = edit(engine, job(encoder, 52, "a", reproducible=True))
    planned = edit(engine, job(encoder, 52, "b", cache="require"))
    assert planned.meta["cache"] == "hit"
    spread = float(fixed.latents.std())
    assert np.abs(planned.latents - fixed.latents).mean() <= 0.2 * spread
    close(engine)
