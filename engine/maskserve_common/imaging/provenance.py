"""The machine-readable mark of an edit: it states that a model has painted in the picture, and
where.

Every response has it in XMP, as IPTC's digital source type. If the operator has a certificate, it
also carries a signed C2PA manifest, which names the model and the region, and no longer fits the
picture once someone has changed it. A source's own manifest becomes that of an ingredient.
"""

from __future__ import annotations

import importlib.metadata
import io
import logging
import queue
import threading
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from maskserve_common.config import Config, ConfigError, ProvenanceConfig, model_name
from maskserve_common.contracts.request import EditKind
from maskserve_common.errors import EngineFailed, InvalidRequest
from maskserve_common.imaging.containers import read_container
from maskserve_common.imaging.images import encode_png

Box = tuple[int, int, int, int]

SOURCE_TYPE = "http://cv.iptc.org/newscodes/digitalsourcetype/compositeWithTrainedAlgorithmicMedia"
"""IPTC's term for a picture of which a trained model has made a part, or all from a source."""
GENERATED_TYPE = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
"""IPTC's term for a picture that a trained model has made without a source."""
_RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
_IPTC = "http://iptc.org/std/Iptc4xmpExt/2008-02-29/"


def source_type(kind: EditKind) -> str:
    """Return IPTC's digital source type of the answers of a kind of edit."""
    return GENERATED_TYPE if kind == "generate" else SOURCE_TYPE


def edit_xmp(kind: EditKind) -> bytes:
    """Return the XMP of the answers of a kind of edit."""
    return (
        f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="{_RDF}"><rdf:Description '
        f'rdf:about="" xmlns:Iptc4xmpExt="{_IPTC}" '
        f'Iptc4xmpExt:DigitalSourceType="{source_type(kind)}"/></rdf:RDF></x:xmpmeta>'
    ).encode()


_SOURCE = {"title": "source", "relationship": "parentOf", "label": "source"}
_MOST_BOXES = {b"c2cs": 64, b"jumb": 4096}
"""Most boxes in a source's history: signatures of manifests (10 ms each to check), and boxes of any
kind."""
_MOST_HISTORY = 4 * 2**20
"""Most bytes of a history, which all edits of an edit carry on."""
log = logging.getLogger("maskserve")


class Mark(Protocol):
    """Marking of responses."""

    def xmp(self, kind: EditKind) -> bytes:
        """Return XMP for the file as it is encoded; empty: none."""

    def sign(
        self,
        encoded: bytes,
        output_format: str,
        box: Box,
        source: bytes = b"",
        kind: EditKind = "inpaint",
    ) -> bytes:
        """Return the file, signed if the operator has a certificate.

        Args:
            encoded: bytes of the response's picture.
            output_format: `png`, `jpeg` or `webp`.
            box: left, top, right and bottom of the painted area, in pixels.
            source: file of the source, if it has a manifest.
            kind: kind of the edit.

        Raises:
            EngineFailed: it cannot be signed.
        """


class Unsigned:
    """A mark without a signature, or none."""

    def __init__(self, *, mark: bool = True) -> None:
        self._mark = mark

    def xmp(self, kind: EditKind) -> bytes:
        return edit_xmp(kind) if self._mark else b""

    def sign(
        self,
        encoded: bytes,
        output_format: str,
        box: Box,
        source: bytes = b"",
        kind: EditKind = "inpaint",
    ) -> bytes:
        return encoded


def has_manifest(encoded: bytes) -> bool:
    """Whether a picture's file may have a C2PA manifest: its boxes are JUMBF's, in all formats."""
    return b"jumb" in encoded and b"c2pa" in encoded


def make_mark(config: Config) -> Mark:
    """The mark of a worker's answers.

    Raises:
        ConfigError: the certificate or its key cannot sign; the message names the key.
    """
    provenance = config.provenance
    if bool(provenance.certificate) != bool(provenance.private_key):
        missing = "private_key" if provenance.certificate else "certificate"
        raise ConfigError(f"provenance.{missing} is missing; it needs certificate and private_key")
    if not provenance.certificate:
        return Unsigned(mark=provenance.mark)
    return _Signed(provenance, model_name(config))


class _Signed(Unsigned):
    def __init__(self, config: ProvenanceConfig, model: str) -> None:
        try:
            import c2pa
        except ImportError:
            raise ConfigError(
                "provenance.certificate needs the package c2pa-python (the extra `provenance`)"
            ) from None
        super().__init__(mark=config.mark)
        self._c2pa, self._model, self._config = c2pa, model, config
        self._agent = {"name": "maskserve", "version": importlib.metadata.version("maskserve")}
        # A thumbnail would be larger than the picture. A source's file sends nobody anywhere.
        plain = {
            "builder": {"thumbnail": {"enabled": False}},
            "verify": {"remote_manifest_fetch": False, "ocsp_fetch": False},
        }
        self._context = c2pa.Context(c2pa.Settings.from_dict(plain))
        try:
            self._signer = c2pa.Signer.from_info(
                c2pa.C2paSignerInfo(
                    config.algorithm.encode(),
                    Path(config.certificate).read_bytes(),
                    Path(config.private_key).read_bytes(),
                    config.timestamp_url.encode() or None,
                )
            )
            self.sign(encode_png(np.zeros((8, 8, 3), np.uint8)), "png", (0, 0, 8, 8))
        except (c2pa.C2paError, EngineFailed, OSError) as error:
            raise ConfigError(f"provenance.certificate cannot sign: {error}") from None

    def sign(
        self,
        encoded: bytes,
        output_format: str,
        box: Box,
        source: bytes = b"",
        kind: EditKind = "inpaint",
    ) -> bytes:
        try:
            if not self._config.timestamp_url:
                return self._signed(encoded, output_format, box, source, kind)
            return self._in_time(encoded, output_format, box, source, kind)
        except self._c2pa.C2paError as error:
            raise EngineFailed(f"the picture could not be signed: {error}") from None

    def _signed(
        self, encoded: bytes, output_format: str, box: Box, source: bytes, kind: EditKind
    ) -> bytes:
        if source:
            try:
                return self._built(self._with_source(box, source), encoded, output_format)
            except (self._c2pa.C2paError, InvalidRequest) as error:
                log.warning("a source's C2PA manifest is left out: %s", error)
        manifest = self._generated() if kind == "generate" else self._manifest(box)
        plain = self._c2pa.Builder(manifest, self._context)
        return self._built(plain, encoded, output_format)

    def _built(self, builder: Any, encoded: bytes, output_format: str) -> bytes:
        signed = io.BytesIO()
        builder.sign(self._signer, f"image/{output_format}", io.BytesIO(encoded), signed)
        return signed.getvalue()

    def _with_source(self, box: Box, source: bytes) -> Any:
        """Return the builder that signs an edit of a file with a manifest.

        Raises:
            C2paError: its manifest cannot be read.
            InvalidRequest: its history is too long to read.
        """
        at = source.index(b"jumb")
        size = int.from_bytes(source[max(at - 4, 0) : at], "big")  # of all manifests
        if size > _MOST_HISTORY or any(source.count(x) > most for x, most in _MOST_BOXES.items()):
            accepted = f"{_MOST_BOXES[b'c2cs']} manifests of {_MOST_HISTORY} bytes"
            raise InvalidRequest("IMAGE", "has a long history", accepted)
        builder = self._c2pa.Builder(self._manifest(box, opened=True), self._context)
        kind = f"image/{read_container(source).kind}"
        builder.add_ingredient(_SOURCE, kind, io.BytesIO(source))
        return builder

    def _in_time(self, *arguments: Any) -> bytes:
        """Sign in a thread: the library waits for the time-stamp authority without limit."""
        results: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

        def work() -> None:
            try:
                results.put(self._signed(*arguments))
            except Exception as error:
                results.put(error)

        threading.Thread(target=work, name="timestamp", daemon=True).start()
        try:
            result = results.get(timeout=self._config.timestamp_s)
        except queue.Empty:
            problem = (
                f"the time-stamp authority did not answer within {self._config.timestamp_s:g} s"
            )
            raise EngineFailed(f"the picture could not be signed: {problem}") from None
        if isinstance(result, Exception):
            raise result
        return result

    def _manifest(self, box: Box, *, opened: bool = False) -> dict[str, Any]:
        """Return the C2PA manifest of an edit; `opened` adds the action that opens an
        ingredient.
        """
        left, top, right, bottom = box
        painted = {
            "type": "rectangle",
            "unit": "pixel",
            "origin": {"x": left, "y": top},
            "width": right - left,
            "height": bottom - top,
        }
        edited = {
            "action": "c2pa.edited",
            "softwareAgent": {"name": self._model},
            "digitalSourceType": SOURCE_TYPE,
            "changes": [
                {
                    "description": "repainted by a model",
                    "region": [{"type": "spatial", "shape": painted}],
                }
            ],
        }
        began: dict[str, Any] = {"action": "c2pa.created", "digitalSourceType": SOURCE_TYPE}
        if opened:
            ingredients = {"ingredientIds": [_SOURCE["label"]]}
            began = {"action": "c2pa.opened", "parameters": ingredients}
        return self._manifest_of(began, edited)

    def _generated(self) -> dict[str, Any]:
        """Return the C2PA manifest of a picture without a source."""
        created = {
            "action": "c2pa.created",
            "softwareAgent": {"name": self._model},
            "digitalSourceType": GENERATED_TYPE,
        }
        return self._manifest_of(created)

    def _manifest_of(self, *actions: dict[str, Any]) -> dict[str, Any]:
        assertion = {"label": "c2pa.actions.v2", "data": {"actions": list(actions)}}
        return {"claim_generator_info": [self._agent], "assertions": [assertion]}
