"""The page's edits at one server."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from maskserve_client import Client, EditResult, Event
from maskserve_client.errors import ServerUnavailable
from maskserve_common.contracts.request import EDIT_KINDS, EditKind
from maskserve_common.errors import MaskserveError, Overloaded, TemplateNotFound
from maskserve_page.pictures import PagePicture


class ServedModel(NamedTuple):
    """The server's model, or its models together, as far as the page needs to know."""

    name: str = ""
    """Empty: unknown at present."""
    kinds: tuple[EditKind, ...] = ("inpaint",)
    """Kinds of edits that it makes."""
    native_resolution: int = 1024
    """Side in pixels of the square at which it works."""
    references: bool = False
    """Whether an edit without a mask follows an instruction; otherwise it has a strength."""
    most_pictures: int = 1
    """Most pictures that it sees, with the source."""


class Session:
    """Edits at one server, without sending pictures that it already has.

    Templates that the page alone registered are evicted when the page drops their pictures.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._templates: dict[str, Future[str]] = {}
        self._registered: set[str] = set()
        """Templates that only this page registered at the server."""
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(2, "register")

    def close(self) -> None:
        """Evict the templates that the page registered."""
        for name in list(self._templates):
            self.forget(name)
        self._pool.shutdown()

    def ready(self) -> bool:
        """Return True if a worker answers, even with an error other than overload."""
        try:
            return bool(self._client.control("status").get("model"))
        except (ServerUnavailable, Overloaded):
            return False
        except MaskserveError:
            return True

    def model(self) -> ServedModel:
        """Return the served model."""
        try:
            status = self._client.control("status")
        except MaskserveError:
            return ServedModel()
        return _served_model(status)

    def stop(self, request_id: str) -> None:
        """Cancel an edit; a finished one stays."""
        with suppress(MaskserveError):
            self._client.cancel(request_id)

    def prepare(self, source: PagePicture) -> None:
        """Register the picture at the server while the user paints the mask."""
        self._template(source)

    def forget(self, name: str) -> None:
        """Evict the template of a picture that the page has dropped."""
        with self._lock:
            registration = self._templates.pop(name, None)
        if registration is not None:
            self._pool.submit(self._evict, registration)

    def _evict(self, known: Future[str]) -> None:
        with suppress(MaskserveError):
            template = known.result()
            with self._lock:
                is_exclusive = template in self._registered
                self._registered.discard(template)
            if is_exclusive:
                self._client.control("evict", template_id=template)

    def _register(self, file: Path) -> str:
        listed: set[str] | None = None
        with suppress(MaskserveError):
            server_templates = self._client.control("templates")["templates"]
            listed = {record["template_id"] for record in server_templates if record["registered"]}
        template = self._client.register(file)
        if listed is not None and template not in listed:
            with self._lock:
                self._registered.add(template)
        return template

    def events(
        self,
        source: PagePicture | None,
        mask: Image.Image | None,
        prompt: str,
        settings: dict[str, Any],
        references: Sequence[PagePicture] = (),
    ) -> Generator[Event, None, None]:
        """Yield the events of one edit; without a source, of a picture from the prompt alone."""
        settings = {**settings, "keep_result": True}
        for retrying in (False, True):
            if source is not None:
                settings["template_id"] = self._template(source, anew=retrying).result()
            if references:
                templates = [self._template(picture, anew=retrying) for picture in references]
                settings["reference_ids"] = [template.result() for template in templates]
            try:
                with closing(self._client.edit_stream(None, mask, prompt, **settings)) as events:
                    yield from events
                return
            except TemplateNotFound:  # the server was restarted, or has dropped it
                if retrying:
                    raise

    def remember(self, picture: PagePicture, result: EditResult) -> None:
        """Remember a result as the template under which the server keeps it."""
        if result.result_template_id is not None:
            registration: Future[str] = Future()
            registration.set_result(result.result_template_id)
            with self._lock:
                self._templates[picture.name] = registration

    def _template(self, source: PagePicture, *, anew: bool = False) -> Future[str]:
        """Return the picture's template at the server, registering it if necessary."""
        with self._lock:
            registration = self._templates.get(source.name)
            failed = (
                registration is not None
                and registration.done()
                and registration.exception() is not None
            )
            if registration is None or failed or anew:
                registration = self._pool.submit(self._register, source.file)
                self._templates[source.name] = registration
        return registration


def _served_model(status: Mapping[str, Any]) -> ServedModel:
    """Return the model of a worker's status, or the models of a router's together."""
    records = [record for record in status.get("workers", {}).values() if record.get("served")]
    served = [record["served"] for record in records or [status] if record.get("served")]
    name = str(status.get("model", ""))
    if not served:
        return ServedModel(name)
    kinds = {kind for record in served for kind in record["edit_kinds"]}
    editors = [record for record in served if "edit" in record["edit_kinds"]]
    return ServedModel(
        name,
        tuple(kind for kind in EDIT_KINDS if kind in kinds),
        min(record["native_resolution"] for record in served),
        all(record["references"] for record in editors),
        max((record["most_pictures"] for record in editors), default=1),
    )
