"""Protobuf messages as JSON in the form of Triton's HTTP server.

Unlike in protobuf's own JSON, names stay as they are, integers of 64 bits are numbers, and unset
fields are written, too. Enums are names.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message


def values_of(message: Message) -> dict[str, Any]:
    """Return the message as JSON values."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            inner = field.message_type.fields_by_name["value"]
            values[field.name] = {str(k): _value(inner, value[k]) for k in sorted(value)}
        elif field.is_repeated:
            values[field.name] = [_value(field, item) for item in value]
        else:
            values[field.name] = _value(field, value)
    return values


def _value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return values_of(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
