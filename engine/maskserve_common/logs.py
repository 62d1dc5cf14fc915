"""Logs: one JSON object per line, with the request's id if there is one.

This module formats them in a few lines, without python-json-logger: the package needs only numpy
and pillow, and every process of a worker imports it.

Lines get values beside their message through `extra`, under these names only:

    log.info("edit done", extra={"event": "edit", "request_id": name, "fields": {"steps": 28}})

Prompts and pictures are never logged.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from logging.handlers import WatchedFileHandler
from typing import Any

from msgspec import structs

from maskserve_common.config import Config, ConfigError, LogConfig

_STANDARD_ERROR = 2
_VARYING = re.compile("0x[0-9a-f]+|[0-9]+")
"""Numbers and addresses: lines that differ only in these count as one text."""
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
    """Format lines for people: time, level, model, message, then other fields as `name=value`."""

    def __init__(self, worker: str, model: str) -> None:
        super().__init__()
        self._names = f"{worker} {model}"

    def format(self, record: logging.LogRecord) -> str:
        fields = {"request_id": getattr(record, "request_id", "")}
        fields.update(getattr(record, "fields", _NO_FIELDS))
        suffix = "".join(f" {name}={value}" for name, value in fields.items() if value != "")
        line = f"{_utc(record.created)} {record.levelname} {self._names}: {record.getMessage()}"
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return line + suffix + trace


class LineFile(WatchedFileHandler):
    """Appends each line by one write, so that lines of several processes never mix.

    A file that was moved or removed, as by logrotate, is opened again. If lines cannot be written,
    as on a full disk, they are dropped: the first one goes to standard error, and the file gets
    their number as soon as possible.
    """

    dropped = 0
    _torn = False
    """Whether only a part of the newest line was written."""
    _closed_for_good = False
    """Whether `close` was called: later lines are ignored, and the file is not opened again."""

    def close(self) -> None:
        super().close()
        self._closed_for_good = True

    def emit(self, record: logging.LogRecord) -> None:
        if self._closed_for_good:
            return
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        try:
            file = self._opened()
            if self.dropped:
                self._append(file, self.format(_dropped_record(self.dropped)))
                self.dropped = 0
            self._append(file, line)
        except OSError as error:
            self.dropped += 1
            if self.dropped == 1:
                message = f"cannot write {self.baseFilename}: {error.strerror}; lines are lost\n"
                with suppress(OSError):
                    os.write(_STANDARD_ERROR, message.encode())

    def _opened(self) -> int:
        self.reopenIfNeeded()
        if self.stream is None:  # it could not be opened the last time
            self.stream = self._open()
            self._statstream()
        return self.stream.fileno()

    def _append(self, file: int, line: str) -> None:
        data = (self._torn * "\n" + line + "\n").encode("utf-8", "replace")
        written = os.write(file, data)
        self._torn = written < len(data)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Repeats(logging.Filter):
    """Limit repetitions of a warning or an error: in each period the first lines of one text pass.
    The first line of the next period has the number of suppressed lines, as `left_out`. Without a
    limit, clients could fill the log.
    """

    _FIRST_LINES, _PERIOD_S, _MOST_TEXTS = 20, 10.0, 1024

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[tuple[str, int, str], tuple[float, int]] = {}
        """Logger, level and text -> start of the period, and lines since."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        text = (record.name, record.levelno, _VARYING.sub("", str(record.msg))[:200])
        began, count = self._lines.get(text, (record.created, 0))
        if record.created - began > self._PERIOD_S:
            if count > self._FIRST_LINES:
                fields = {
                    **getattr(record, "fields", _NO_FIELDS),
                    "left_out": count - self._FIRST_LINES,
                }
                record.fields = fields
            began, count = record.created, 0
        if len(self._lines) >= self._MOST_TEXTS and text not in self._lines:
            self._lines.clear()
        self._lines[text] = began, count + 1
        return count < self._FIRST_LINES


def _dropped_record(count: int) -> logging.LogRecord:
    message = f"{count} lines before this one could not be written"
    return logging.LogRecord("maskserve", logging.WARNING, "", 0, message, None, None)


def log_handler(config: LogConfig, worker: str, model: str) -> logging.Handler:
    """Return the handler of one process's log lines.

    Raises:
        ConfigError: the file cannot be opened.
    """
    handler: logging.Handler
    try:
        handler = LineFile(config.file) if config.file else logging.StreamHandler(sys.stderr)
    except OSError as error:
        raise ConfigError(f"[log] file: cannot open {config.file}: {error.strerror}") from error
    handler.addFilter(Repeats())
    formatter = JsonFormatter if config.format == "json" else TextFormatter
    handler.setFormatter(formatter(worker, model))
    return handler


def start_log(config: Config, model: str) -> None:
    """Send this process's log to the place in `[log]`; call it once, before everything else.

    If the file cannot be opened, the process still serves: lines go to standard error then.

    Args:
        config: configuration of the worker.
        model: Triton model that this process serves.
    """
    try:
        handler = log_handler(config.log, config.worker, model)
    except ConfigError:
        handler = log_handler(structs.replace(config.log, file=""), config.worker, model)
    logging.basicConfig(level=config.log.level, handlers=[handler], force=True)


def about(request_id: str) -> dict[str, str]:
    """`extra` of a line about one request."""
    return {"request_id": request_id}


def _utc(seconds: float) -> str:
    when = datetime.fromtimestamp(seconds, tz=timezone.utc)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
