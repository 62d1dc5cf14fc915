"""The page's edits at one server."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from PIL import Image

from maskserve_client import Client, EditResult, Event
from maskserve_client.errors import ServerUnavailable
from maskserve_common.errors import MaskserveError, Overloaded, TemplateNotFound
from maskserve_page.pictures import PagePicture


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

    def model(self) -> str:
        """Return the name of the served model; empty: unknown at present."""
        try:
            return str(self._client.control("status").get("model", ""))
        except MaskserveError:
            return ""

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
        self, source: PagePicture, mask: Image.Image, prompt: str, settings: dict[str, Any]
    ) -> Generator[Event, None, None]:
        """Yield the events of one edit."""
        for retrying in (False, True):
            name = self._template(source, anew=retrying).result()
            more = {**settings, "template_id": name, "keep_result": True}
            try:
                with closing(self._client.edit_stream(None, mask, prompt, **more)) as events:
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
