"""The archive that travels to a GPU machine without a network, and a list of its items.

The machine has Python 3.12, torch for CUDA, transformers and pytest. It lacks Triton, a numpy that
its Python stub reads, diffusers and clients of Triton: their wheels come from pip here. It may lack
Python's shared library: the one of a Python 3.12 on this machine travels, if there is one. Weights
do not travel (`random_model`).
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.reports import table, write_json

MOST = 60 * 2**20
"""Bytes of the archive."""
PYTHON = "3.12"
LIBRARY = f"libpython{PYTHON}.so.1.0"
"""Python's shared library, which Triton's models need."""
ARCHIVE = "gpu_run.tar.xz"
_PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in (35, 28, 27, 24, 17)), "manylinux2014_x86_64",
              "manylinux1_x86_64")  # fmt: skip
_PACKAGES = (
    "nvidia-pytriton", "numpy", "diffusers", "torchao", "accelerate", "msgspec", "tomli_w",
    "protobuf", "grpcio", "grpcio-health-checking", "python-rapidjson", "psutil", "pillow",
    "isal", "packaging", "safetensors", "fsspec", "tqdm", "xxhash",
    # Clients of Triton, and what they import.
    "tritonclient", "geventhttpclient", "gevent", "greenlet", "zope.event", "zope.interface",
    "brotli", "certifi",
    "pytest-asyncio",
)  # fmt: skip
_FOLDERS = ("benchmarks", "client", "engine", "ensemble", "model_repository", "router", "scripts",
            "serving", "services", "studies")  # fmt: skip
_FILES = ("pyproject.toml", "LICENSE", "docs/benchmarks/kernels.json", "tests/__init__.py",
          "tests/conftest.py")  # fmt: skip
_TESTS = ("tests/gpu/", "tests/fakes/", "tests/support/")
_PICTURES = ("assets/photos/", "assets/demo/")
_LEFT_OUT = (
    "nvidia_pytriton.libs/libpython3-",
    *(f"pytriton/tritonserver/python_backend_stubs/3.{minor}/" for minor in (8, 9, 10, 11, 13)),
    *(f"pytriton/{part}/" for part in ("client", "proxy", "check", "models", "model_config")),
    "pytriton/tritonserver/external_libs/",
)
"""Parts of wheels that no worker uses, by their beginnings."""
START = """\
#!/bin/sh
# Runs `scripts/bench gpu_run` with the packages of this archive, before those of the machine, and
# with its library of Python, if the machine has none.
cd "$(dirname "$0")" || exit 1
export PYTHONPATH=$PWD/site:{folders}
python3 -c 'import ctypes; ctypes.CDLL("{library}")' 2>/dev/null ||
    export LD_LIBRARY_PATH=$PWD/lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}
exec python3 scripts/bench gpu_run "$@"
"""


class BundleError(Exception):
    """The archive cannot be made; the message is a sentence."""


def checkout_files() -> list[Path]:
    """Return the files of the checkout that travel, relative to it: code, pictures, tokenizers and
    config.json files; no weights.
    """
    output = subprocess.run(
        ["git", "-C", str(CHECKOUT), "ls-files", "-z"], capture_output=True, check=True
    ).stdout.decode()
    return [Path(name) for name in output.split("\0") if name and _travels(name)]


def _travels(name: str) -> bool:
    if name.startswith("assets/models/"):
        return not name.endswith(".safetensors")
    if name.startswith((*_PICTURES, *_TESTS)) or name in _FILES:
        return not name.startswith("assets/photos/held-out/")
    return name.split("/")[0] in _FOLDERS and not name.endswith(".safetensors")


def package_folders() -> list[str]:
    """Return the folders of the checkout that hold packages."""
    return sorted({path.parent.parent.name for path in CHECKOUT.glob("*/maskserve_*/__init__.py")})


def requirements() -> list[str]:
    """Return the packages that travel, in the versions that are installed here."""
    return [f"{name}=={importlib.metadata.version(name)}" for name in _PACKAGES]


def download(names: Sequence[str], folder: Path) -> list[Path]:
    """Download wheels for the GPU machine's Python.

    Raises:
        BundleError: pip cannot.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
               "--disable-pip-version-check", "--only-binary=:all:", "--implementation", "cp",
               "--python-version", PYTHON, "--dest", str(folder)]  # fmt: skip
    command += [f"--platform={platform}" for platform in _PLATFORMS]
    process = subprocess.run([*command, *names], capture_output=True, text=True, check=False)
    if process.returncode:
        *_, why = process.stderr.strip().splitlines() or ["no reason"]
        raise BundleError(f"pip cannot download the wheels for Python {PYTHON}: {why}")
    return sorted(folder.glob("*.whl"))


def unpack(wheels: Iterable[Path], site: Path) -> None:
    """Unpack wheels without what no worker uses: tests, other Pythons' stubs, torchao's kernels."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                name = member.filename
                if not (name.startswith(_LEFT_OUT) or "/tests/" in name or _is_kernel(name)):
                    archive.extract(member, site)
    package = site / "pytriton" / "__init__.py"
    if package.exists():
        package.write_text("", encoding="utf-8")  # it imports the parts that are left out
    text = importlib.metadata.distribution("maskserve").read_text("METADATA") or ""
    metadata = site / f"maskserve-{importlib.metadata.version('maskserve')}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(text, encoding="utf-8")


def _is_kernel(name: str) -> bool:
    return name.startswith("torchao/") and name.endswith(".so")


def python_library() -> Path | None:
    """Return the shared library of a Python of that version on this machine; None: there is
    none.
    """
    program = shutil.which(f"python{PYTHON}")
    if program is None:
        return None
    code = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
    printed = subprocess.run([program, "-c", code], capture_output=True, text=True, check=False)
    library = Path(printed.stdout.strip(), LIBRARY)
    return library if printed.returncode == 0 and library.is_file() else None


def items_of(folder: Path) -> list[tuple[str, int]]:
    """Return the items of the unpacked archive and their bytes: packages, and parts of the
    checkout.
    """
    sizes: dict[str, int] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        parts = file.relative_to(folder).parts
        item = "/".join(parts[: 2 if parts[0] in ("site", "assets") else 1])
        sizes[item] = sizes.get(item, 0) + file.stat().st_size
    return sorted(sizes.items(), key=lambda pair: -pair[1])


def write_bundle(folder: Path, wheels: Sequence[Path] | None = None) -> Path:
    """Write the archive and bundle.json to a folder, print the items, and return the archive.

    Args:
        folder: made if it is not there.
        wheels: wheels to unpack; None: pip downloads them.

    Raises:
        BundleError: pip cannot download, or the archive is too large.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        tree = Path(scratch) / "tree"
        for file in checkout_files():
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CHECKOUT / file, tree / file)
        if wheels is None:
            wheels = download(requirements(), Path(scratch))
        unpack(wheels, tree / "site")
        folders = ":".join(f"$PWD/{name}" for name in package_folders())
        start = START.format(folders=folders, library=LIBRARY)
        (tree / "gpu_run.sh").write_text(start, encoding="utf-8")
        (tree / "gpu_run.sh").chmod(0o755)
        if library := python_library():
            (tree / "lib").mkdir()
            shutil.copy(library, tree / "lib" / LIBRARY)
        for program in tree.glob("site/pytriton/tritonserver/**/*"):
            if program.is_file():
                program.chmod(0o755)
        items = items_of(tree)
        archive = folder / ARCHIVE
        with tarfile.open(archive, "w:xz", preset=6) as tar:
            tar.add(tree, arcname=".")
    size = archive.stat().st_size
    report = {"archive": size, "most": MOST, "items": dict(items)}
    write_json(report, folder / "bundle.json")
    total = sum(number for _, number in items)
    rows = [*items, ("all, unpacked", total), (f"{ARCHIVE}, packed", size)]
    print(table(("item", "bytes"), rows))
    if size > MOST:
        archive.unlink()
        raise BundleError(f"the archive has {size} bytes, and {MOST} may travel")
    return archive
