"""Results that clients asked to keep: templates of the clients that made them, primed for the next
edit.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import Any

from maskserve_common.config import Config, ConfigError
from maskserve_common.contracts.keys import scope_of
from maskserve_common.errors import MaskserveError
from maskserve_common.files.values import Values
from maskserve_common.imaging.images import decode_image
from maskserve_common.logs import about
from maskserve_common.niceness import Niceness
from maskserve_common.shares import Full
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_triton.fair_threads import FairThreads
from maskserve_triton.pipeline import prime_template
from maskserve_triton.templates import templates_of

log = logging.getLogger("maskserve")
_MAX_QUEUED = 32
"""Most primings that wait. Further ones are dropped: their templates are primed when they are
edited."""


class Results:
    """Results of one front's edits."""

    def __init__(self, api: Any, config: Config, spec: ModelSpec) -> None:
        self._api, self._config, self._spec = api, config, spec
        self._templates = templates_of(config, Values(config.values))
        self._threads = FairThreads(1, _MAX_QUEUED, "results", Niceness.OPERATIONS)

    def keep(self, image: bytes, request_id: str) -> str | None:
        """Keep an edit's picture, for the edit's client.

        Args:
            image: the client's file, so that it is the same template.
            request_id: id of the edit.

        Returns:
            The template's id; None if it could not be kept, which does not fail the edit.
        """
        try:
            decoded = decode_image(image, "IMAGE", self._config.limits)
            name, scope = decoded.template_id, scope_of(request_id)
            self._templates.put_result(name, bytes(decoded.encoded), [scope] if scope else [])
        except (MaskserveError, OSError) as error:
            log.warning("a result is not kept: %s", error, extra=about(request_id))
            return None
        return name

    def prime(self, name: str, request_id: str) -> None:
        """Queue a result for priming in the background, in its client's turn."""
        if self._config.cache.enabled:
            with suppress(Full):
                self._threads.submit(scope_of(request_id), partial(self._prime, name))

    def close(self) -> None:
        self._threads.close()

    def _prime(self, name: str) -> None:
        try:
            encoded = self._templates.get(name)
            if encoded is not None:
                decoded = decode_image(encoded, "IMAGE", self._config.limits)
                prime_template(self._api, decoded, name, self._spec, self._config)
        except (MaskserveError, ConfigError, OSError) as error:
            log.warning("template %s, a result, is not primed: %s", name, error)
