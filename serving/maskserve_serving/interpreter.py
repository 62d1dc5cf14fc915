"""The Python of Triton's model processes: it imports what this process can import.

A model process ("stub") is an isolated interpreter. It finds Python, and with it a virtual
environment, by PATH, and ignores PYTHONPATH and the user's site-packages. If this process uses
either, the stubs get a virtual environment that names all its folders.
"""

from __future__ import annotations

import hashlib
import os
import site
import sys
import tempfile
import venv
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_PACKAGES = ("site-packages", "dist-packages")


def ignored_folders() -> list[str]:
    """Return the folders that this process imports from and an isolated interpreter does not."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [os.path.abspath(folder) for folder in folders if folder]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [folder for folder in dict.fromkeys(folders) if Path(folder).exists()]


def stub_programs(ignored: Sequence[str], cache: Path | None) -> Path:
    """Return the folder of the `python3` that stubs use: of this interpreter, or, if there are
    ignored folders, of a virtual environment in `cache` that has them and this one's packages.
    """
    if not ignored or cache is None:
        return Path(sys.executable).parent
    packages = [folder for folder in sys.path if Path(folder).name in _PACKAGES]
    packages = [folder for folder in packages if folder not in ignored]
    lines = [*ignored, *(f"import site; site.addsitedir({folder!r})" for folder in packages)]
    text = "".join(f"{line}\n" for line in lines)
    digest = hashlib.sha256(f"{sys.executable}\n{sys.version}\n{text}".encode()).hexdigest()[:16]
    tree = cache / f"interpreter-{digest}"
    if not (tree / "bin" / "python3").exists():
        _make(tree, text)
    return tree / "bin"


def _make(tree: Path, text: str) -> None:
    """Make the environment as a whole, because several processes may do it at once."""
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree.parent) as scratch:
        copy = Path(scratch) / "tree"
        venv.EnvBuilder(symlinks=True).create(copy)
        python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        (copy / "lib" / python / "site-packages" / "parent.pth").write_text(text, encoding="utf-8")
        with suppress(OSError):  # another process was first
            copy.rename(tree)
