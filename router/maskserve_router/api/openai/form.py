"""Requests for pictures in OpenAI's forms: a multipart form, or JSON with URLs.

A request that no worker can serve is refused with the name of the field. Settings beyond OpenAI's
fields (`seed`, `num_inference_steps`, `template_id`, …) go into SETTINGS, which a worker checks.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, Protocol, TypeAlias, TypeVar, get_type_hints

import msgspec
from msgspec import Meta
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from maskserve_common.contracts.edit_kinds import kind_of
from maskserve_common.contracts.request import EditKind
from maskserve_common.contracts.settings import Background, EditSettings
from maskserve_common.errors import InvalidRequest
from maskserve_common.reading import Misread, Table, nearest, read
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.messages.request_limits import read_json

PICTURE = "image"
"""Name of a workflow's output that becomes the answer's picture."""
_MAX_FIELDS = 64
_MAX_FILES = 18
_MAX_TEXT = 256 * 1024
"""Most bytes of a text field."""
_FORM_FIELDS = (
    "model",
    "size",
    "background",
    "output_format",
    "output_quality",
    "output_encoding",
    "progress",
    "preview_every",
    "request_id",
)
"""Settings that a form cannot set: they follow from OpenAI's fields, or from the answer's form."""
EXTENSIONS = frozenset(EditSettings.__struct_fields__) - frozenset(_FORM_FIELDS)
_TEXT_SETTINGS = frozenset(
    (
        "negative_prompt",
        "mask_mode",
        "crop_to_mask",
        "cache",
        "template_id",
        "adapters",
        "name",
        "text",
    )
)
"""Settings that are always text; others are read as JSON."""
_TEXT_LISTS = frozenset(("reference_ids",))
"""Settings that are lists of texts."""
_BRACKETED = re.compile(r"(\w{1,40})((?:\[(?:\d{0,3}|[A-Za-z_]\w{0,39})\]){1,3})")
"""Form field for a value in a list or an object: `expand[]`, `loras[][name]`, `loras[0][name]`,
`points[][]`, `mask_from[text]`, `mask_from[points][0][]`."""
_CLICK_VALUES = 3
"""Values of each inner list if the form has no indices: all such lists are clicks."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_MAY_BE_EMPTY = ("prompt", "negative_prompt")
_NOTHING = ("", "null", "None", "undefined")
"""An input that a browser's form leaves empty, and nothing as JavaScript and Python write it."""
_BOOLEANS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}
"""A checkbox sends `on`, Python `True`, and FastAPI takes all of these."""


_read_object = msgspec.json.Decoder(dict[str, Any]).decode
T = TypeVar("T", bound=Table)
Parse: TypeAlias = Callable[..., Awaitable[Any]]
"""Calls a function with its arguments, in a thread if it takes long; see `FairShare.run`."""
Texts: TypeAlias = Callable[[Any], Collection[str] | None]
"""Model name -> names of the texts that this workflow takes beside the prompt; None: no
workflow."""
FetchPicture: TypeAlias = Callable[[str, str], Awaitable[bytes]]
"""(field, URL) -> bytes of the picture; see `ImageUrls.read`."""

Quality = Literal["auto", "low", "medium", "standard", "high", "hd"]
Source = Literal["required", "optional", "none", "varied"]
"""Whether a request has an image or a template to edit; `varied`: it has, and no prompt or mask."""
NOT_VARIED = ("prompt", "mask", "mask_from", "expand", "anchor", "controls", "ip_adapter")
"""Fields of an edit that a variation has not."""
Anchor = Literal[
    "center",
    "left",
    "right",
    "top",
    "bottom",
    "top-left",
    "top-right",
    "bottom-left",
    "bottom-right",
]


class ImageUrl(Table, frozen=True):
    """A picture of a JSON request."""

    image_url: str
    """A data URL, or an https URL of a host from which the router may fetch."""


class Fields(Table, frozen=True):
    """OpenAI's fields of an edit or a generation, without its pictures."""

    prompt: Annotated[str, Meta(max_length=32_000)]
    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=10)] = 1
    size: str = "auto"
    """With a mask: `auto`, WIDTHxHEIGHT of the image, or a larger size: the canvas grows, and the
    new part is edited. Without one: the answer's size, in multiples of the model's grid; `auto`:
    the model's choice."""
    anchor: Anchor = "center"
    """Position of the image on a larger canvas."""
    quality: Quality = "auto"
    """Steps of the model: `low` half as many, `high` and `hd` one and a half times as many."""
    background: Background = "auto"
    """`auto` and `transparent` keep the image's own transparency outside the mask, `opaque` does
    not."""
    input_fidelity: Literal["low", "high"] | None = None
    """Accepted without effect: pixels outside the mask are always the image's own."""
    moderation: Literal["auto", "low"] | None = None
    """Accepted without effect: the operator's check decides (`[safety]`)."""
    style: Literal["vivid", "natural"] | None = None
    """Accepted without effect."""
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    """Quality of JPEG and WebP."""
    response_format: Literal["b64_json", "url"] = "b64_json"
    """`url`: the answer names pictures, which the router keeps for `[openai] url_s` seconds."""
    stream: bool = False
    partial_images: Annotated[int, Meta(ge=0, le=3)] = 0
    output_url: str | None = None
    """URL to which the picture is written, instead of the answer, below a prefix that the key may
    write to: a file, or a folder if it ends with a slash."""
    webhook: str | None = None
    """For a job: https URL of a listed host that is called when the job has ended."""
    user: str | None = None
    safety_identifier: str | None = None


@dataclass(frozen=True, slots=True)
class EditForm:
    """One request."""

    fields: Fields
    image: bytes
    """Bytes of the image; empty if `settings` name a template, or the picture has no source."""
    mask: bytes | None
    """Bytes of the mask; None: the client sent none."""
    settings: dict[str, Any]
    """Settings for SETTINGS, as the client gave them."""
    control: tuple[bytes, ...] = ()
    """Control pictures, or the further pictures of a workflow."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Further text inputs of a workflow."""
    masks_itself: bool = False
    """Whether the image's own transparent pixels are the mask."""
    is_variation: bool = False
    """Whether it is to be varied, without a prompt."""
    references: tuple[bytes, ...] = ()
    """Pictures that the model sees beside the image, or beside a template."""

    @property
    def has_source(self) -> bool:
        return bool(self.image) or self.settings.get("template_id") is not None

    @property
    def kind(self) -> EditKind:
        """The kind of the edit (docs/adr/0086)."""
        has_mask = self.mask is not None or self.masks_itself
        grows = any(self.settings.get("expand") or ())
        masked = has_mask or grows or bool(self.settings.get("mask_from"))
        return kind_of(source=self.has_source, masked=masked)


class ModelForm(Protocol):
    """How forms name the inputs of a model that workers do not serve: a workflow."""

    texts: frozenset[str]
    """Text inputs that are form fields of their own."""
    edits: Sequence[Mapping[str, Any]]
    """Settings of each of its edits."""

    def check(self, form: EditForm) -> None:
        """Check that a form fits the model.

        Raises:
            InvalidRequest: naming the field.
        """

    def message(self, form: EditForm, more_settings: dict[str, Any]) -> ModelRequest:
        """Return the request to the model.

        Args:
            form: a form that passed `check`.
            more_settings: settings that the router adds.

        Raises:
            InvalidRequest: the mask cannot be used.
        """


async def read_form(
    headers: Headers,
    body: bytes,
    fetch: FetchPicture,
    parse: Parse,
    texts: Texts = lambda _: None,
    source: Source = "required",
) -> EditForm:
    """Read the edit or the generation of a request.

    Args:
        headers: headers of the request.
        body: body of the request.
        fetch: fetches the picture of a URL.
        parse: calls functions whose time grows with the body.
        texts: returns the text inputs of the workflow that `model` names.
        source: whether the request has an image or a template.

    Raises:
        InvalidRequest: naming the field.
        RetryLater: too many bytes are under way.
    """
    values, files = await _read_body(headers, body, fetch, parse, texts)
    images = files.pop("image", [])
    masks = files.pop("mask", [])
    if files:
        raise InvalidRequest(next(iter(files))[:40], "is not a picture of an edit", "image, mask")
    if source == "varied":
        _check_varied(values, masks)
        values["prompt"] = ""
    extension_values = {name: values.pop(name) for name in list(values) if name in EXTENSIONS}
    settings = {name: setting_of(name, value) for name, value in extension_values.items()}
    text_names = texts(values.get("model"))
    workflow_texts = {name: values.pop(name) for name in text_names or () if name in values}
    _check_names(
        values, {*Fields.__struct_fields__, *EXTENSIONS, "image", "mask", *(text_names or ())}
    )
    for name, value in workflow_texts.items():
        if not isinstance(value, str):
            raise InvalidRequest(name, "is not a text", "a text")
    image, references, control = _divided(
        images, settings, source, is_workflow=text_names is not None
    )
    if source == "varied" and references:
        raise InvalidRequest("image", f"is given {1 + len(references)} times", "one image")
    if len(masks) > 1:
        raise InvalidRequest("mask", f"is given {len(masks)} times", "one mask")
    form = EditForm(
        convert(values, Fields),
        image,
        masks[0] if masks else None,
        settings,
        tuple(control),
        workflow_texts,
        is_variation=source == "varied",
        references=tuple(references),
    )
    _check_form(form, source)
    return form


async def _read_body(
    headers: Headers, body: bytes, fetch: FetchPicture, parse: Parse, texts: Texts
) -> tuple[dict[str, Any], dict[str, list[bytes]]]:
    """Return the values and files of a multipart form or a JSON object; `read_form` says the
    arguments.

    Raises:
        InvalidRequest: naming the field.
        RetryLater: too many bytes are under way.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        values, files = await parse(read_multipart, headers, body)
        texts_of_model = texts(values.get("model")) or ()
        return fields_of(values, Fields, EditSettings, texts=texts_of_model), files
    if kind == "application/json":
        table = await parse(read_json, body, _read_object, "a JSON object", "a JSON object")
        return await _fetch_pictures(table, fetch)
    raise InvalidRequest(
        "Content-Type", f"is {kind[:60] or 'missing'}", "multipart/form-data, application/json"
    )


def _divided(
    images: list[bytes], settings: Mapping[str, Any], source: Source, *, is_workflow: bool
) -> tuple[bytes, list[bytes], list[bytes]]:
    """Divide a form's images by their use.

    Returns:
        The source, empty if there is none; references, with the IP-Adapter's picture last; and
        control pictures, or the further pictures of a workflow.
    """
    ip_picture = list[bytes]()
    if settings.get("ip_adapter") is not None:
        images, ip_picture = images[:-1], images[-1:]
    has_controls = "controls" in settings
    has_image = "template_id" not in settings and not (has_controls and source == "none")
    sources = 1 if is_workflow or has_image else 0
    image, further = b"".join(images[:sources]), images[sources:]
    if is_workflow or has_controls:
        return image, ip_picture, further
    return image, further + ip_picture, []


def read_picture_form(headers: Headers, body: bytes, table: type[T]) -> tuple[bytes, T]:
    """Read a multipart form of one file, `image`, and the fields of a table.

    Raises:
        InvalidRequest: naming the field.
    """
    values, files = read_multipart(headers, body)
    images = files.pop("image", [])
    if files:
        raise InvalidRequest(next(iter(files))[:40], "is not a file field of this form", "image")
    if len(images) != 1:
        raise InvalidRequest("image", f"is given {len(images)} times", "one file")
    fields = fields_of(values, table)
    return images[0], convert(
        {name: setting_of(name, value) for name, value in fields.items()}, table
    )


def fields_of(
    values: Mapping[str, Any], *tables: type[Table], texts: Collection[str] = ()
) -> dict[str, Any]:
    """Return the fields of a form that are given, without blanks around their values.

    Args:
        values: result of `read_multipart`.
        tables: tables of the fields.
        texts: text inputs of a workflow.
    """
    flags = frozenset[str]().union(*map(_flags, tables))
    texts, filled = (*_MAY_BE_EMPTY, *texts), dict[str, Any]()
    for name, value in values.items():
        if isinstance(value, str) and name not in texts:
            value = value.strip()
            if value in _NOTHING:
                continue
            if name in flags:
                value = _BOOLEANS.get(value.lower(), value)
        filled[name] = value
    return filled


@cache
def _flags(table: type[Table]) -> frozenset[str]:
    """Return the boolean fields of a table."""
    kinds = get_type_hints(table).items()
    return frozenset(name for name, kind in kinds if kind in (bool, bool | None))


def _check_varied(values: Mapping[str, Any], masks: Sequence[bytes]) -> None:
    """Raise InvalidRequest if a variation has fields of an edit."""
    for name in NOT_VARIED:
        if name in values or (name == "mask" and masks):
            raise InvalidRequest(name, "is not a field of a variation", "/v1/images/edits")


def _check_names(values: Mapping[str, Any], known_fields: Collection[str]) -> None:
    """Raise InvalidRequest if a field is not among the known ones."""
    if unknown := sorted(values.keys() - known_fields):
        problem = f"is not a known field{nearest(unknown[0], known_fields)}"
        raise InvalidRequest(unknown[0][:40], problem, ", ".join(sorted(known_fields)))


def _check_form(form: EditForm, source: Source) -> None:
    """Raise InvalidRequest if fields of a form exclude one another, or a picture is missing or is
    no field of it.
    """
    if not form.has_source and (source in ("required", "varied") or form.mask is not None):
        raise InvalidRequest(
            "image", "is missing", "a PNG, JPEG, WebP, AVIF, GIF or TIFF file, or template_id"
        )
    if source == "none":
        adapts = form.settings.get("ip_adapter") is not None
        for name, is_present in (
            ("image", bool(form.image or form.references[adapts:])),
            ("mask", form.mask is not None),
            ("template_id", "template_id" in form.settings),
        ):
            if is_present:
                raise InvalidRequest(name, "is not a field of a generation", "/v1/images/edits")
    if form.fields.response_format == "url" and form.fields.stream:
        raise InvalidRequest("response_format", "is url in a stream", "b64_json")
    if form.fields.response_format == "url" and form.fields.output_url is not None:
        raise InvalidRequest("response_format", "is url together with output_url", "one of them")
    if form.fields.quality != "auto" and "num_inference_steps" in form.settings:
        problem = f"is {form.fields.quality} together with num_inference_steps"
        raise InvalidRequest("quality", problem, "one of them")
    if form.fields.partial_images and not form.fields.stream:
        raise InvalidRequest("partial_images", "is given without stream", "0, or stream: true")
    if form.fields.stream and form.fields.n > 1:
        raise InvalidRequest("n", f"is {form.fields.n} in a stream", "1")


def read_multipart(headers: Headers, body: bytes) -> tuple[dict[str, Any], dict[str, list[bytes]]]:
    """Return texts by name, each given once, and files by name; `image[]` counts as `image`.

    A list of objects, in the form of SDKs, becomes a list.

    Raises:
        InvalidRequest: naming the field.
    """
    parsing = _read_multipart(headers, body)
    try:
        parsing.send(None)
    except StopIteration as done:
        result: tuple[dict[str, Any], dict[str, list[bytes]]] = done.value
        return result
    raise AssertionError("nothing is waited for, as files stay in memory")


async def _read_multipart(
    headers: Headers, body: bytes
) -> tuple[dict[str, Any], dict[str, list[bytes]]]:
    async def once() -> AsyncGenerator[bytes, None]:
        yield body

    parser = _MemoryParser(
        headers, once(), max_files=_MAX_FILES, max_fields=_MAX_FIELDS, max_part_size=_MAX_TEXT
    )
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError, LookupError) as error:
        problem = (
            error.message if isinstance(error, MultiPartException) else "is not a multipart form"
        )
        raise InvalidRequest("body", problem[:200], "a multipart form") from None
    values: dict[str, Any] = {}
    files: dict[str, list[bytes]] = {}
    parts: dict[str, list[_Part]] = {}
    try:
        for key, value in form.multi_items():
            name = key.removesuffix("[]")
            if isinstance(value, UploadFile):
                content = await value.read()
                if content or value.filename:  # otherwise an empty input of a browser's form
                    files.setdefault(name, []).append(content)
            elif name in ("image", "mask"):
                raise InvalidRequest(name, "is text", "a file part (with a filename)")
            elif bracketed := _BRACKETED.fullmatch(key):
                places = tuple(bracketed[2][1:-1].split("]["))
                parts.setdefault(bracketed[1], []).append((places, value))
            elif name in values:
                raise InvalidRequest(name[:40], "is given twice", "each field once")
            else:
                values[name] = value
    finally:
        await form.close()
    for name, parts_of_name in parts.items():
        if name in values:
            raise InvalidRequest(name, "is given twice", "each field once")
        values[name] = _built(name, name, parts_of_name)
    return values, files


_Part: TypeAlias = tuple[tuple[str, ...], str]
"""The place of a value, and its text. A place has a name for each object, and for each list an
index or an empty text."""


def _built(field: str, key: str, parts: list[_Part]) -> Any:
    """Return the value, list, list of lists or object that these parts make.

    Args:
        field: field for errors.
        key: name of the setting.
        parts: values in the order of the form.
    """
    are_names = [bool(places) and _is_name(places[0]) for places, _ in parts]
    if all(are_names):
        members: dict[str, list[_Part]] = {}
        for (name, *rest), text in parts:
            members.setdefault(name, []).append((tuple(rest), text))
        return {name: _built(f"{field}.{name}", name, inner) for name, inner in members.items()}
    depths = {len(places) for places, _ in parts}
    if any(are_names) or len(depths) > 1 or (depths == {0} and len(parts) > 1):
        raise InvalidRequest(field, "is given twice", "each field once")
    if depths == {0}:
        return setting_of(key, parts[0][1])
    if depths == {1}:
        texts = [text for _, text in sorted(parts, key=_in_order)]
        return texts if key in _TEXT_LISTS else [setting_of(key, text) for text in texts]
    if depths == {2} and _is_name(parts[0][0][1]):
        return _objects(field, [(places[0], places[1], text) for places, text in parts])
    if any(places[0] for places, _ in parts):
        rows: dict[str, list[_Part]] = {}
        for places, text in sorted(parts, key=_in_order):
            rows.setdefault(places[0], []).append((places[1:], text))
        return [_built(field, key, row) for row in rows.values()]
    if len(parts) % _CLICK_VALUES:
        problem = f"has {len(parts)} values"
        raise InvalidRequest(field, problem, "three for each click: x, y, 1 or 0")
    flat = [setting_of(key, text) for _, text in parts]
    return [flat[at : at + _CLICK_VALUES] for at in range(0, len(flat), _CLICK_VALUES)]


def _is_name(place: str) -> bool:
    """Whether a place is a member's name, not an index."""
    return bool(place) and not place.isdigit()


def _in_order(part: _Part) -> int:
    """Return the outermost index as a sort key; parts without one keep their order."""
    return int(part[0][0] or 0)


def _objects(name: str, parts: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Return the list of objects that a form's values make, in order.

    Args:
        name: name of the field.
        parts: (index or empty, key, text) of each value. SDKs send no index, and group the values
            by key. Without indices, all objects must therefore have the same keys.
    """
    columns: dict[str, dict[int, Any]] = {}
    for index, key, text in parts:
        column = columns.setdefault(key, {})
        place = int(index) if index else len(column)
        if place in column:
            raise InvalidRequest(f"{name}[{place}].{key}", "is given twice", "each key once")
        column[place] = setting_of(key, text)
    places = sorted({place for column in columns.values() for place in column})
    if not all(index for index, _, _ in parts) and len({len(c) for c in columns.values()}) > 1:
        raise InvalidRequest(
            name,
            "has objects with different keys and no indices, so values cannot be assigned to them",
            "the same keys in each object, or JSON text",
        )
    return [
        {key: column[place] for key, column in columns.items() if place in column}
        for place in places
    ]


class _MemoryParser(MultiPartParser):
    """Keeps files in memory, where the body already is and counts for its client."""

    spool_max_size = 2**62


async def _fetch_pictures(
    values: dict[str, Any], fetch: FetchPicture
) -> tuple[dict[str, Any], dict[str, list[bytes]]]:
    """Return the values without pictures, and the pictures' bytes by field."""
    fields = {name: value for name, value in values.items() if value is not None}
    files: dict[str, list[bytes]] = {}
    images = fields.pop("images", [])
    if not isinstance(images, list):
        raise InvalidRequest(
            "images", "is not a list", '[{"image_url": "data:image/png;base64,…"}]'
        )
    if len(images) >= _MAX_FILES:
        raise InvalidRequest("images", f"are {len(images)}", f"up to {_MAX_FILES - 1}")
    if images:
        files["image"] = [
            await _fetch(f"images[{i}]", image, fetch) for i, image in enumerate(images)
        ]
    if "mask" in fields:
        files["mask"] = [await _fetch("mask", fields.pop("mask"), fetch)]
    return fields, files


async def _fetch(name: str, item: Any, fetch: FetchPicture) -> bytes:
    url = item.get("image_url") if isinstance(item, dict) else None
    if not isinstance(url, str) or len(item) != 1:
        accepted = '{"image_url": "data:image/png;base64,…"}'
        raise InvalidRequest(name, "is not an object with image_url alone", accepted)
    return await fetch(f"{name}.image_url", url)


def setting_of(name: str, value: Any) -> Any:
    """Return a setting's value.

    Forms carry only text: JSON, or Python's form of a value (`True`, `.5`, `20.0` for 20).
    """
    if not isinstance(value, str) or name in _TEXT_SETTINGS:
        return value
    try:
        decoded = msgspec.json.decode(value)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
        decoded = float(value) if _NUMBER.fullmatch(value) else value  # its check reports the error
    is_whole = isinstance(decoded, float) and decoded.is_integer()
    return int(decoded) if is_whole else decoded


def convert(values: Mapping[str, Any], table: type[T]) -> T:
    """Convert and check the fields of a form.

    Raises:
        InvalidRequest: naming the field.
    """
    try:
        return read(values, table, strict=False)
    except Misread as error:
        raise InvalidRequest(error.path, error.problem, error.accepted) from None
