"""The folder of a test picks its marker; GPU and slow tests are left out unless asked for. Those of
a GPU run one after the other.
"""

from __future__ import annotations

import gc
import os
import secrets
import signal
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.covering import leave_some_to_slow_runs
from tests.support.draws import SEED_VARIABLE, drawing
from tests.support.examples import examples
from tests.support.shards import shard_of, split

# Of what is imported and collected, millions of objects, nothing goes before the end: no look
# through it is worth its time, neither now nor in any test.
gc.disable()

HERE = Path(__file__).parent
FOLDERS = ("unit", "contract", "triton", "e2e", "gpu")


# Another processor's instructions for torch are another's for oneDNN, too: else torch has it pack
# numbers for instructions that torch has been told not to use.
_ISA = {"default": "SSE41", "avx2": "AVX2"}
if _CAPABILITY := os.environ.get("ATEN_CPU_CAPABILITY"):
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", _ISA.get(_CAPABILITY.lower(), "ALL"))

# Tests started in a shell's background inherit an ignored SIGINT, and so would all they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# An example may take as long as a busy machine has it take: tests count, they do not time.
settings.register_profile(
    "maskserve",
    examples(
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=False,  # as Hypothesis has it where it sees a CI; --seed has a say
    ),
)
settings.load_profile("maskserve")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow", action="store_true", help="run the tests marked slow (or set MASKSERVE_FULL=1)"
    )
    parser.addoption(
        "--slow-shard",
        metavar="I/N",
        help="run one of N shards of the slow tests, no others",
    )
    parser.addoption(
        "--products",
        choices=("mkl", "onednn"),
        help="whose products the CPU computes in the tests' processes (default: as it is served)",
    )
    parser.addoption(
        "--seed",
        default="0",
        metavar="N",
        help="what all draws come from: a number from 0 to 2³¹ - 1, or `fresh` (default 0)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Settles the seed, before pytest-xdist hands options on."""
    seed = config.getoption("--seed")
    if seed == "fresh":
        seed = str(secrets.randbelow(2**31))
    if not (seed.isdecimal() and int(seed) < 2**31):
        raise pytest.UsageError(f"--seed takes a number from 0 to 2³¹ - 1, or `fresh`: {seed!r}")
    config.option.seed = os.environ[SEED_VARIABLE] = seed
    if products := config.getoption("--products"):
        import torch

        from maskserve_engine.layers import onednn

        # As on another processor; is_faster() asks the host once. Without oneDNN, convolutions are
        # MKL's products, too.
        onednn.is_faster = cache(lambda: products == "onednn")
        torch.backends.mkldnn.enabled = products == "onednn"


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: --seed {config.option.seed}"


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"drawn by --seed {config.option.seed}")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    case = getattr(request, "param_index", 0)
    with drawing(f"{request.node.nodeid} {fixturedef.argname} {case}"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with drawing(item.nodeid):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
        if folder in FOLDERS:
            item.add_marker(getattr(pytest.mark, folder))
    leave_some_to_slow_runs(items)
    shard = config.getoption("--slow-shard")
    if shard:
        items[:], deselected = split(items, *shard_of(shard), HERE / "e2e")
        config.hook.pytest_deselected(items=deselected)
    _skip(items, "gpu", _no_cuda)
    if not (shard or config.getoption("--slow") or os.environ.get("MASKSERVE_FULL") == "1"):
        _skip(items, "slow", lambda: "slow: runs with --slow or MASKSERVE_FULL=1")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries count what is left behind


def _skip(items: list[pytest.Item], marker: str, reason: Callable[[], str | None]) -> None:
    """Skip the marked tests if `reason()` gives one; it is asked only when there are any."""
    marked = [item for item in items if item.get_closest_marker(marker)]
    why = reason() if marked else None
    for item in marked:
        if why:
            item.add_marker(pytest.mark.skip(reason=why))


def _no_cuda() -> str | None:
    if os.environ.get("MASKSERVE_GPU_TESTS") == "cpu":
        return None  # a rehearsal: tests/gpu/conftest.py
    try:
        import torch
    except ImportError:
        return "gpu: torch is not installed"
    return None if torch.cuda.is_available() else "gpu: no CUDA device here"


@pytest.fixture(scope="session")
def tiny_fill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny FLUX Fill model with random weights."""
    from tests.fakes.tiny_model import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny-fill", "fill")


@pytest.fixture(scope="session")
def tiny_inpaint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny FLUX model that is served with the inpainting semantics."""
    from tests.fakes.tiny_model import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny-inpaint", "inpaint")


@pytest.fixture(scope="session")
def tiny_kontext(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny FLUX model that takes the source as reference."""
    from tests.fakes.tiny_model import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny-kontext", "reference")


@pytest.fixture(scope="session")
def tiny_flux(tiny_fill: Path, tiny_inpaint: Path, tiny_kontext: Path) -> dict[str, Path]:
    """Folders of tiny FLUX models by what they take of an edit."""
    return {"fill": tiny_fill, "inpaint": tiny_inpaint, "reference": tiny_kontext}


@pytest.fixture(scope="session")
def tiny_unets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny Stable Diffusion models: `sd` and `sdxl`, `base` and `fill`."""
    from tests.fakes.tiny_unet import VARIANTS, build_tiny_unet

    folder = tmp_path_factory.mktemp("models")
    return {
        name: build_tiny_unet(folder / name, xl=name.startswith("sdxl"), fill=name.endswith("fill"))
        for name in VARIANTS
    }
