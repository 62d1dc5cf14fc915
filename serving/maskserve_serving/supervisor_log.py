"""The supervisor's actions on a worker, written to the worker's own log."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from maskserve_common.config import Config, ConfigError
from maskserve_common.logs import log_handler
from maskserve_serving.errors import ServeError


class SupervisorLog:
    """Writes the lines for one worker, if the worker has a log file."""

    def __init__(self) -> None:
        self._handler: logging.Handler = logging.NullHandler()
        # Not in the logging tree, because the supervisor writes the logs of several workers.
        self._logger = logging.Logger("maskserve.supervisor")
        self._logger.addHandler(self._handler)

    @staticmethod
    def check(config: Config) -> None:
        """Raise a ServeError if the file that `[log]` names cannot be opened."""
        if config.log.file:
            try:
                log_handler(config.log, config.worker, "supervisor").close()
            except ConfigError as error:
                raise ServeError(str(error)) from error

    def open(self, config: Config) -> None:
        """Write to the file of `[log]` from now on; to no file if it cannot be opened."""
        self.close()
        if config.log.file:
            with suppress(ConfigError):
                self._handler = log_handler(config.log, config.worker, "supervisor")
        self._logger.handlers = [self._handler]
        self._logger.setLevel(config.log.level)

    def write(self, level: int, message: str, state: str, **fields: Any) -> None:
        """Write a line.

        Args:
            level: level of the line.
            message: text of the line.
            state: the worker's state after the action.
            fields: further fields of the line.
        """
        extra = {"event": "worker", "fields": {"state": state, **fields}}
        self._logger.log(level, message, extra=extra)

    def close(self) -> None:
        self._handler.close()
        self._handler = logging.NullHandler()
        self._logger.handlers = [self._handler]
