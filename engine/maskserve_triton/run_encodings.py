"""Encodings that edits of one workflow run share, as values of the run in the host's memory.

The encoding of a picture or prompt depends on its key alone, so the encoder of each worker on the
host, or of a stage service there, takes what another one has made. Only encoders write these
values: their names are digests of keys, not of contents, which a client could choose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from maskserve_common.files.values import Values
from maskserve_engine.base.job import Conditioning
from maskserve_engine.families.encoder import TemplateEncoding
from maskserve_engine.stages.vae_pieces import CellSums


class RunScope(NamedTuple):
    """A workflow run of a client."""

    scope: str
    """Scope of the client."""
    run: str


class RunEncodings:
    """May be used from any thread.

    Args:
        values: the host's folder of values.
        revision: returns the digest of the stages.
    """

    def __init__(self, values: Values, revision: Callable[[], str]) -> None:
        self._values, self._revision = values, revision

    def template(self, pixels_id: str, run: RunScope) -> TemplateEncoding | None:
        """Return a picture's encoding; None: the run has none."""
        arrays = self._read("template", pixels_id, run)
        return None if arrays is None else _template(arrays)

    def keep_template(self, pixels_id: str, encoding: TemplateEncoding, run: RunScope) -> None:
        """Keep a picture's encoding, if there is room."""
        self._keep("template", pixels_id, _arrays(encoding), run)

    def prompt(self, key: object, run: RunScope) -> Conditioning | None:
        """Return a prompt's embeddings; None: the run has none.

        Args:
            key: everything that they depend on, with a stable `repr`.
            run: the run.
        """
        arrays = self._read("prompt", repr(key), run)
        return None if arrays is None else {name: x.numpy() for name, x in arrays.items()}

    def keep_prompt(self, key: object, embeddings: Conditioning, run: RunScope) -> None:
        """Keep a prompt's embeddings, if there is room."""
        arrays = {name: torch.from_numpy(x) for name, x in embeddings.items()}
        self._keep("prompt", repr(key), arrays, run)

    def _read(self, kind: str, key: str, run: RunScope) -> dict[str, Tensor] | None:
        raw = self._values.read_named(self._name(kind, key), run.scope, run.run)
        return None if raw is None else load(raw)

    def _keep(self, kind: str, key: str, arrays: dict[str, Tensor], run: RunScope) -> None:
        raw = save({name: x.cpu().contiguous() for name, x in arrays.items()})
        self._values.put_named(self._name(kind, key), [raw], run.scope, run.run)

    def _name(self, kind: str, key: str) -> str:
        return hashlib.sha256(f"{self._revision()} {kind} {key}".encode()).hexdigest()


def _arrays(encoding: TemplateEncoding) -> dict[str, Tensor]:
    arrays = {"moments": torch.from_numpy(encoding.moments)}
    if encoding.middle is not None:
        arrays["middle"] = encoding.middle
    if (sums := encoding.sums) is not None:
        arrays["sums"] = sums.sums
        places = {"levels": sums.levels, "widths": sums.widths, "size": sums.size}
        arrays |= {name: torch.tensor(values) for name, values in places.items()}
    return arrays


def _template(arrays: dict[str, Tensor]) -> TemplateEncoding:
    sums = None
    if "sums" in arrays:
        levels, widths, (height, width) = (
            tuple(arrays[name].tolist()) for name in ("levels", "widths", "size")
        )
        sums = CellSums(arrays["sums"], levels, widths, (height, width))
    return TemplateEncoding(arrays["moments"].numpy(), arrays.get("middle"), sums)
