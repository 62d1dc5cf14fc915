"""Reader of what people write: configuration files and SETTINGS.

A Table defines the keys with their types and ranges; the string below a key explains it. msgspec
checks; `read` puts its errors into words: the key, the problem, and the accepted values.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import re
from collections.abc import Collection
from typing import Any, TypeVar

import msgspec
from msgspec import inspect as kinds

T = TypeVar("T")
_SHOWN_CHARACTERS = 60
_PATH = re.compile(r" - at `\$(.*)`\Z", re.DOTALL)
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_TYPES = {
    kinds.BoolType: "a boolean",
    kinds.IntType: "an integer",
    kinds.FloatType: "a number",
    kinds.StrType: "a string",
    kinds.VarTupleType: "a list",
    kinds.StructType: "an object",
}


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys with their types, ranges and defaults; one that is unknown is an error."""


class Misread(ValueError):
    """A value that cannot be taken."""

    def __init__(self, path: str, problem: str, accepted: str) -> None:
        """Args:
        path: path of the key, such as `loras[0].scale`; empty for the whole.
        problem: problem of its value.
        accepted: accepted values.
        """
        super().__init__(f"{path}: {problem}; accepted: {accepted}")
        self.path, self.problem, self.accepted = path, problem, accepted


def read(value: Any, kind: type[T], *, strict: bool = True) -> T:
    """Check `value`, as JSON or TOML parsers return it.

    Args:
        value: parsed value.
        kind: a Table.
        strict: whether text is accepted only for text; False for forms, which have only text.

    Raises:
        Misread: naming the first wrong key.
    """
    try:
        return msgspec.convert(value, kind, strict=strict)
    except UnicodeEncodeError:
        raise Misread(_not_text(value), "holds lone surrogates, not text", "Unicode text") from None
    except msgspec.ValidationError as error:
        raise _misread(value, kind, str(error), strict=strict) from None


def require_known(value: Any, known: Collection[str]) -> Any:
    """Return a copy without `known` keys that are null, which means "not given"."""
    if not isinstance(value, dict):
        return value
    items = [(k, item) for k, item in value.items() if item is not None or k not in known]
    return {
        key: [require_known(element, known) for element in item] if isinstance(item, list) else item
        for key, item in items
    }


def sentences(table: type) -> dict[str, str]:
    """Key → the string below it in the class; keys without one are left out."""
    (body,) = ast.parse(inspect.getsource(table)).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, below in itertools.pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(field.target, ast.Name)
            docs[field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return docs


def without_point(value: Any) -> Any:
    """Return the value with its whole numbers as integers.

    Python keeps one annotated type for equal ones, so whether a bound in a schema is 0 or 0.0
    depends on which module was imported first.
    """
    match value:
        case dict():
            return {key: without_point(item) for key, item in value.items()}
        case list() | tuple():
            return [without_point(item) for item in value]
        case float() if value.is_integer():
            return int(value)
    return value


def show(value: Any) -> str:
    """A value as it may be repeated in a message: short, on one line."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a huge integer"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def nearest(name: str, known: Collection[str]) -> str:
    """Return words about the known name that an unknown one most likely means: a misspelt one, or
    one with the same words. Empty if there is none.
    """
    spelt = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower()[:80], spelt, 1, 0.7)
    words = set(name.lower().split("_"))
    near = near or [candidate for candidate in sorted(spelt) if words <= set(candidate.split("_"))]
    return f" (did you mean {spelt[near[0]]}?)" if near else ""


def _misread(value: Any, kind: type, message: str, *, strict: bool) -> Misread:
    """Translate an error message of msgspec's."""
    at = _PATH.search(message)
    path = at[1].lstrip(".") if at else ""
    expected, words = _plain(kinds.type_info(kind))
    for name, index in _STEP.findall(path):
        value = value[name] if name else value[int(index)]
        if isinstance(expected, kinds.StructType):
            (field,) = (candidate for candidate in expected.fields if candidate.encode_name == name)
            expected, words = _plain(field.type)
        elif isinstance(expected, kinds.VarTupleType):
            expected, words = _plain(expected.item_type)
        elif isinstance(expected, kinds.TupleType):
            expected, words = _plain(expected.item_types[int(index)])
    if isinstance(expected, kinds.StructType) and isinstance(value, dict):
        return _wrong_keys(path, value, expected)
    return Misread(path, _problem(value, expected, strict=strict), words or _accepted(expected))


def _wrong_keys(path: str, value: dict[Any, Any], expected: kinds.StructType) -> Misread:
    """Describe a key that is unknown or missing."""
    below = f"{path}." if path else ""
    names = [field.encode_name for field in expected.fields]
    for key in sorted(str(key) for key in value):
        if key not in names:
            problem = "is not a known key"
            return Misread(
                below + key[:40], problem + nearest(key, names), ", ".join(sorted(names))
            )
    for field in expected.fields:
        if field.required and field.encode_name not in value:
            plain, words = _plain(field.type)
            return Misread(below + field.encode_name, "is missing", words or _accepted(plain))
    return Misread(path, "is not as it should be", ", ".join(sorted(names)))


def _plain(kind: kinds.Type) -> tuple[kinds.Type, str]:
    """Return the type without `| None` and annotations, and the description of accepted values, if
    any.
    """
    words = ""
    while True:
        if isinstance(kind, kinds.Metadata):
            words = str((kind.extra_json_schema or {}).get("description", words))
            kind = kind.type
        elif isinstance(kind, kinds.UnionType):
            (kind,) = (member for member in kind.types if not isinstance(member, kinds.NoneType))
        else:
            return kind, words


def _problem(value: Any, expected: kinds.Type, *, strict: bool) -> str:
    if isinstance(expected, kinds.LiteralType):
        return f"{show(value)} is not one of them"
    if isinstance(expected, kinds.IntType | kinds.FloatType):
        if isinstance(value, str) and not strict:  # a form's
            value = _number(value)
        numbers = int if isinstance(expected, kinds.IntType) else (int, float)
        if isinstance(value, numbers) and not isinstance(value, bool):
            finite = value - value == 0
            return f"{show(value)} is {'out of range' if finite else 'not a finite number'}"
    if isinstance(expected, kinds.StrType) and isinstance(value, str):
        most = expected.max_length
        if most is not None and len(value) > most:
            return f"is {len(value)} characters long"
        return f"{show(value)} has another form"
    if isinstance(expected, kinds.VarTupleType | kinds.TupleType) and isinstance(value, list):
        return f"has {len(value)} entries"
    return f"{show(value)} is not {_TYPES.get(type(expected), 'accepted')}"


def _number(text: str) -> Any:
    """Return the number that a text spells; otherwise the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _accepted(expected: kinds.Type) -> str:
    if isinstance(expected, kinds.BoolType):
        return "true or false"
    if isinstance(expected, kinds.LiteralType):
        return ", ".join(str(value) for value in expected.values)
    if isinstance(expected, kinds.IntType | kinds.FloatType):
        low, above = (expected.ge, "from") if expected.ge is not None else (expected.gt, "above")
        if low is None:
            return "an integer" if isinstance(expected, kinds.IntType) else "a number"
        if isinstance(expected, kinds.IntType):
            return f"{low} to {expected.le}"
        return f"a number {above} {low:g} to {expected.le:g}"
    if isinstance(expected, kinds.StrType):
        if expected.max_length is not None:
            return f"text of up to {expected.max_length} characters"
        return f"text of the form {expected.pattern}" if expected.pattern else "text"
    if isinstance(expected, kinds.StructType):
        return "an object with " + ", ".join(field.encode_name for field in expected.fields)
    return "a list" if isinstance(expected, kinds.VarTupleType) else "another value"


def _not_text(value: Any, path: str = "") -> str:
    """Return the path of a string that is not Unicode text."""
    if isinstance(value, dict):
        items = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
        strange = [name for name, _ in items if not _is_text(name)]
        if strange:
            return strange[0]
    elif isinstance(value, list | tuple):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return path if isinstance(value, str) and not _is_text(value) else ""
    return next((bad_path for name, item in items if (bad_path := _not_text(item, name))), "")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
