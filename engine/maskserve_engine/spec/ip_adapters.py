"""IP-Adapters that edits may name: a file for each, and the image encoder that they share.

A file has a projection from the image encoder's output to tokens as wide as a prompt's, and two
layers per attention that make keys and values of these tokens (`FileLayout`). Its header is checked
when an edit names it; only the encoder reads its weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from maskserve_common.config import Config, ConfigError
from maskserve_common.config_file import read_json
from maskserve_common.contracts.keys import ADAPTER_NAME
from maskserve_common.errors import AdapterNotFound, InvalidRequest
from maskserve_common.files.digests import file_digest
from maskserve_common.files.safetensors_header import BadHeader, header_of
from maskserve_engine.spec.model_spec import IpLayout, ModelSpec

_SUFFIX = ".safetensors"


class FileLayout(NamedTuple):
    """Names and forms of a publisher's files."""

    projection: str
    """Prefix of the names of the projection's tensors."""
    layer: str
    """Name of a layer, by its number and `k` or `v`."""
    biased: bool
    """Whether the layers have biases."""
    token_counts: tuple[int, ...]
    """Tokens that the plain form may have."""
    forms: tuple[str, ...]

    def names(self, number: int, part: str) -> tuple[str, str]:
        """Return the names of a layer's weight and bias."""
        layer = self.layer.format(number, part)
        return f"{layer}.weight", f"{layer}.bias"


LAYOUTS: Mapping[IpLayout, FileLayout] = {
    "h94": FileLayout("image_proj.", "ip_adapter.{}.to_{}_ip", False, (4,), ("plain", "plus")),
    "xlabs": FileLayout(
        "ip_adapter_proj_model.",
        "double_blocks.{}.processor.ip_adapter_double_stream_{}_proj",
        True,
        (4, 16),
        ("plain",),
    ),
}
_OTHER_FORMS = {
    "perceiver_resampler.proj_in.weight": "FaceID plus",
    "proj.3.weight": "full face",
    "proj.0.weight": "FaceID",
}
"""Forms that no model is served with, by a tensor of the projection."""
Shape = tuple[int, ...]


class ImageEncoderSizes(NamedTuple):
    """Sizes of a CLIPVisionModelWithProjection."""

    side: int
    """Side of its square picture, in pixels."""
    hidden: int
    """Width of its hidden states, which the form `plus` reads."""
    projected: int
    """Width of its projected output, which the plain form reads."""


class KnownIpAdapter(NamedTuple):
    name: str
    path: Path
    version: tuple[int, int] = (0, 0)
    """Bytes and modification time, which change when the file is replaced."""
    side: int = 0
    """Side of the image encoder's picture, in pixels."""
    content: str = ""
    """Digest of the file, if encoders of a stage service read copies of it; else empty."""
    problem: str = ""
    """Reason why it is not served; empty: it is."""


class IpAdapters:
    """The IP-Adapters of `[ip_adapters] folder`; every look-up reads the disk."""

    def __init__(self, config: Config, spec: ModelSpec) -> None:
        self._config, self._spec = config.ip_adapters, spec
        self._has_copies = bool(config.stages.service)
        self._known: dict[str, KnownIpAdapter] = {}

    @property
    def sizes(self) -> ImageEncoderSizes:
        """Sizes of the image encoder.

        Raises:
            ConfigError: its config.json is missing, or says none.
        """
        file = self._config.encoder_folder / "config.json"
        values = read_json(file)
        try:
            names = "image_size", "hidden_size", "projection_dim"
            return ImageEncoderSizes(*(int(values[name]) for name in names))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"[ip_adapters] image_encoder: {file}: {error!r}") from error

    def find(self, name: str, field: str = "SETTINGS.ip_adapter.name") -> KnownIpAdapter:
        """Return the IP-Adapter of this name.

        Raises:
            AdapterNotFound: there is none.
            InvalidRequest: it is not served, or IP-Adapters are not.
        """
        if not self._config.folder:
            raise InvalidRequest(field, "IP-Adapters are not served here", "no ip_adapter")
        if self._spec.ip_adapters is None:
            problem = "the served model takes no IP-Adapters"
            raise InvalidRequest(field, problem, "no ip_adapter, or another model")
        path = Path(self._config.folder) / f"{name}{_SUFFIX}"
        try:
            stat = path.stat() if ADAPTER_NAME.fullmatch(name) else None
        except OSError:
            stat = None
        if stat is None:
            raise AdapterNotFound(f"{field}: there is no IP-Adapter {name}")
        version, known = (stat.st_size, stat.st_mtime_ns), self._known.get(name)
        if known is None or known.version != version:
            known = self._known[name] = self._described(KnownIpAdapter(name, path, version))
        if known.problem:
            raise InvalidRequest(field, f"IP-Adapter {path.name} {known.problem}")
        return known

    def _described(self, plain: KnownIpAdapter) -> KnownIpAdapter:
        try:
            sizes = self.sizes
            problem = problem_of(shapes_of(plain.path), self._spec, sizes)
            content = content_of(plain.path) if self._has_copies and not problem else ""
        except (BadHeader, OSError) as error:
            return plain._replace(problem=str(error))
        except ConfigError as error:
            return plain._replace(problem=f"needs an image encoder: {error}")
        return plain._replace(side=sizes.side, content=content, problem=problem)


def layout_of(names: Iterable[str]) -> FileLayout | None:
    """Return the layout of an IP-Adapter with tensors of these names; None: it is none."""
    names = tuple(names)
    for layout in LAYOUTS.values():
        if any(name.startswith(layout.projection) for name in names):
            return layout
    return None


def shapes_of(file: Path) -> dict[str, Shape]:
    """Return the shapes of a file's tensors, by its header.

    Raises:
        BadHeader: it is not a safetensors file, or cut short.
        OSError: it cannot be read.
    """
    return {name: tensor.shape for name, tensor in header_of(file).tensors.items()}


def content_of(file: Path) -> str:
    """Return the digest of a file's bytes; hosts with copies get the same one.

    Raises:
        OSError: it cannot be read.
    """
    return file_digest(file.parent, file.name)


def problem_of(
    shapes: Mapping[str, Shape], spec: ModelSpec, encoder: ImageEncoderSizes | None = None
) -> str:
    """Return why a file with tensors of these shapes is not served; empty: it is.

    Args:
        shapes: shapes of its tensors.
        spec: spec of the model.
        encoder: sizes of the image encoder; None: the one that the file is for.
    """
    takes = spec.ip_adapters
    if takes is None:
        return "does not go with the served model, which takes no IP-Adapters"
    layout = LAYOUTS[takes.layout]
    if layout_of(shapes) is not layout:
        other = "" if layout_of(shapes) is None else " for this model"
        return f"is no IP-Adapter{other}: it has no {layout.projection}"
    if (form := form_of(shapes)) not in layout.forms:
        return f"has the form {form}, which is not served for this model; {accepted_forms(layout)}"
    expected = _projection_shapes(shapes, layout, takes.text, encoder or image_encoder_of(shapes))
    for number, width in takes.layers:
        for part in "kv":
            weight, bias = layout.names(number, part)
            expected[weight] = (width, takes.text)
            if layout.biased:
                expected[bias] = (width,)
    for name, shape in expected.items():
        if name not in shapes:
            return f"has no {name}, which the served model needs"
        if shapes[name] != shape:
            return f"is for another model: its {name} is {shapes[name]}, expected {shape}"
    further = (n for n in shapes if n not in expected and not n.startswith(layout.projection))
    other = next(further, "")
    return f"has {other}, which the served model does not take" if other else ""


def form_of(shapes: Mapping[str, Shape]) -> str:
    """Return the form of a file's projection: `plain`, `plus` or one that is not served."""
    layout = layout_of(shapes)
    prefix = "" if layout is None else layout.projection
    forms = {"latents": "plus", **_OTHER_FORMS}
    return next((form for name, form in forms.items() if f"{prefix}{name}" in shapes), "plain")


def accepted_forms(layout: FileLayout) -> str:
    return f"served: {' and '.join(layout.forms)}"


def image_encoder_of(shapes: Mapping[str, Shape]) -> ImageEncoderSizes:
    """Return the sizes of the image encoder that a file is for, as far as it says them; 0: it does
    not.
    """
    layout = layout_of(shapes)
    prefix = "" if layout is None else layout.projection
    hidden, projected = (
        (shapes.get(f"{prefix}{name}.weight") or (0,))[-1] for name in ("proj_in", "proj")
    )
    return ImageEncoderSizes(0, hidden, projected)


def text_width_of(shapes: Mapping[str, Shape]) -> int:
    """Return the width of the prompts beside which a file's picture stands; 0: it does not say."""
    layout = layout_of(shapes)
    if layout is None:
        return 0
    layers = (shapes.get(layout.names(number, "k")[0]) for number in (0, 1))
    return next((shape[-1] for shape in layers if shape), 0)


def _projection_shapes(
    shapes: Mapping[str, Shape], layout: FileLayout, text: int, encoder: ImageEncoderSizes
) -> dict[str, Shape]:
    """Return the expected shapes of a file's projection, as far as they follow from the prompt's
    width `text` and from the image encoder.
    """
    if form_of(shapes) == "plain":
        rows = (shapes.get(f"{layout.projection}proj.weight") or (0,))[0]
        counts = layout.token_counts
        tokens = rows // text if rows // text in counts else counts[0]
        plain = {"proj.weight": (tokens * text, encoder.projected), "norm.weight": (text,)}
        return {f"{layout.projection}{name}": shape for name, shape in plain.items()}
    inner = (shapes[f"{layout.projection}latents"] or (0,))[-1]
    plus = {"proj_in.weight": (inner, encoder.hidden), "proj_out.weight": (text, inner)}
    return {f"{layout.projection}{name}": shape for name, shape in plus.items()}
