"""Sources that must work, and sources that must be refused."""

from __future__ import annotations

import base64
import io
import textwrap
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from maskserve_benchmarks.soak.pictures import png_chunk
from tests.fakes.corpus.case import Case, Pixels, damaged, refused, works
from tests.fakes.corpus.encoding import (
    GREY,
    GREY_ALPHA,
    PALETTE,
    RGB,
    RGBA,
    chunks_of,
    header,
    png,
    png_of,
    segment,
    webp_chunk,
    webp_of,
)
from tests.fakes.hostile import SIZE
from tests.fakes.pictures import blob_mask, encode, grey_pixels, odd_images, scene

SIZES = ((1, 1), (1, 9), (9, 1), (2, 2), (7, 13), (16, 16), (1, 700), (500, 2), (31, 257), (90, 90))


def image_cases() -> Iterator[Case]:
    for odd in odd_images(*SIZE):
        yield _edited(odd.name, odd.encoded, odd.pixels)
    for name, (encoded, pixels) in {
        **_pngs(),
        **_jpegs(),
        **_webps(),
        **_other_formats(),
        **_texts(),
    }.items():
        yield _edited(name, encoded, pixels)
    for size in SIZES:
        picture = scene(*size)
        mask = blob_mask(*size)
        name = f"{size[1]}x{size[0]} pixels"
        inputs = {"IMAGE": encode(picture), "MASK": encode(mask)}
        yield works("image", name, picture, mask == 0, **inputs)
    # Pillow reads missing rows as black.
    short = png_of(header(*SIZE[::-1]), (b"IDAT", zlib.compress(bytes(507))), (b"IEND", b""))
    yield damaged("image", "PNG of too few rows", "IMAGE", short)
    for name, encoded in _broken().items():
        yield refused("image", name, "IMAGE", IMAGE=encoded)


def _edited(name: str, encoded: bytes, pixels: Pixels) -> Case:
    mask = blob_mask(*pixels.shape[:2])
    return works("image", name, pixels, mask == 0, IMAGE=encoded, MASK=encode(mask))


def _as_pillow_reads(encoded: bytes) -> tuple[bytes, Pixels]:
    return encoded, np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))


def _pngs() -> dict[str, tuple[bytes, Pixels]]:
    rgb = scene(*SIZE)
    grey = rgb[..., 0]
    alpha = rgb[..., 1:2]
    rgba = np.concatenate([rgb, alpha], axis=2)
    palette = np.stack([np.arange(256), 255 - np.arange(256), np.arange(256) // 2], 1)
    palette = palette.astype(np.uint8)
    colours = ((b"PLTE", palette.tobytes()),)
    files: dict[str, tuple[bytes, Pixels]] = {}
    for interlaced in (False, True):
        how = "interlaced " if interlaced else "plain "

        def add(
            name: str,
            pixels: Pixels,
            *args: object,
            how: str = how,
            interlaced: bool = interlaced,
            **options: object,
        ) -> None:
            encoded = png(*args, interlaced=interlaced, **options)  # type: ignore[arg-type]
            files[f"{how}PNG of {name}"] = encoded, pixels

        for depth in (1, 2, 4, 8):
            few = grey >> (8 - depth)
            add(f"{depth}-bit grey", grey_pixels(few * (255 // (2**depth - 1))), few, GREY, depth)
            table = ((b"PLTE", palette[: 2**depth].tobytes()),)
            add(f"{depth}-bit palette", palette[few], few, PALETTE, depth, before=table)
        deep = grey.astype(np.uint16) * 256 + 255 - grey
        add("16-bit grey", grey_pixels(grey), deep, GREY, 16)
        add("8-bit RGB", rgb, rgb, RGB)
        add("16-bit RGB", rgb, rgb.astype(np.uint16) * 256 + 200, RGB, 16)
        add("8-bit grey with alpha", grey_pixels(grey), rgb[..., :2], GREY_ALPHA)
        add(
            "16-bit grey with alpha",
            grey_pixels(grey),
            rgb[..., :2].astype(int) * 256 + 9,
            GREY_ALPHA,
            16,
        )
        add("8-bit RGBA", rgb, rgba, RGBA)
        add("16-bit RGBA", rgb, rgba.astype(np.uint16) * 256 + 77, RGBA, 16)
    grey_key = ((b"tRNS", b"\0\x14"),)
    files["PNG of grey with a clear colour"] = png(grey, GREY, before=grey_key), grey_pixels(grey)
    rgb_key = ((b"tRNS", b"\0\1\0\2\0\3"),)
    files["PNG of RGB with a clear colour"] = png(rgb, RGB, before=rgb_key), rgb
    files["PNG of RGBA with a stray tRNS"] = png(rgba, RGBA, before=rgb_key), rgb
    files["PNG of a long tRNS"] = (
        png(grey, PALETTE, before=(*colours, (b"tRNS", bytes(1000)))),
        palette[grey],
    )
    files["PNG of a short tRNS"] = png(rgb, RGB, before=((b"tRNS", b"\0"),)), rgb
    files["PNG of a suggested palette"] = png(rgb, RGB, before=colours), rgb
    files["PNG in 200 pieces"] = png(rgb, RGB, pieces=200), rgb
    whole = png(rgb, RGB)
    files["PNG of 20 MB deflated behind its rows"] = _overlong(), np.zeros((*SIZE, 3), np.uint8)
    files["PNG with bytes behind its end"] = whole + b"\0" * 999 + whole, rgb
    files["PNG of odd ancillary chunks"] = png(rgb, RGB, before=_ANCILLARY), rgb
    empty = png_chunk(b"IDAT", b"")
    at = whole.index(b"IDAT") - 4
    files["PNG with an empty first IDAT"] = whole[:at] + empty + whole[at:], rgb
    return files


def _other_formats() -> dict[str, tuple[bytes, Pixels]]:
    picture = Image.fromarray(scene(*SIZE))
    turned = Image.Exif()
    turned[0x0112] = 1
    files: dict[str, tuple[bytes, Pixels]] = {}
    cases: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("AVIF of RGB", "AVIF", {}),
        ("AVIF with EXIF", "AVIF", {"exif": turned}),
        ("GIF", "GIF", {}),
        ("GIF of an animation", "GIF", {"save_all": True, "append_images": [picture.rotate(180)]}),
        ("TIFF", "TIFF", {}),
        ("TIFF of LZW", "TIFF", {"compression": "tiff_lzw"}),
        ("TIFF of several pages", "TIFF", {"save_all": True, "append_images": [picture] * 3}),
    )
    for name, kind, options in cases:
        files[name] = _as_pillow_reads(encode(picture, kind, **options))
    files["TIFF of CMYK"] = _as_pillow_reads(encode(picture.convert("CMYK"), "TIFF"))
    return files


def _overlong() -> bytes:
    ihdr = header(*SIZE[::-1])
    return png_of(ihdr, (b"IDAT", zlib.compress(bytes(20_000_000))), (b"IEND", b""))


_ANCILLARY = (
    (b"gAMA", b"\0\0\1\0"),
    (b"cHRM", bytes(32)),
    (b"sRGB", b"\xff"),
    (b"pHYs", b"\xff" * 9),
    (b"tIME", b"\xff" * 7),
    (b"bKGD", b""),
    (b"iTXt", b"\xff" * 50),
    (b"tEXt", b"Comment\0" + b"\xff" * 50),
    (b"tEXt", b"a" * 200_000),
    (b"zTXt", b"a\0\0not deflated"),
    (b"iCCP", b"x\0\0" + zlib.compress(b"no profile")),
    (b"eXIf", b"MM\0*\0\0\0\x08\xff\xff"),
    (b"acTL", b"\0\0\0\0\0\0\0\0"),
    (b"fcTL", b"\xff" * 26),
    (b"teSt", bytes(10)),
)


def _jpegs() -> dict[str, tuple[bytes, Pixels]]:
    picture = Image.fromarray(scene(*SIZE))
    exif = Image.Exif()
    exif[0x010E] = "x" * 60_000
    variants = {
        "of quality 1": {"quality": 1},
        "of quality 100": {"quality": 100},
        "with full colour": {"subsampling": 0},
        "with colour at half width": {"subsampling": 1},
        "with colour at quarter size": {"subsampling": 2},
        "with restart markers": {"restart_marker_blocks": 1},
        "with optimised tables": {"optimize": True},
        "with a comment": {"comment": b"\xff\xd9" * 100},
        "with a long EXIF block": {"exif": exif},
        "with a colour profile that is none": {"icc_profile": b"junk" * 40_000},
        "stored as RGB": {"keep_rgb": True},
    }
    files = {
        f"JPEG {name}": _as_pillow_reads(encode(picture, "JPEG", **options))
        for name, options in variants.items()
    }
    plain, pixels = _as_pillow_reads(encode(picture, "JPEG"))
    exotic = b"".join(segment(0xE0 + i, b"x" * 500) for i in range(2, 14))
    files["JPEG of exotic segments"] = plain[:2] + exotic + plain[2:], pixels
    files["JPEG with fill bytes"] = plain[:2] + b"\xff" * 40 + plain[2:], pixels
    files["JPEG with bytes behind its end"] = plain + b"\xff\xda" * 10 + bytes(999), pixels
    bad_exif = segment(0xE1, b"Exif\0\0II*\0\xff\xff\xff\xff")
    files["JPEG of a broken EXIF block"] = plain[:2] + bad_exif + plain[2:], pixels
    return files


def _webps() -> dict[str, tuple[bytes, Pixels]]:
    picture = Image.fromarray(scene(*SIZE))
    clear = Image.merge("RGBA", [*picture.split(), picture.getchannel(1)])
    variants = {
        "of quality 0": (picture, {"quality": 0}),
        "of quality 100": (picture, {"quality": 100}),
        "lossy with alpha": (clear, {"quality": 70, "exact": True}),
        "with a colour profile that is none": (picture, {"icc_profile": b"junk" * 9000}),
        "with XMP that is none": (picture, {"xmp": b"\xff" * 9000}),
        "with EXIF that is none": (picture, {"exif": b"\xff" * 9000}),
    }
    files = {
        f"WebP {name}": _as_pillow_reads(encode(image, "WEBP", **options))
        for name, (image, options) in variants.items()
    }
    plain, pixels = _as_pillow_reads(encode(picture, "WEBP", lossless=True))
    files["WebP with bytes behind its end"] = plain + bytes(999), pixels
    frames = [Image.fromarray(scene(*SIZE, seed=i)) for i in range(1, 30)]
    film = encode(picture, "WEBP", lossless=True, save_all=True, append_images=frames)
    files["WebP film of 30 frames"] = film, scene(*SIZE)
    return files


def _texts() -> dict[str, tuple[bytes, Pixels]]:
    """Base64 text and data: URIs, in every spelling."""
    rgb = scene(*SIZE)
    encoded = {"PNG": encode(rgb), "WebP": encode(rgb, "WEBP", lossless=True)}
    files: dict[str, bytes] = {}
    for kind, data in encoded.items():
        text = base64.b64encode(data)
        files |= {
            f"{kind} as base64": text,
            f"{kind} as base64 without padding": text.rstrip(b"="),
            f"{kind} as base64 in lines": "\r\n".join(textwrap.wrap(text.decode(), 76)).encode(),
            f"{kind} as base64 with a space after each": b" ".join(bytes([c]) for c in text),
            f"{kind} as URL-safe base64": base64.urlsafe_b64encode(data),
            f"{kind} as a data: URI": b"data:image/" + kind.lower().encode() + b";base64," + text,
            f"{kind} as a data: URI of another type": b"data:text/html;x=y;base64,\n" + text,
            f"{kind} as a shouted data: URI": b" DATA:;BASE64," + text + b"\n",
        }
    return {name: (text, rgb) for name, text in files.items()}


def _broken() -> dict[str, bytes]:
    rgb = scene(*SIZE)
    whole = png(rgb, RGB)
    chunks = chunks_of(whole)
    by_name = dict(chunks)
    ihdr, idat, iend = header(SIZE[1], SIZE[0]), (b"IDAT", by_name[b"IDAT"]), (b"IEND", b"")
    other = header(SIZE[1], SIZE[0], 8, PALETTE)
    jpeg, webp = encode(rgb, "JPEG"), encode(rgb, "WEBP", lossless=True)
    frame = jpeg.index(b"\xff\xc0")
    length = 2 + int.from_bytes(jpeg[frame + 2 : frame + 4], "big")
    sof, scan = jpeg[frame : frame + length], jpeg.index(b"\xff\xda")
    return {
        "PNG without pixels": png_of(ihdr, iend),
        "PNG without an end": png_of(ihdr, idat),
        "PNG of pixels alone": png_of(idat, iend),
        "PNG of an end alone": png_of(iend),
        "PNG of two headers": png_of(ihdr, ihdr, idat, iend),
        "PNG of a second header of another kind": png_of(ihdr, other, idat, iend),
        "PNG of a header behind its pixels": png_of(ihdr, idat, header(9, 9), iend),
        "PNG that is not deflated": png_of(ihdr, (b"IDAT", b"junk" * 99), iend),
        "PNG of a palette's header and clear colours before its own": png_of(
            other, (b"tRNS", bytes(9)), ihdr, idat, iend
        ),
        "PNG of palette without a palette": png_of(other, idat, iend),
        "PNG of 3-bit samples": png_of(header(SIZE[1], SIZE[0], 3, GREY), idat, iend),
        "PNG of 16-bit palette": png_of(header(SIZE[1], SIZE[0], 16, PALETTE), idat, iend),
        "PNG of colour type 7": png_of(header(SIZE[1], SIZE[0], 8, 7), idat, iend),
        "PNG of an unknown compression": png_of(
            header(SIZE[1], SIZE[0], 8, RGB, 9, 0, 0), idat, iend
        ),
        "PNG of width 0": png_of(header(0, SIZE[0]), idat, iend),
        "PNG of height 0": png_of(header(SIZE[1], 0), idat, iend),
        "PNG of a chunk beyond its end": whole[:33] + b"\xff\xff\xff\xff" + whole[37:],
        "PNG of a chunk of length 2^31": whole[:33] + b"\x80\0\0\0" + whole[37:],
        "PNG turned into text lines": whole.replace(b"\r\n", b"\n"),
        "base64 of base64 of a PNG": base64.b64encode(base64.b64encode(whole)),
        "hexadecimal of a PNG": whole.hex().encode(),
        "base64 of a PNG with a stray sign": base64.b64encode(whole)[:40] + b"!" * 8,
        "data: URI in a data: URI": b"data:;base64,data:;base64," + base64.b64encode(whole),
        "UTF-16 of base64 of a PNG": base64.b64encode(whole).decode().encode("utf-16"),
        "path": b"/etc/passwd",
        "file URI": b"file:///etc/passwd",
        "link": b"http://127.0.0.1:1/a.png",
        "JPEG without a frame": jpeg[:frame] + jpeg[frame + length :],
        "JPEG of two frames": jpeg[: frame + length] + sof + jpeg[frame + length :],
        "JPEG without a scan": jpeg[:scan] + b"\xff\xd9\0\0",
        "JPEG of width 0": jpeg[: frame + 7] + b"\0\0" + jpeg[frame + 9 :],
        "JPEG of height 0": jpeg[: frame + 5] + b"\0\0" + jpeg[frame + 7 :],
        "JPEG of 12-bit samples": jpeg[: frame + 4] + b"\x0c" + jpeg[frame + 5 :],
        "JPEG of a segment of length 0": jpeg[:4] + b"\0\0" + jpeg[6:],
        "JPEG of 65 scans": jpeg[:-2] + jpeg[scan:-2] * 64 + b"\xff\xd9",
        "JPEG of nothing": b"\xff\xd8\xff\xd9",
        "JPEG that starts over": jpeg[:2] * 500,
        "WebP of nothing": webp_of(),
        "WebP of a strange chunk": webp_of(webp_chunk(b"ABCD", bytes(40))),
        "WebP that says it is longer": webp[:4] + b"\xff\xff\xff\x7f" + webp[8:],
        "WebP of a wrong signature": webp[:20] + b"\x30" + webp[21:],
        "WAV": b"RIFF" + webp[4:8] + b"WAVE" + webp[12:],
        "AVIF": bytes(4) + b"ftypavif" + bytes(50),
        "HTML": b"<html><body>502 Bad Gateway</body></html>",
        "JSON": b'{"b64_json": "iVBORw0KGgo="}',
        "ZIP": b"PK\x03\x04" + bytes(40),
        "null byte": b"\0",
        "blanks": b" \t\r\n" * 99,
    }
