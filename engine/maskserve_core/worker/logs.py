"""Logs: one JSON object per line, with the request's id where there is one.

Formatted here, in a few lines, rather than by python-json-logger: this package needs numpy and
pillow only, and every one of a worker's processes imports it.

What a line says beside its message comes through `extra`, by these names alone:

    log.info("edit done", extra={"event": "edit", "request_id": name, "fields": {"steps": 28}})

Prompts and pictures are never logged.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from logging.handlers import WatchedFileHandler
from typing import Any

from maskserve_core.config import Config, ConfigError, LogConfig

_NO_FIELDS: Mapping[str, Any] = {}


class JsonFormatter(logging.Formatter):
    """`time` (ISO 8601, UTC), `level`, `worker`, `model`, `logger`, `message`; then, where known,
    `request_id`, `event`, the event's own fields, and `exc` (the trace of an exception).
    """

    def __init__(self, worker: str, model: str) -> None:
        super().__init__()
        self._worker, self._model = worker, model

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname,
            "worker": self._worker,
            "model": self._model,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("request_id", "event"):
            if value := getattr(record, name, ""):
                values[name] = value
        for name, value in getattr(record, "fields", _NO_FIELDS).items():
            values.setdefault(name, value)
        if record.exc_info:
            values["exc"] = self.formatException(record.exc_info)
        return json.dumps(values, default=str, separators=(",", ":"))


class TextFormatter(logging.Formatter):
    """The same for people: time, level, model, message, then what else is known as `name=value`."""

    def __init__(self, worker: str, model: str) -> None:
        super().__init__()
        self._names = f"{worker} {model}"

    def format(self, record: logging.LogRecord) -> str:
        known = {"request_id": getattr(record, "request_id", "")}
        known.update(getattr(record, "fields", _NO_FIELDS))
        said = "".join(f" {name}={value}" for name, value in known.items() if value != "")
        line = f"{_utc(record.created)} {record.levelname} {self._names}: {record.getMessage()}"
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return line + said + trace


class LineFile(WatchedFileHandler):
    """Appends each line by one write, so that lines of several processes never mix.

    A file that was moved away or removed, as logrotate does, is opened anew.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.reopenIfNeeded()
            if self.stream is not None:  # None: closed
                line = self.format(record) + "\n"
                os.write(self.stream.fileno(), line.encode("utf-8", "replace"))
        except Exception:
            self.handleError(record)


def log_handler(config: LogConfig, worker: str, model: str) -> logging.Handler:
    """Where the log lines of one process go.

    Raises:
        ConfigError: the file cannot be opened.
    """
    handler: logging.Handler
    try:
        handler = LineFile(config.file) if config.file else logging.StreamHandler(sys.stderr)
    except OSError as error:
        raise ConfigError(f"[log] file: cannot open {config.file}: {error.strerror}") from error
    formatter = JsonFormatter if config.format == "json" else TextFormatter
    handler.setFormatter(formatter(worker, model))
    return handler


def start_log(config: Config, model: str) -> None:
    """Send everything that this process logs where `[log]` says; call it once, first of all.

    Args:
        config: of the worker.
        model: the Triton model that this process serves.

    Raises:
        ConfigError: the file cannot be opened.
    """
    handler = log_handler(config.log, config.worker, model)
    logging.basicConfig(level=config.log.level, handlers=[handler], force=True)


def about(request_id: str) -> dict[str, str]:
    """`extra` of a line about one request."""
    return {"request_id": request_id}


def _utc(seconds: float) -> str:
    when = datetime.fromtimestamp(seconds, tz=timezone.utc)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
