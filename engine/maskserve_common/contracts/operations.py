"""Operations of the model `control`: which there are, and the check of their JSON."""

from __future__ import annotations

import json
from typing import Any

from maskserve_common.contracts.keys import NO_SCOPE, SCOPE
from maskserve_common.contracts.settings import no_duplicates
from maskserve_common.errors import InvalidRequest
from maskserve_common.reading import nearest

# Operation -> the keys it takes beside "op".
OPERATIONS: dict[str, tuple[str, ...]] = {
    "status": (),
    "heartbeat": (),
    "cancel": ("request_id",),
    "templates": (),
    "register": ("image",),
    "prime": ("template_id",),
    "pin": ("template_id",),
    "unpin": ("template_id",),
    "evict": ("template_id",),
    "drain": (),
    "adapters": (),
    "adapter_check": ("name",),
    "adapter_load": ("name",),
    "adapter_pin": ("name",),
    "adapter_unpin": ("name",),
    "adapter_evict": ("name",),
}
SCOPED = ("templates", "register", "prime", "pin", "unpin", "evict")
"""Operations that may have a `scope` (`contracts.keys.SCOPE`): the scope of the client that they
act for."""
_FLAGS = ("shared", "prime")
_OPTIONAL_FIELDS = {"status": ("templates",)}
ADAPTER_WRITES = ("adapter_load", "adapter_pin", "adapter_unpin", "adapter_evict")
"""Operations that change the adapters of a host, for all its clients."""
PATIENT = ("register", "prime", "adapters", "adapter_check", "adapter_load")
"""Slow operations: encoding a large image without a GPU takes its time, and so does a remote
storage."""
# An operation is a flat object of a few strings, of which only an image may be long. JSON of
# other forms is refused before it is read: it takes up to fifty times its size as objects.
_PLAIN_BYTES = 64 * 1024
_STRUCTURE = b"[{,"
_MAX_STRUCTURE = 64
_operation_object = no_duplicates("OP")


def parse_operation(raw: bytes) -> dict[str, Any]:
    """Check the OP tensor's bytes.

    All values are strings, except two booleans of `register`: `shared` (the template is for every
    client) and `prime` (false: it is primed at its first edit). `status` may name the version of
    `templates` that the caller knows, empty for none; the answer then has only changes.

    Raises:
        InvalidRequest: naming `OP` or `OP.<key>`.
    """
    if len(raw) > _PLAIN_BYTES and sum(map(raw.count, _STRUCTURE)) > _MAX_STRUCTURE:
        raise InvalidRequest(
            "OP", f"is {len(raw)} bytes of nested JSON", 'an object such as {"op": "status"}'
        )
    try:
        values = json.loads(raw.decode("utf-8"), object_pairs_hook=_operation_object)
    except (ValueError, RecursionError):
        raise InvalidRequest(
            "OP", "is not valid JSON", 'an object such as {"op": "status"}'
        ) from None
    if not isinstance(values, dict):
        raise InvalidRequest(
            "OP", f"is a JSON {type(values).__name__}", 'an object such as {"op": "status"}'
        )
    name = values.get("op")
    if not isinstance(name, str) or name not in OPERATIONS:
        unknown_name = f"{str(name)[:40]!r} is not known{nearest(str(name), OPERATIONS)}"
        message = "is missing" if name is None else unknown_name
        raise InvalidRequest("OP.op", message, ", ".join(OPERATIONS))
    required_keys = OPERATIONS[name]
    flags = _FLAGS if name == "register" else ()
    optional = (*(("scope",) if name in SCOPED else ()), *flags, *_OPTIONAL_FIELDS.get(name, ()))
    keys = ("op", *required_keys, *optional)
    if unknown_keys := sorted(values.keys() - set(keys)):
        key = unknown_keys[0][:40]
        raise InvalidRequest(
            f"OP.{key}", f"is not a key of {name}{nearest(key, keys)}", ", ".join(keys)
        )
    scope = values.get("scope", NO_SCOPE)
    if not isinstance(scope, str) or (scope and SCOPE.fullmatch(scope) is None):
        raise InvalidRequest("OP.scope", "has another form", "up to 32 of a-z and 0-9")
    for key in _OPTIONAL_FIELDS.get(name, ()):
        if not isinstance(values.get(key, ""), str):
            raise InvalidRequest(f"OP.{key}", "is not a string", "a version, or an empty string")
    for flag in flags:
        if not isinstance(values.get(flag, False), bool):
            raise InvalidRequest(f"OP.{flag}", "is not a boolean", "true or false")
    for key in required_keys:
        if not isinstance(values.get(key), str) or not values[key]:
            problem = "is missing" if key not in values else "is not a non-empty string"
            raise InvalidRequest(f"OP.{key}", problem, "a string")
    return values
