"""SETTINGS: every key with every wrong type, at and beyond its bounds, and invalid JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from tests.fakes.corpus.case import Case, refused, works
from tests.fakes.corpus.drawn import drawn
from tests.fakes.hostile import SIZE, good_inputs
from tests.fakes.pictures import blob_mask, scene

DRAWN_GOOD, DRAWN_BAD = 20, 50

# Key → (values that work, values of the right type that do not). The cases are for FLUX.1 Fill:
# abilities that it lacks count as the latter.
_VALUES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "model": ((), ("", "no-such-model", "x" * 257, "\ud800", "../..", "a\nb")),
    "seed": ((0, 1, 2**32, 2**63 - 1), (-1, 2**63, 10**30, 10**4000)),
    "num_inference_steps": ((1, 2), (0, -1, 1001, 2**31, 2**64)),
    "guidance_scale": ((0, 0.0, 1e-300, 3.5, 30, 1000), (-0.5, 1000.5, 1e308, 10**400)),
    "true_cfg_scale": ((1, 1.0), (0.5, 1.5, 7, 100, 101, -1)),
    "negative_prompt": ((), ("", "blur", "a\0b", "x" * 32_001, "\udfff")),
    "strength": ((1, 1.0, 0.5), (0, -0.1, 1.0000001, 2, 1e-300)),
    "mask_mode": (("auto", "white"), ("", "WHITE", "white ", "black")),
    "mask_dilate": ((0, 1, 512), (-1, 513, 2**40)),
    "mask_feather": ((0, 1, 512), (-1, 513, 2**40)),
    "output_quality": ((), (-1, 101, 10**30)),
    "output_format": (("png", "webp"), ("", "PNG", "gif", "png\0")),
    "output_encoding": (("auto", "raw", "base64"), ("", "hex", "RAW")),
    "progress": ((True, False), ()),
    "preview_every": ((0, 1, 1000), (-1, 1001)),
    "cache": (("auto", "off"), ("", "on", "required")),
    "reproducible": ((False,), ()),
    "loras": (
        (),
        ("hollow", 3, {}, {"name": "hollow"}, [{"name": f"a{n}"} for n in range(5)]),
    ),
    "controls": (
        (),
        ("outline", 3, {}, {"name": "outline"}, [{"name": f"a{n}"} for n in range(4)]),
    ),
    "adapters": (("exact", "fast"), ("", "FAST", "slow")),
    "template_id": (
        (),
        ("", "0" * 15, "0" * 65, "G" * 32, "ABCDEF0123456789", "../" * 8, "0" * 15 + "\n"),
    ),
    "on_late": (("drop", "finish"), ("", "DROP", "wait")),
    "reuse": (("exact",), ("", "EXACT", "elastic")),
    "reuse_floor": ((0, 30.0, 100), (-1, 101, 1e308)),
    "deadline_ms": ((600_000, 86_400_000), (0, -1, 86_400_001)),
    "priority": ((-100, 0, 100), (-101, 101, 10**30)),
    "request_id": ((), ("", " ", "a b", "x" * 129, "é", "a\n", "\ud83d", "<script>", "a\0b")),
}
_WRONG_TYPES: dict[type, tuple[Any, ...]] = {
    str: (1, 1.5, True, [], {}, ["png"]),
    int: ("1", 1.0, 1.5, True, [], {}, float("nan"), float("inf")),
    float: ("1", True, [], {}, float("nan"), float("inf"), float("-inf")),
    bool: ("true", 1, 0, 1.0, [], {}),
    list: (1, 1.5, "[]", True),
}
_TYPES: dict[str, type] = {
    **dict.fromkeys(_VALUES, str),
    **dict.fromkeys(
        (
            "seed",
            "num_inference_steps",
            "mask_dilate",
            "mask_feather",
            "output_quality",
            "preview_every",
            "deadline_ms",
            "priority",
        ),
        int,
    ),
    **dict.fromkeys(("guidance_scale", "true_cfg_scale", "strength", "reuse_floor"), float),
    **dict.fromkeys(("progress", "reproducible"), bool),
    **dict.fromkeys(("loras", "controls"), list),
}
KEYS = tuple(_VALUES)


def settings_cases() -> Iterator[Case]:
    for key, (good, bad) in _VALUES.items():
        for value in good:
            yield _edited(f"{key} {_label_of(value)}", {key: value})
        for value in bad:
            yield _refused(f"{key} {_label_of(value)}", key, {key: value})
        for value in _WRONG_TYPES[_TYPES[key]]:
            yield _refused(f"{key} {_label_of(value)}", key, {key: value})
        yield _edited(f"{key} null", {key: None})
    for name, text in _json_that_works().items():
        yield _worked(name, text)
    for name, (text, field) in _broken_json().items():
        yield refused("settings", name, field, SETTINGS=text)
    for index, settings in enumerate(drawn(good_settings(), DRAWN_GOOD)):
        yield _edited(f"drawn {index} {_label_of(settings)}", settings)
    for index, (settings, key) in enumerate(drawn(bad_settings(), DRAWN_BAD)):
        yield _refused(f"drawn {index} {key}", key, settings)


def good_settings() -> st.SearchStrategy[dict[str, Any]]:
    """Valid settings, several keys at a time."""
    keys = [key for key, (good, _) in _VALUES.items() if good]
    pick = {key: st.sampled_from(_VALUES[key][0]) | st.none() for key in keys}
    pick["seed"] |= st.integers(0, 2**63 - 1)
    pick["guidance_scale"] |= st.floats(0, 1000)
    pick["strength"] = st.floats(0.51, 1)  # of two steps, one
    pick["request_id"] = st.from_regex(r"\A[A-Za-z0-9._:/-]{8,128}\Z")
    return st.fixed_dictionaries({}, optional=pick)


def bad_settings() -> st.SearchStrategy[tuple[dict[str, Any], str]]:
    """Settings with exactly one invalid key, and that key."""
    return st.sampled_from(KEYS).flatmap(
        lambda key: st.tuples(
            st.builds(
                lambda settings, value: {**settings, key: value},
                good_settings(),
                st.sampled_from((*_WRONG_TYPES[_TYPES[key]], *_VALUES[key][1])),
            ),
            st.just(key),
        )
    )


def _json_that_works() -> dict[str, bytes]:
    blanks = b" \n\r\t" * 1000
    return {
        "empty": b"",
        "empty object": b"{}",
        "blanks around": blanks + b"{" + blanks + b"}" + blanks,
        "escaped key": b'{"\\u0073eed": 1}',
        "negative zero": b'{"seed": -0}',
        "exponent": b'{"guidance_scale": 3e0}',
        "many digits": b'{"guidance_scale": 3.' + b"0" * 5000 + b"1}",
        "tiny number": b'{"guidance_scale": 1e-9999}',
    }


def _broken_json() -> dict[str, tuple[bytes, str]]:
    """Name → (SETTINGS, field in the error)."""
    not_json = {
        "blanks": b"  \n",
        "byte order mark": b"\xef\xbb\xbf{}",
        "cut short": b'{"seed": 1',
        "comma at the end": b'{"seed": 1,}',
        "single quotes": b"{'seed': 1}",
        "comment": b'{"seed": 1} // one',
        "two objects": b"{}{}",
        "JSON lines": b"{}\n{}",
        "leading zeros": b'{"seed": 01}',
        "plus sign": b'{"seed": +1}',
        "hexadecimal": b'{"seed": 0x1}',
        "None": b"None",
        "nan": b'{"strength": nan}',
        "control character": b'{"model": "a\nb"}',
        "NUL behind": b"{}\0",
        "NUL inside": b'{"se\0ed": 1}',
        "5000 digits": b'{"seed": ' + b"9" * 5000 + b"}",
        "60,000 digits": b'{"guidance_scale": ' + b"9" * 60_000 + b"}",
        "YAML": b"seed: 1",
        "60,000 brackets": b"[" * 60_000,
        "60,000 braces": b'{"a":' * 12_000,
        "nested whole": b"[" * 30_000 + b"]" * 30_000,
        "UTF-16": '{"seed": 1}'.encode("utf-16"),
        "UTF-16 without mark": '{"seed": 1}'.encode("utf-16-le"),
        "UTF-32": '{"seed": 1}'.encode("utf-32"),
        "Latin-1": '{"model": "é"}'.encode("latin-1"),
        "surrogates as UTF-8": b'{"model": "\xed\xa0\x80"}',
        "overlong": b'{"model": "\xc0\xaf"}',
        "an image": good_inputs()["IMAGE"],
        "65,537 bytes": b" " * 65_535 + b"{}",
        "5 MB": b'{"negative_prompt": "' + b"x" * 5_000_000 + b'"}',
    }
    values = {
        "null": None,
        "true": True,
        "number": 1,
        "text": "seed",
        "list": [],
        "NaN": float("nan"),
    }
    objects = {name: json.dumps(value).encode() for name, value in values.items()}
    deep = 900
    keyed = {
        "unknown key": (b'{"stepz": 1}', "SETTINGS.stepz"),
        "key in capitals": (b'{"Seed": 1}', "SETTINGS.Seed"),
        "key with a blank": (b'{"seed ": 1}', "SETTINGS.seed "),
        "empty key": (b'{"": 1}', "SETTINGS."),
        "unknown key of null": (b'{"stepz": null}', "SETTINGS.stepz"),
        "key of a lone surrogate": (b'{"\\ud800": 1}', "SETTINGS.\\ud800"),
        "key of a lone surrogate twice": (
            b'{"\\udc00": 1, "\\udc00": 1}',
            "SETTINGS.\\udc00",
        ),
        "key of control characters": (
            b'{"a\\n[ENGINE_FAILED] x\\u0000": 1}',
            "SETTINGS.a\\n[ENGINE_FAILED] x\\x00",
        ),
        "key of 60,000 letters": (b'{"' + b"k" * 60_000 + b'": 1}', f"SETTINGS.{'k' * 40}"),
        "long key twice": (
            b'{"%s": 1, "%s": 1}' % ((b"k" * 30_000,) * 2),
            f"SETTINGS.{'k' * 40}",
        ),
        "key twice": (b'{"seed": 1, "seed": 1}', "SETTINGS.seed"),
        "key twice, once escaped": (b'{"seed": 1, "\\u0073eed": 1}', "SETTINGS.seed"),
        "10,000 unknown keys": (
            json.dumps({f"k{i}": 1 for i in range(5000)}).encode(),
            "SETTINGS.k0",
        ),
        "prototype": (b'{"__proto__": {}, "__class__": 1}', "SETTINGS.__class__"),
        "nested list": (b'{"seed": ' + b"[" * deep + b"]" * deep + b"}", "SETTINGS.seed"),
        "nested object": (
            b'{"seed": ' + b'{"a":' * 400 + b"1" + b"}" * 400 + b"}",
            "SETTINGS.seed",
        ),
        "nested duplicate": (b'{"seed": {"a": 1, "a": 1}}', "SETTINGS.a"),
        "number beyond floats": (b'{"strength": 1e999}', "SETTINGS.strength"),
        "number below floats": (b'{"strength": 1e-999}', "SETTINGS.strength"),
        "-Infinity": (b'{"guidance_scale": -Infinity}', "SETTINGS.guidance_scale"),
    }
    return {
        **{name: (text, "SETTINGS") for name, text in not_json.items()},
        **{f"JSON {name}": (text, "SETTINGS") for name, text in objects.items()},
        **keyed,
    }


def _edited(name: str, settings: dict[str, Any]) -> Case:
    return _worked(name, json.dumps({"num_inference_steps": 2, **settings}).encode(), settings)


def _worked(name: str, text: bytes, settings: dict[str, Any] | None = None) -> Case:
    """A case that works. The pixels are not checked if the settings move the mask's border."""
    mask = blob_mask(*SIZE)
    moved = (settings or {}).get("mask_dilate") or (settings or {}).get("mask_feather")
    return works("settings", name, scene(*SIZE), (mask == 0) & (not moved), SETTINGS=text)


def _refused(name: str, key: str, settings: dict[str, Any]) -> Case:
    return refused("settings", name, f"SETTINGS.{key}", SETTINGS=json.dumps(settings).encode())


def _label_of(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:30] + f"... ({len(text)})"
