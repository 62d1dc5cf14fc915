"""An adapter that cannot be loaded costs its edits one sentence, and nothing else."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_common.config import Config, ModelConfig
from maskserve_common.contracts.request import Lora
from maskserve_common.errors import (
    AdapterNotFound,
    EngineFailed,
    InvalidRequest,
    MaskserveError,
    Overloaded,
)
from maskserve_common.resources.loading import Loaded
from maskserve_engine.adapters.lora_loader import LoraLoader
from maskserve_engine.layers.low_rank import Factors
from maskserve_lora.store import AdapterStore
from tests.fakes.loras import lora, write
from tests.support.eventually import eventually


def config_of(folder: Path) -> Config:
    plain = Config(model=ModelConfig(path=str(DEMO_MODEL)), runtime_dir=str(folder))
    store = folder / "store"
    return structs.replace(plain, adapters=structs.replace(plain.adapters, store=str(store)))


def known(config: Config, name: str) -> Lora:
    store = AdapterStore(config)
    store.catalogue.scan()
    result = Lora(name=name, version=store.catalogue.find(name).version)
    store.close()
    return result


class Executor:
    """The executor's part: it takes updates, or fails as the test says."""

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.numbers: dict[str, int] = {}

    def __call__(self, version: str, factors: Mapping[str, Factors]) -> int:
        if self.fails is not None:
            raise self.fails
        self.numbers = {
            name: factor.down.numel() + factor.up.numel() for name, factor in factors.items()
        }
        return 7


@pytest.fixture
def executor() -> Executor:
    return Executor()


@pytest.fixture
def load(tmp_path: Path, executor: Executor) -> Iterator[Callable[[Lora], Loaded | MaskserveError]]:
    loader = LoraLoader(config_of(tmp_path), executor)
    answers: queue.Queue[Loaded | MaskserveError] = queue.Queue()

    def loaded(adapter: Lora) -> Loaded | MaskserveError:
        loader.load(adapter, answers.put)
        return answers.get(timeout=30)

    yield loaded
    loader.close()


@pytest.mark.parametrize(
    ("error", "error_type", "sentence"),
    [
        (FileNotFoundError("evicted"), Overloaded, "could not be loaded now; try again"),
        (MemoryError(), Overloaded, "could not be loaded now; try again"),
        (ValueError("does not fit"), InvalidRequest, "adapter good does not fit"),
        (Overloaded("no room"), Overloaded, "no room"),
        (RuntimeError("a secret of the device"), EngineFailed, "adapter good could not be loaded"),
    ],
)
def test_each_failure_is_told_in_one_sentence_and_the_next_load_works(
    tmp_path: Path,
    executor: Executor,
    load: Callable[[Lora], Loaded | MaskserveError],
    error: Exception,
    error_type: type[MaskserveError],
    sentence: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(tmp_path / "store" / "good.safetensors")
    adapter = known(config_of(tmp_path), "good")
    executor.fails = error
    answer = load(adapter)
    assert isinstance(answer, error_type)
    assert sentence in str(answer)
    assert "secret" not in str(answer)
    executor.fails = None
    loaded = load(adapter)
    assert isinstance(loaded, Loaded)
    assert (loaded.nbytes, loaded.source) == (7, "host")
    caplog.clear()  # what operators read


def test_what_a_file_holds_is_known_and_how_large_files_are(
    tmp_path: Path, executor: Executor
) -> None:
    """The latter before any is loaded; files that are not served do not count."""
    write(tmp_path / "store" / "good.safetensors")
    write(tmp_path / "store" / "other.safetensors", lora({"down_blocks.0.proj_in": (800, 800)}))
    adapter = known(config_of(tmp_path), "good")
    loader = LoraLoader(config_of(tmp_path), executor)
    try:
        nbytes = (tmp_path / "store" / "good.safetensors").stat().st_size
        eventually("sizes are known", lambda: loader.typical_bytes() == nbytes)
        answers: queue.Queue[Loaded | MaskserveError] = queue.Queue()
        loader.load(adapter, answers.put)
        loaded = answers.get(timeout=30)
        assert isinstance(loaded, Loaded)
        assert loaded.file_bytes == nbytes
        assert loaded.layers == executor.numbers
    finally:
        loader.close()


def test_a_file_that_is_gone_or_bad_ends_its_own_load_alone(
    tmp_path: Path, load: Callable[[Lora], Loaded | MaskserveError]
) -> None:
    config, store = config_of(tmp_path), tmp_path / "store"
    for name in ("gone", "good"):
        write(store / f"{name}.safetensors")
    tensors = lora()
    write(
        store / "nan.safetensors",
        {name: tensor * np.float32("nan") for name, tensor in tensors.items()},
    )
    absent, nan, good = (known(config, name) for name in ("gone", "nan", "good"))
    (store / "gone.safetensors").unlink()
    lost = load(absent)
    assert isinstance(lost, AdapterNotFound | Overloaded)
    assert "gone" in str(lost)
    bad = load(nan)
    assert isinstance(bad, InvalidRequest)
    assert "adapter nan" in str(bad)
    assert isinstance(load(good), Loaded)
