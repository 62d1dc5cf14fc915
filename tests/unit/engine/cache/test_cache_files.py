"""An engine whose entries lie in files: warm after a restart, and right when a file is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_encoder
from maskserve_engine.loop.engine import Engine
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
    engine.cache.check_integrity()


@pytest.mark.parametrize(("stride", "anchors"), [(1000, 1), (4, 7), (1, 28)])
def test_a_restarted_worker_is_warm_from_disk(
    tiny_fill: Path, encoder: Encoder, tmp_path: Path, stride: int, anchors: int
) -> None:
    first = engine_at(tiny_fill, encoder, tmp_path, stride=stride)
    first.cache.default_steps = 28
    options = {"reproducible": True, "num_inference_steps": 9}
    expected = edit(first, job(encoder, 50, "a", **options))
    assert first.counters["priming_rows_total"] == anchors
    close(first)
    for path in (tmp_path / "host").glob("*/*"):
        path.unlink()
    again = engine_at(tiny_fill, encoder, tmp_path, stride=stride)
    again.cache.default_steps = 28
    final = edit(again, job(encoder, 50, "b", **options))
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


def test_who_insists_on_the_cache_has_a_template_primed_whose_file_is_bad(
    tiny_fill: Path, encoder: Encoder, tmp_path: Path
) -> None:
    first = engine_at(tiny_fill, encoder, tmp_path)
    edit(first, job(encoder, 54, "a", cache="require"))
    close(first)
    for path in tmp_path.glob("*/*/*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    again = engine_at(tiny_fill, encoder, tmp_path)
    final = edit(again, job(encoder, 54, "b", cache="require"))
    assert final.meta["kinds"].keys() == {"kv"}
    assert again.counters["priming_rows_total"] > 0
    close(again)


class Hanging(SimpleHTTPRequestHandler):
    """Lists a folder, and never sends a file of it before `gate` opens."""

    gate: threading.Event

    def do_GET(self) -> None:
        if self.path.endswith(".safetensors"):
            self.gate.wait()
        super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[str]:
    """URL of an object store that answers listings only; its objects lie in tmp_path / "far"."""
    Hanging.gate = threading.Event()
    folder = tmp_path / "far"
    handler = partial(Hanging, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        Hanging.gate.set()
        server.shutdown()


def test_a_remote_that_hangs_costs_no_edit_more_than_its_patience(
    tiny_fill: Path, encoder: Encoder, tmp_path: Path, hanging: str
) -> None:
    one, other = job(encoder, 55, "a", cache="require"), job(encoder, 56, "b", cache="require")
    first = engine_at(tiny_fill, encoder, tmp_path / "one", remote_url=f"file://{tmp_path}/far")
    edit(first, one)
    assert first.cache.store.settle()
    assert first.cache.store.lower.network.settle(30.0)
    close(first)
    far = engine_at(tiny_fill, encoder, tmp_path / "two", remote_url=hanging, remote_patience_s=1.0)
    dense = edit(far, job(encoder, 55, "c", cache="off"))
    far.cache.priming_state(one)
    assert far.cache.store.lower.network.settle(30.0)
    # By default an edit does not wait: what has not come is computed.
    now = edit(far, job(encoder, 55, "d", cache="auto", mask_ring=0))
    assert (now.meta["cache"], now.meta["cache_tier"]) == ("hit", "remote")
    assert now.meta["kinds"].keys() == {"dense"}
    assert now.latents.shape == dense.latents.shape
    assert np.isfinite(now.latents).all()
    assert edit(far, other).meta["kinds"].keys() == {"kv"}  # nor does another template wait
    # Who insists waits as long as the patience lasts, and has the template primed here.
    insists = edit(far, job(encoder, 55, "e", cache="require"))
    assert insists.meta["kinds"].keys() == {"kv"}
    assert far.counters["priming_rows_total"] > 0
    Hanging.gate.set()
    close(far)


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
