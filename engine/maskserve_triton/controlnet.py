"""The controlnet model's Triton side: operations of denoisers, JSON and arrays in, JSON out.

| op | keys | answer |
|---|---|---|
| `health` | | `sessions`, `rows`, `nets` |
| `attach` | `dtype` | `session`, `socket`, `port`, `key`, `lent` |
| `load` | `session`, `name`, `version` | `digest`, once the ControlNet is there |
| `drop` | `session`, `version` | |
| `open` | `session`, `row`, `opening`; ARRAYS | |
| `close` | `session`, `row` | |
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from maskserve_common.config import Config
from maskserve_common.contracts.request import ResolvedControl
from maskserve_common.errors import EngineFailed, InvalidRequest, MaskserveError
from maskserve_common.resources.loading import Loaded
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.control_service.service import ControlNetService
from maskserve_triton.answer import Answer, answer_all
from maskserve_triton.tensor_io import read_array_or_none, read_bytes

_OPS = "attach, close, drop, health, load, open"


class ControlNetFrontend:
    """Answers denoisers."""

    def __init__(self, api: Any, config: Config) -> None:
        self._api = api
        self.service = ControlNetService(config, Path(config.runtime_dir) / "controls")

    def close(self) -> None:
        self.service.close()

    def execute(self, requests: list[Any]) -> None:
        """Take requests in; each is answered once."""
        answer_all(self._api, requests, self._operate)

    def _operate(self, request: Any, answer: Answer) -> None:
        service, sessions = self.service, self.service.sessions
        match _operation(read_bytes(self._api, request, "OP")):
            case {"op": "health"}:
                if service.problem:
                    raise EngineFailed(f"the ControlNet service has failed: {service.problem}")
                _reply(answer, sessions.counts())
            case {"op": "attach", "dtype": str(dtype)}:
                _reply(answer, msgspec.to_builtins(sessions.attach(dtype)))
            case {
                "op": "load",
                "session": str(session),
                "name": str(name),
                "version": str(version),
            }:

                def done(outcome: Loaded | MaskserveError) -> None:
                    if isinstance(outcome, Loaded):
                        _reply(answer, {"digest": outcome.digest})
                    else:
                        answer.fail(outcome)

                sessions.load(session, ResolvedControl(name=name, version=version), done)
            case {"op": "drop", "session": str(session), "version": str(version)}:
                sessions.drop(session, version)
                _reply(answer, {})
            case {
                "op": "open",
                "session": str(session),
                "row": str(row),
                "opening": opening_fields,
            }:
                arrays = read_array_or_none(self._api, request, "ARRAYS", np.uint8, ndim=1)
                packed = b"" if arrays is None else arrays.tobytes()
                try:
                    opening = Opening.unpacked(opening_fields, packed)
                except ValueError as error:
                    raise InvalidRequest("OP.opening", str(error)) from error
                sessions.open(session, row, opening)
                _reply(answer, {})
            case {"op": "close", "session": str(session), "row": str(row)}:
                sessions.close_row(session, row)
                _reply(answer, {})
            case _:
                raise InvalidRequest("OP", "is not an operation with its keys", _OPS)


def _operation(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidRequest("OP", "is not valid JSON", _OPS) from None


def _reply(answer: Answer, reply: dict[str, Any]) -> None:
    answer.finish({"RESULT": json.dumps(reply).encode()})
