"""Images of the wire: bytes to pixels and back.

An image comes as a file's bytes (`containers`), as their base64 text, or as a data: URI. Pixels are
the *decoded 8-bit source*: EXIF orientation applied, palettes looked up, CMYK converted, the high
bytes of 16-bit samples, the first frame of an animation. PNG's low bytes are kept for the answer.
What the numbers mean travels with them (`colour`). Transparency of a source is set aside: its RGB
is kept as it is. Sizes are (height, width) in pixels, as array shapes are.

Decoding touches no state of the module or of Pillow: threads may share it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import (
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from maskserve_common.config import LimitsConfig
from maskserve_common.contracts.keys import template_id
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.colour import SRGB, Colour, chunk, find_colour
from maskserve_common.imaging.containers import (
    ACCEPTED,
    PIXELS_SIGNATURE,
    PNG_SIGNATURE,
    BadContainer,
    Container,
    is_container,
    read_container,
)
from maskserve_common.imaging.metadata import NOTHING, Metadata

Size = tuple[int, int]


def model_size(source_size: Size, native_resolution: int, multiple: int) -> Size:
    """The size at which the model sees an image of `source_size`.

    Keeps the aspect ratio, with an area of at most `native_resolution` squared and sides that are
    multiples of `multiple`. A smaller image is not enlarged, except up to the next multiple: an
    edit costs what its image holds, and a client that wants the native size can send it. Of the
    roundings that fit, the one nearest in aspect wins, then the larger one. Where one side of an
    extreme aspect ratio would vanish it stays at one multiple and the other gives way.
    """
    height, width = source_size
    limit = max(native_resolution, multiple) ** 2
    scale = min(1.0, math.sqrt(limit / (height * width)))
    candidates = [
        (h, w)
        for h in _roundings(height * scale, multiple)
        for w in _roundings(width * scale, multiple)
        if h * w <= limit
    ]
    if not candidates:
        # One side was raised to a whole multiple: the other must give way.
        short = multiple
        long = limit // (short * multiple) * multiple
        return (short, long) if height < width else (long, short)
    return min(
        candidates,
        key=lambda size: (abs(math.log(size[0] * width / (size[1] * height))), -size[0] * size[1]),
    )


def _roundings(side: float, multiple: int) -> tuple[int, ...]:
    # The tolerance keeps 1023.9999 from an exact scale at 1024, and 1024.0001 from 1040.
    down = max(multiple, math.floor(side / multiple + 1e-6) * multiple)
    up = max(multiple, math.ceil(side / multiple - 1e-6) * multiple)
    return (down,) if down == up else (down, up)


def resize(image: Image.Image, size: Size) -> Image.Image:
    """`image` at `size` by Lanczos; the same object when it already has that size."""
    height, width = size
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.LANCZOS)


def resize_part(image: Image.Image, size: Size, box: tuple[int, int, int, int]) -> Image.Image:
    """The part `box` of `resize(image, size)`, without computing the rest.

    The same filter over the same pixels, those around the part included; Pillow chooses which
    axis it resamples first by the part's shape, so 8-bit rounding between the two may differ.

    Args:
        image: the whole image.
        size: (height, width) of the whole result.
        box: (left, top, right, bottom) of the part, in pixels of the result.
    """
    left, top, right, bottom = box
    if image.size == (size[1], size[0]):
        return Image.fromarray(np.asarray(image)[top:bottom, left:right])
    across, down = image.width / size[1], image.height / size[0]
    return image.resize(
        (right - left, bottom - top),
        Image.Resampling.LANCZOS,
        box=(left * across, top * down, right * across, bottom * down),
    )


_UP = 2
_KINDS = {1: 0, 3: 2, 4: 6}
"""PNG's colour type, by channels."""


def encode_png(
    pixels: npt.NDArray[np.uint8] | npt.NDArray[np.uint16],
    colour: Colour = SRGB,
    xmp: bytes = b"",
    metadata: Metadata = NOTHING,
) -> bytes:
    """Encode a whole PNG file fast, for a response that a client waits for.

    Pillow tries five filters on each row. This encoder stores each row as the difference to the row
    above, and deflates by ISA-L (`scripts/bench pictures` compares the two).

    Args:
        pixels: uint8 or uint16, RGB [H, W, 3], RGBA [H, W, 4] or grey [H, W].
        colour: meaning of the numbers.
        xmp: XMP of the file.
        metadata: its other metadata.
    """
    height, width = pixels.shape[:2]
    depth, kind = 8 * pixels.itemsize, _KINDS[pixels.size // (height * width)]
    if depth == 16:
        pixels = pixels.astype(">u2").view(np.uint8)
    flat = pixels.reshape(height, -1)
    rows = np.empty((height, flat.shape[1] + 1), np.uint8)
    rows[:, 0] = _UP
    rows[0, 1:] = flat[0]
    np.subtract(flat[1:], flat[:-1], out=rows[1:, 1:])  # modulo 256, as PNG wants it
    data = _deflate(rows.data)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    xmp = metadata.marked(xmp)
    metadata_chunks = chunk(b"iTXt", b"XML:com.adobe.xmp" + bytes(5) + xmp) if xmp else b""
    metadata_chunks += chunk(b"eXIf", metadata.exif) if metadata.exif else b""
    metadata_chunks += b"".join(chunk(name, body) for name, body in metadata.chunks)
    return b"".join(
        (
            PNG_SIGNATURE,
            header,
            colour.in_png(),
            metadata_chunks,
            chunk(b"IDAT", data),
            chunk(b"IEND", b""),
        )
    )


_isal: Any = None
with suppress(ImportError):  # of a platform that it has no package for
    _isal = import_module("isal.isal_zlib")


def _deflate(data: memoryview) -> bytes:
    """Deflate differences of rows: by ISA-L, else by zlib with run lengths and Huffman codes alone,
    which takes three times as long.
    """
    if _isal is not None:
        deflated: bytes = _isal.compress(data, 1)
        return deflated
    stream = zlib.compressobj(1, zlib.DEFLATED, 15, 9, zlib.Z_RLE)
    return stream.compress(data) + stream.flush()


Pixels: TypeAlias = npt.NDArray[np.uint8]
_PIXELS_HEAD = struct.Struct("<8sII")


def plain_picture(pixels: Pixels) -> tuple[bytes, memoryview]:
    """Parts of a file of these pixels, RGB [H, W, 3] or grey [H, W], as they are."""
    head = _PIXELS_HEAD.pack(PIXELS_SIGNATURE, *pixels.shape[:2])
    return head, np.ascontiguousarray(pixels).data.cast("B")


def as_file(encoded: bytes | memoryview) -> bytes:
    """A picture as clients know one: of such plain pixels a PNG, and any other as it is."""
    pixels = _plain(encoded)
    return bytes(encoded) if pixels is None else encode_png(pixels)


def _size(pixels: Pixels) -> Size:
    return pixels.shape[0], pixels.shape[1]


def _plain(encoded: bytes | memoryview) -> Pixels | None:
    """Return the pixels of a plain picture, without a copy; None: it is no plain picture."""
    if len(encoded) < _PIXELS_HEAD.size or encoded[:8] != PIXELS_SIGNATURE:
        return None
    _, height, width = _PIXELS_HEAD.unpack_from(encoded)
    flat = np.frombuffer(encoded, np.uint8, offset=_PIXELS_HEAD.size)
    for shape in ((height, width), (height, width, 3)):
        if flat.size == math.prod(shape) > 0:
            return flat.reshape(shape)
    return None


def split(image: Image.Image, container: Container) -> tuple[Image.Image, Image.Image | None]:
    """The image as L or RGB, and its transparency."""
    alpha: Image.Image | None = None
    if image.mode in ("LA", "PA", "RGBA"):
        alpha = image.getchannel("A")
    elif container.transparency:
        alpha = _keyed_alpha(image, container)
    if image.mode.startswith("I"):  # 16-bit grey
        return Image.fromarray(_high_byte(np.asarray(image))), alpha
    return as_mode(image, "L" if image.mode in ("1", "L", "LA") else "RGB"), alpha


def as_mode(image: Image.Image, mode: str) -> Image.Image:
    """`image` in `mode`; itself if it has that mode already, where convert() would copy it."""
    return image if image.mode == mode else image.convert(mode)


def _keyed_alpha(image: Image.Image, container: Container) -> Image.Image | None:
    """Transparency of a PNG without alpha channel: per palette entry, or one transparent colour.

    A transparent colour of 16-bit RGB is matched on the high bytes, all that is decoded of it.
    """
    chunk, depth = container.transparency, container.bit_depth
    if container.colour_type == 3:
        table = np.full(256, 255, np.uint8)
        table[: len(chunk)] = np.frombuffer(chunk[:256], np.uint8)
        return Image.fromarray(table[np.asarray(image)])
    key = np.frombuffer(chunk[: len(chunk) & ~1], ">u2").astype(np.int64)
    if container.colour_type == 0 and len(key) == 1:
        if depth == 16:
            opaque = np.asarray(image) != key[0]
        else:
            opaque = np.asarray(image.convert("L")) != key[0] * 255 // (2**depth - 1)
    elif container.colour_type == 2 and len(key) == 3:
        opaque = (np.asarray(image) != (key >> 8 if depth == 16 else key)).any(axis=2)
    else:
        return None
    return Image.fromarray(np.where(opaque, np.uint8(255), np.uint8(0)))


def _low_bytes(container: Container) -> Image.Image:
    """RGB or RGBA of the low bytes of a 16-bit PNG's samples.

    Pillow has no picture of 16-bit RGB. Its decoder unpacks either byte of a sample, so it is asked
    a second time, for the other one.
    """
    image = PngImagePlugin.PngImageFile(io.BytesIO(container.payload))
    [tile] = image.tile
    unpacked = {"RGB;16B": "RGB;16L", "RGBA;16B": "RGBA;16L", "LA;16B": "RGBA"}
    image.tile = [tile._replace(args=unpacked.get(str(tile.args), tile.args))]
    image.load()
    samples = np.asarray(image)
    if tile.args == "LA;16B":  # the four bytes of grey and alpha
        return Image.fromarray(samples[..., [1, 1, 1, 3]])
    if image.mode in ("RGB", "RGBA"):
        return image
    grey = (samples & 255).astype(np.uint8)
    return Image.fromarray(np.dstack((grey, grey, grey)))


def _high_byte(samples: npt.NDArray[np.generic]) -> Pixels:
    high: Pixels = (samples.astype(np.uint16) >> 8).astype(np.uint8)
    return high


# Image.open applies a global size limit of its own; this server uses the config's.
_DECODERS: dict[str, type[ImageFile.ImageFile]] = {
    "png": PngImagePlugin.PngImageFile,
    "jpeg": JpegImagePlugin.JpegImageFile,
    "webp": WebPImagePlugin.WebPImageFile,
    "gif": GifImagePlugin.GifImageFile,
    "tiff": TiffImagePlugin.TiffImageFile,
}
with suppress(ImportError):  # of an older Pillow
    _avif: Any = import_module("PIL.AvifImagePlugin")
    if _avif.SUPPORTED:
        _avif.DEFAULT_MAX_THREADS = 1  # as other pictures are decoded
        _DECODERS["avif"] = _avif.AvifImageFile
with suppress(ImportError):  # an extra
    _DECODERS["heic"] = import_module("pillow_heif").HeifImageFile
_INSTALLED_BY = {"avif": "pillow>=11.3", "heic": "maskserve[heif]"}
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Longest side each format can store.
MAX_OUTPUT_SIDE = {"png": 2**31 - 1, "jpeg": 65_500, "webp": 16_383}
NO_LIMITS = LimitsConfig(max_image_bytes=2**31, max_pixels=2**31, max_side=65_535)
_MOST_AROUND = 4
"""Most bytes of an input, as a multiple of the bytes that its picture may have."""
_BEGINNING = 1024
"""Characters that decide whether a text is a picture."""
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_BLANKS = b" \t\r\n\v\f"


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded image. Arrays are read-only."""

    pixels: Pixels
    """RGB, uint8 [H, W, 3]."""
    alpha: Pixels | None
    """uint8 [H, W], 255 opaque; None when the file has no transparency."""
    encoded: bytes | memoryview
    """The file itself, decoded from base64, without bytes behind the picture."""
    colour: Colour = SRGB
    """Colour space of `pixels`."""
    warnings: tuple[str, ...] = ()
    """Warnings for the client about the file."""
    low: Pixels | None = None
    """The low bytes of 16-bit samples: RGB or RGBA, uint8 [H, W, 3 or 4]; None: it has none."""
    metadata: Metadata = NOTHING
    """Metadata that the answers keep."""

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.pixels.shape[0], self.pixels.shape[1]

    @property
    def template_id(self) -> str:
        """Digest that names the image as a template: pixels, colour, alpha, low bytes and metadata
        count.
        """
        clear = self.alpha is not None and self.alpha.min() < 255
        unseen = [
            name + hashlib.blake2b(np.ascontiguousarray(plane).data).digest()
            for name, plane in ((b"alpha", self.alpha if clear else None), (b"low", self.low))
            if plane is not None
        ]
        if self.metadata:  # nobody is answered with another's
            unseen.append(self.metadata.identity)
        return template_id(self.pixels, self.colour.identity, b"".join(unseen))


@dataclass(frozen=True, slots=True)
class DecodedMask:
    """A decoded mask. Arrays are uint8 [H, W] and read-only."""

    luminance: Pixels
    alpha: Pixels | None


@dataclass(frozen=True, slots=True)
class Raster:
    """A decoded image in Pillow's hands, upright."""

    image: Image.Image
    """Mode L or RGB."""
    alpha: Image.Image | None
    """Mode L."""
    encoded: bytes | memoryview
    colour: Colour = SRGB
    warnings: tuple[str, ...] = ()
    low: Image.Image | None = None
    """Low bytes of 16-bit samples, if they were requested."""
    metadata: Metadata = NOTHING


def decode_image(raw: bytes | memoryview, field: str, limits: LimitsConfig) -> Decoded:
    """Decode an untrusted image.

    Args:
        raw: the tensor's bytes: a file, base64 text or a data: URI.
        field: name for messages, such as `IMAGE`.
        limits: bounds on encoded bytes, pixels and sides, checked before decoding.

    Raises:
        InvalidRequest: naming `field`.
    """
    if (flat := _plain(raw)) is not None and flat.ndim == 3:
        check_size(_size(flat), field, limits)
        return Decoded(flat, None, raw)
    raster = decode_raster(raw, field, limits, low=True)
    pixels = np.asarray(as_mode(raster.image, "RGB"))
    alpha, low = _maybe_array(raster.alpha), _maybe_array(raster.low)
    extra_fields = raster.colour, raster.warnings, low, raster.metadata
    return Decoded(pixels, alpha, raster.encoded, *extra_fields)


def decode_mask(
    raw: bytes | memoryview, field: str, limits: LimitsConfig, size: Size | None = None
) -> DecodedMask:
    """Decode an untrusted mask to luminance (ITU-R 601) and transparency; see `decode_image`. Its
    numbers count as they are: a mask has no colours.

    Args:
        raw: the tensor's bytes.
        field: name for messages.
        limits: bounds, checked before decoding.
        size: (height, width) that the mask must have, if given: the image's.
    """
    raster = decode_raster(raw, field, limits, size, colours=False)
    return DecodedMask(np.asarray(as_mode(raster.image, "L")), _maybe_array(raster.alpha))


def decode_raster(
    raw: bytes | memoryview,
    field: str,
    limits: LimitsConfig,
    size: Size | None = None,
    *,
    colours: bool = True,
    low: bool = False,
) -> Raster:
    """Decode as `decode_image` does but stay in Pillow, without copies that nobody requests.

    Args:
        raw: a file's bytes, base64 text or data: URI.
        field: name of the input in error messages.
        limits: bounds, checked before decoding.
        size: (height, width) that the picture must have; None: any.
        colours: whether the file's colour profile is read.
        low: whether to decode the low bytes of 16-bit samples.
    """
    if (flat := _plain(raw)) is not None:
        check_size(_size(flat), field, limits)
        if size is not None and _size(flat) != size:
            raise wrong_size(field, _size(flat), size)
        return Raster(Image.fromarray(flat), None, raw)
    encoded, container = _read(bytes(raw), field, limits)
    if size is not None and container.upright_size != size:
        # Before decoding: a mask of another size may be a bomb.
        raise wrong_size(field, container.upright_size, size)
    kind = container.kind.upper()
    if container.kind not in _DECODERS:
        needed = _INSTALLED_BY[container.kind]
        raise InvalidRequest(
            field, f"is of {kind}, which this server reads with {needed}", ACCEPTED
        )
    try:
        image = _DECODERS[container.kind](io.BytesIO(container.payload))
        size_found = (image.size[1], image.size[0])
        check_size(size_found, field, limits)
        if container.kind in _INSTALLED_BY and size_found != container.size:
            raise InvalidRequest(field, f"is a damaged {kind}", ACCEPTED)
        image.load()
        words = container.words if colours else {}
        plain, colour, warning = find_colour(image, words) if words else (image, SRGB, "")
        straight, alpha = split(plain, container)
        low_bytes = None
        if low and container.bit_depth == 16 and plain is image:  # its numbers are the file's
            low_bytes = _low_bytes(container)
    except InvalidRequest:
        raise
    except Exception:
        # Decoders raise various errors (OSError, SyntaxError, struct.error, zlib.error, …).
        raise InvalidRequest(field, f"is a truncated or damaged {kind}", ACCEPTED) from None
    turn = _TRANSPOSE.get(container.orientation)
    if turn is not None:
        straight = straight.transpose(turn)
        alpha = alpha.transpose(turn) if alpha is not None else None
        low_bytes = low_bytes.transpose(turn) if low_bytes is not None else None
    warnings = tuple([f"{field}: {text}" for text in (container.warning, warning) if text])
    return Raster(straight, alpha, encoded, colour, warnings, low_bytes, container.metadata)


def read_size(raw: bytes | memoryview, field: str, limits: LimitsConfig) -> Size:
    """(height, width) of an untrusted image as it is shown, read from its headers alone.

    Raises:
        InvalidRequest: naming `field`.
    """
    if (flat := _plain(raw)) is not None:
        check_size(_size(flat), field, limits)
        return _size(flat)
    return _read(bytes(raw), field, limits)[1].upright_size


def encode_image(
    pixels: Pixels,
    output_format: str,
    quality: int | None = None,
    colour: Colour = SRGB,
    xmp: bytes = b"",
    metadata: Metadata = NOTHING,
) -> bytes:
    """Encode uint8 RGB [H, W, 3], as PNG or WebP RGBA [H, W, 4], or as PNG or JPEG grey [H, W].

    PNG is written for speed.

    Args:
        pixels: pixels of the picture.
        output_format: `png`, `jpeg` or `webp`.
        quality: 0 to 100, if the format has one; None: WebP is lossless, JPEG has 95 without colour
            subsampling.
        colour: meaning of the numbers; not `only_png` in other formats.
        xmp: XMP of the file.
        metadata: its other metadata.
    """
    if output_format == "png":
        return encode_png(pixels, colour, xmp, metadata)
    out = io.BytesIO()
    image = Image.fromarray(pixels)
    exif = metadata.exif and b"Exif\0\0" + metadata.exif
    save_options: dict[str, Any] = {
        "icc_profile": colour.profile,
        "xmp": metadata.marked(xmp),
        "exif": exif,
    }
    if output_format == "jpeg":
        save_options |= {"extra": metadata.app13, "dpi": metadata.jfif_dpi}
    save_options = {name: value for name, value in save_options.items() if value}
    if output_format == "webp":
        if quality is None:
            # `exact`: transparent pixels keep their colours.
            image.save(out, "WEBP", lossless=True, quality=0, method=0, exact=True, **save_options)
        else:
            image.save(out, "WEBP", quality=quality, **save_options)
    elif output_format == "jpeg":
        if quality is None:
            image.save(out, "JPEG", quality=95, subsampling=0, **save_options)
        else:
            image.save(out, "JPEG", quality=quality, **save_options)
    else:
        raise ValueError(f"unknown output format {output_format!r}")
    return out.getvalue()


def is_base64_text(raw: bytes | memoryview) -> bool:
    """Whether an image that was decoded came as base64 or a data: URI."""
    return not is_container(bytes(raw[:16]))


def to_base64(data: bytes) -> bytes:
    """Base64 text without line breaks, as ASCII bytes."""
    return base64.b64encode(data)


def _read(raw: bytes, field: str, limits: LimitsConfig) -> tuple[bytes, Container]:
    """The encoded picture and its headers, within the limits."""
    most = limits.max_image_bytes
    # Base64, line breaks and bytes behind a picture are not part of it, but are handled.
    if len(raw) > _MOST_AROUND * most:
        raise InvalidRequest(field, f"is {len(raw)} bytes", f"up to {most} encoded bytes")
    encoded = raw if is_container(raw) else _from_text(raw.strip(), field)
    if not encoded:
        raise InvalidRequest(field, "is empty", ACCEPTED)
    try:
        container = read_container(encoded)
    except BadContainer as problem:
        raise InvalidRequest(field, str(problem), ACCEPTED) from None
    if container.end > most:
        raise InvalidRequest(field, f"is {container.end} bytes", f"up to {most} encoded bytes")
    check_size(container.size, field, limits)
    return encoded[: container.end], container


def check_beginning(text: str, field: str) -> None:
    """Refuse text that is no picture by its first bytes, before the rest is processed.

    Args:
        text: base64 or a data: URI.
        field: name of the field in messages.

    Raises:
        InvalidRequest: naming `field`.
    """
    first = text[:_BEGINNING].encode("utf-8", "replace").strip()
    if len(text) > _BEGINNING:  # cut where four letters end, so that it is text of its own
        header, comma, letters = first.rpartition(b",")
        letters = letters.translate(None, _BLANKS)
        first = header + comma + letters[: len(letters) // 4 * 4]
    begins = _from_text(first, field)
    if not is_container(begins):
        try:
            read_container(begins)
        except BadContainer as problem:
            raise InvalidRequest(field, str(problem), ACCEPTED) from None


def _from_text(text: bytes, field: str) -> bytes:
    is_uri = text[:5].lower() == b"data:"
    if is_uri:
        header, comma, text = text.partition(b",")
        if not comma or not header.lower().endswith(b";base64"):
            raise InvalidRequest(field, "is a data: URI that is not base64", ACCEPTED)
    # In one pass: split() would make an object of every word between blanks.
    compact = text.translate(_URL_SAFE, _BLANKS).rstrip(b"=")
    try:
        return base64.b64decode(compact + b"=" * (-len(compact) % 4), validate=True)
    except (binascii.Error, ValueError):
        if is_uri:
            raise InvalidRequest(field, "is a data: URI of broken base64", ACCEPTED) from None
        return text  # not base64: the container check names it


def wrong_size(field: str, size: Size, image: Size) -> InvalidRequest:
    """The refusal of a mask of another (height, width) than the image's."""
    problem = f"is {size[1]}x{size[0]} pixels"
    return InvalidRequest(field, problem, f"the image's size, {image[1]}x{image[0]}")


def check_size(size: tuple[int, int], field: str, limits: LimitsConfig) -> None:
    height, width = size
    if min(size) < 1:
        raise InvalidRequest(field, f"is {width}x{height} pixels", "at least 1x1")
    if max(size) > limits.max_side:
        raise InvalidRequest(
            field, f"is {width}x{height} pixels", f"sides of up to {limits.max_side} pixels"
        )
    if height * width > limits.max_pixels:
        raise InvalidRequest(
            field,
            f"is {width}x{height} = {height * width} pixels",
            f"up to {limits.max_pixels} pixels",
        )


def _maybe_array(image: Image.Image | None) -> Pixels | None:
    return None if image is None else np.asarray(image)
