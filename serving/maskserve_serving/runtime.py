"""Finds the Triton server for the workers: an installed one, or the one from pip.

nvidia-pytriton's wheel contains a whole tritonserver with the Python backend, and a stub process
for each Python version. `pip_runtime` copies the server once per version into a cache folder, and
puts this interpreter's stub where the backend expects it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from maskserve_serving.errors import ServeError

OLDEST_GLIBC = (2, 35)
_PACKAGE = "nvidia-pytriton"
_NUMPY_1, _NUMPY_2 = b"numpy.core", b"numpy._core"
_SUPERVISOR_PACKAGES = ("psutil", "tomli_w")
_WORKER_PACKAGES = ("torch", "diffusers", "transformers")
_REASONS = {"torch": " (the first with attention over rows of different lengths)"}
_ROUTER_PACKAGES = ("grpc_health", "httptools", "prometheus_client", "starlette", "uvicorn")


@dataclass(frozen=True, slots=True)
class Runtime:
    """Paths to start a Triton server."""

    binary: Path
    backends: Path | None
    """Folder of backends; None: the server's own default."""
    libraries: tuple[Path, ...]
    """Folders for LD_LIBRARY_PATH."""
    version: str


def check_packages(
    *, router: bool = False, find: Callable[[str], object] = importlib.util.find_spec
) -> None:
    """Check that the packages of the workers, and of the router, are installed.

    Args:
        router: True if a router is started, too.
        find: finds a package by name; returns None if it is not installed.

    Raises:
        ServeError: a package is missing; the text says how to install it.
    """
    required = dict.fromkeys((*_SUPERVISOR_PACKAGES, *_WORKER_PACKAGES), "engine,server")
    if router:
        required |= dict.fromkeys(_ROUTER_PACKAGES, "engine,server,router")
    for module, extras in required.items():
        if find(module) is None:
            raise ServeError(not_installed(module, extras))
    check_floors(_WORKER_PACKAGES, importlib.metadata.requires("maskserve") or ())


def not_installed(module: str, extras: str) -> str:
    return f"the package {module} is not installed (in the checkout: pip install -e '.[{extras}]')"


def check_floors(packages: Iterable[str], requirements: Iterable[str]) -> None:
    """Check that installed packages have versions that maskserve supports.

    Args:
        packages: packages to check.
        requirements: maskserve's requirements, from its metadata.

    Raises:
        ServeError: a package is too old or too new; the text has both versions.
    """
    from packaging.requirements import Requirement  # check_host.py runs before it is installed

    specifiers = {r.name: r.specifier for r in map(Requirement, requirements)}
    for package in packages:
        version = importlib.metadata.version(package)
        if not specifiers[package].contains(version, prereleases=True):
            raise ServeError(
                f"{package} {version} is installed, and maskserve needs {package}"
                f"{specifiers[package]}{_REASONS.get(package, '')}; install another {package}, or "
                "a newer maskserve"
            )


def find_runtime(tritonserver: Path | None, cache_dir: Path) -> Runtime:
    """Return the named server, else one on PATH (as in NVIDIA's container), else the one from pip.

    Raises:
        ServeError: there is none, or this machine cannot run it.
    """
    if tritonserver is not None:
        return installed_runtime(tritonserver)
    on_path = shutil.which("tritonserver")
    return installed_runtime(Path(on_path)) if on_path else pip_runtime(cache_dir)


def installed_runtime(binary: Path) -> Runtime:
    """Return a server with its backends beside it, as in /opt/tritonserver."""
    binary = binary.resolve()
    if not (binary.is_file() and os.access(binary, os.X_OK)):
        raise ServeError(f"--tritonserver: {binary} is not an executable file")
    backends = binary.parent.parent / "backends"
    stub = backends / "python" / "triton_python_backend_stub"
    check_stub(stub, sys.version_info[:2])
    check_numpy(stub, importlib.metadata.version("numpy"))
    return Runtime(binary, backends if backends.is_dir() else None, (), "installed")


def pip_runtime(cache_dir: Path) -> Runtime:
    """Return the server of the nvidia-pytriton package, copied into `cache_dir`."""
    module_spec = importlib.util.find_spec("pytriton")
    if module_spec is None or not module_spec.submodule_search_locations:
        raise ServeError(
            f"no Triton server: the package {_PACKAGE} is not installed (in the checkout: "
            "pip install -e '.[engine,server]'), --tritonserver was not given, and tritonserver is "
            "not on PATH"
        )
    package = Path(next(iter(module_spec.submodule_search_locations))) / "tritonserver"
    version = importlib.metadata.version(_PACKAGE)
    check_glibc(platform.libc_ver())
    stub = find_stub(package / "python_backend_stubs", sys.version_info[:2], version)
    check_numpy(stub, importlib.metadata.version("numpy"))
    python_library = find_libpython(sys.version_info[:2])
    tree = cache_dir / f"pytriton-{version}-py{sys.version_info[0]}.{sys.version_info[1]}"
    if not (tree / "bin" / "tritonserver").is_file():
        _copy_server(package, stub, tree)
    libraries = [package.parent.parent / "nvidia_pytriton.libs"]
    if python_library is not None:
        libraries.append(python_library)
    return Runtime(tree / "bin" / "tritonserver", tree / "backends", tuple(libraries), version)


def check_machine() -> None:
    """Raise a ServeError if this machine or Python cannot run the server from pip."""
    check_glibc(platform.libc_ver())
    find_libpython(sys.version_info[:2])


def check_glibc(libc: tuple[str, str]) -> None:
    """Raise a ServeError if `libc`, from platform.libc_ver(), cannot run the server."""
    name, version = libc
    oldest = ".".join(map(str, OLDEST_GLIBC))
    if name != "glibc":
        raise ServeError(f"Triton needs glibc {oldest} or newer, and this system has another libc")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_GLIBC:
        raise ServeError(
            f"Triton needs glibc {oldest} or newer (Debian 12, Ubuntu 22.04), and this system "
            f"has glibc {version}; run it in a container"
        )


def find_stub(stubs: Path, python: tuple[int, int], version: str) -> Path:
    """Return the stub process for this Python."""
    stub = stubs / f"{python[0]}.{python[1]}" / "triton_python_backend_stub"
    if not stub.is_file():
        versions = sorted(
            (path.name for path in stubs.iterdir()) if stubs.is_dir() else (),
            key=lambda name: [int(part) for part in name.split(".")],
        )
        raise ServeError(
            f"{_PACKAGE} {version} cannot run models under Python {python[0]}.{python[1]}; "
            f"make the virtual environment with one of Python {', '.join(versions)}"
        )
    return stub


def check_stub(stub: Path, python: tuple[int, int]) -> None:
    """Raise a ServeError if the server's stub process was built for another Python.

    Models would then not find the packages that are installed with maskserve.
    """
    if not stub.is_file():
        return
    built = re.search(rb"libpython(\d+)\.(\d+)\.so", stub.read_bytes())
    if built is None or (version := (int(built[1]), int(built[2]))) == python:
        return
    server_python, local_python = (".".join(map(str, pair)) for pair in (version, python))
    raise ServeError(
        f"the Triton server of {stub} runs models under Python {server_python}, and maskserve is "
        f"installed under Python {local_python}; install it in a virtual environment of Python "
        f"{server_python}, "
        f"or use a server that was built for Python {local_python}"
    )


def check_numpy(stub: Path, version: str) -> None:
    """Raise a ServeError if the server's stub process reads arrays of numpy 1 alone.

    A pybind11 before 2.12 does not know the module that numpy 2 renamed (`_NUMPY_2`), and takes the
    bytes of every tensor for none.
    """
    if int(version.split(".")[0]) < 2 or not stub.is_file():
        return
    code = stub.read_bytes()
    if _NUMPY_1 in code and _NUMPY_2 not in code:
        raise ServeError(
            f"numpy {version} is installed, and the Triton server of {stub} reads arrays of numpy "
            "1 alone; install numpy 1.26 (pip install 'numpy<2'), or use a server with a newer "
            "Python backend"
        )


def find_libpython(python: tuple[int, int]) -> Path | None:
    """Return the folder of the shared library of the stub; None: the loader finds it."""
    name = f"libpython{python[0]}.{python[1]}.so.1.0"
    folders = [sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LIBPL")]
    folders += [str(Path(sys.base_prefix) / "lib")]
    for folder in folders:
        if folder and (Path(folder) / name).is_file():
            return Path(folder)
    try:
        ctypes.CDLL(name)
    except OSError:
        raise ServeError(
            f"Python's shared library {name} is missing, which Triton's Python models need; "
            f"install it (Debian and Ubuntu: apt-get install libpython{python[0]}.{python[1]})"
        ) from None
    return None


def _copy_server(package: Path, stub: Path, tree: Path) -> None:
    """Copy the server with its stub to `tree`, as a whole, because several processes may do it at
    once.
    """
    try:
        tree.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServeError(
            f"cannot copy Triton to {tree.parent}: {error.strerror}; set XDG_CACHE_HOME to a "
            "folder that can be written"
        ) from error
    with tempfile.TemporaryDirectory(dir=tree.parent) as scratch:
        copy = Path(scratch) / "tree"
        for part in ("bin", "backends", "caches"):
            shutil.copytree(
                package / part, copy / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(stub, copy / "backends" / "python" / stub.name)
        for program in (
            copy / "bin" / "tritonserver",
            copy / "backends" / "python" / stub.name,
        ):
            program.chmod(0o755)
        try:
            copy.rename(tree)
        except OSError as error:
            if not (tree / "bin" / "tritonserver").is_file():
                raise ServeError(
                    f"cannot copy Triton to {tree}: {error.strerror}; remove that folder"
                ) from error
