"""PROMPT: any text of any script, and bytes that are not text."""

from __future__ import annotations

from collections.abc import Iterator

from tests.fakes.corpus.case import Case, refused, works
from tests.fakes.hostile import SIZE
from tests.fakes.pictures import blob_mask, scene


def prompt_cases() -> Iterator[Case]:
    is_match = blob_mask(*SIZE) == 0
    for name, text in _TEXTS.items():
        yield works("prompt", name, scene(*SIZE), is_match, PROMPT=text.encode())
    for name, raw in _NO_TEXTS.items():
        yield refused("prompt", name, "PROMPT", PROMPT=raw)


_TEXTS = {
    "empty": "",
    "a blank": " ",
    "blanks and lines": "\r\n\t \u2028\u00a0\u3000" * 50,
    "Arabic": "نجمة حمراء",
    "Hebrew with points": "כּוֹכָב אָדֹם",
    "Chinese": "红色的星星",
    "Thai": "ดาวสีแดง",
    "emoji": "⭐🟥🎨",
    "joined emoji": "👩‍👩‍👧‍👦🏳️‍🌈👍🏽" * 20,
    "combining marks": "a" + "\u0301" * 5000,
    "right-to-left override": "a \u202egnirts\u202c star",
    "zero width": "a\u200b\u200d\ufeffstar",
    "byte order mark": "\ufeffa star",
    "control characters": "a\x01\x02\x1b[31m\x7f star",
    "private use": "\ue000\U000f0000\U0010ffff",
    "non-characters": "\ufffe\uffff",
    "special tokens": "</s><pad><unk><|endoftext|><extra_id_0>",
    "format strings": "{0} %s %n ${x} {{}}",
    "code": "'; DROP TABLE edits; -- <script>alert(1)</script>",
    "JSON": '{"seed": 1}',
    "base64": "aGVsbG8=" * 100,
    "a path": "../../../etc/passwd",
    "an error's code": "[ENGINE_FAILED] internal error",
    "one long word": "a" * 32_000,
    "32,000 emoji": "⭐" * 32_000,
    "32,000 blanks": " " * 32_000,
    "16,000 words": "a " * 16_000,
    "many numbers": " ".join(str(i) for i in range(5000)),
}

_NO_TEXTS = {
    "a byte of Latin-1": b"caf\xe9",
    "UTF-16": "a star".encode("utf-16"),
    "UTF-16 without mark": "a star".encode("utf-16-le"),
    "UTF-32": "a star".encode("utf-32"),
    "a surrogate": b"a \xed\xa0\x80 star",
    "a pair of surrogates": b"\xed\xa0\xbd\xed\xb8\x80",
    "overlong": b"\xc0\xaf",
    "overlong NUL": b"a\xc0\x80b",
    "beyond Unicode": b"\xf4\x90\x80\x80",
    "five bytes": b"\xf8\x88\x80\x80\x80",
    "cut emoji": "⭐🟥".encode()[:-1],
    "a continuation first": b"\x80a",
    "all bytes": bytes(range(1, 256)),
    "NUL": b"\0",
    "NUL first": b"\0a star",
    "NUL last": b"a star\0",
    "NULs": bytes(1000),
    "32,001 letters": b"a" * 32_001,
    "32,001 emoji": "⭐".encode() * 32_001,
    "2 MB": b"a star " * 300_000,
    "a PNG": b"\x89PNG\r\n\x1a\n" + bytes(20),
}
