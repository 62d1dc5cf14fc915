"""`maskserve web`: a page to paint a mask, enter a prompt and watch the edit.

It is a client of a worker or router over gRPC, and holds keys and pictures only for its session.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from maskserve_client import Client, Masks
from maskserve_common.errors import InvalidRequest
from maskserve_common.niceness import Niceness, give_way
from maskserve_page.page import make_page
from maskserve_page.pictures import LIMITS, PagePictures, pictures_in
from maskserve_page.same_origin import SameOrigin
from maskserve_page.session import Session

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

_POLL_S = 1.0
_MOST_BODY = LIMITS.max_image_bytes * 4 // 3 + 2**20
"""Most bytes of a request: a picture as base64."""


def serve_page(
    options: argparse.Namespace, connect: Callable[[], Client], masks: Masks | None
) -> None:
    """Serve the page until it is interrupted.

    Args:
        options: options of the command.
        connect: connects to the server.
        masks: finds the mask of a clicked thing; None: masks are only painted.

    Raises:
        InvalidRequest: Gradio is not installed, or `--images` is not a folder.
    """
    try:
        import gradio  # in the extra `web`
    except ImportError:
        install_command = "pip install -e '.[web]' in the checkout"
        raise InvalidRequest("web", "Gradio is not installed", install_command) from None
    import uvicorn
    from fastapi import FastAPI

    pictures = pictures_in(options.images)
    give_way(Niceness.PAGE)
    with (
        connect() as client,
        tempfile.TemporaryDirectory(prefix="maskserve-page-") as folder,
        closing(Session(client)) as session,
    ):
        _await(session, options.url)
        page_pictures = PagePictures(Path(folder).resolve(), on_evict=session.forget)
        page = make_page(session, page_pictures, pictures, masks)
        page.queue(default_concurrency_limit=options.edits)
        app = gradio.mount_gradio_app(
            FastAPI(docs_url=None, redoc_url=None, openapi_url=None),
            page,
            path="",
            server_name=options.host,
            server_port=options.port,
            show_error=True,
            footer_links=[],
            ssr_mode=False,
            css=Path(__file__).with_name("page.css").read_text(encoding="utf-8"),
            theme=_theme(),
            allowed_paths=[str(Path(folder).resolve()), *map(str, pictures)],
        )
        # Not by Gradio's own parameter, which warns if the page is mounted at the root.
        page.favicon_path = str(Path(__file__).with_name("icon.svg"))
        print(f"the page is at http://{options.host}:{options.port}  (Ctrl-C ends it)", flush=True)
        logging.getLogger("uvicorn.error").addFilter(_is_worth_logging)
        with page_pictures.tidy_regularly():
            uvicorn.run(
                SameOrigin(app, _MOST_BODY, options.name),
                host=options.host,
                port=options.port,
                log_level="warning",
                timeout_graceful_shutdown=3,
            )


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Whether a record is to be logged: no stack of a stream that an open tab listens to, which is
    cut when the page ends.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _await(session: Session, url: str) -> None:
    """Wait until the server at `url` is ready: the page depends on its model."""
    if not session.ready():
        print(f"waiting for the server at {url}", flush=True)
        while not session.ready():
            time.sleep(_POLL_S)


def _theme() -> Any:
    """Return a theme with fonts of the reader's machine, so that none are fetched, and buttons dark
    enough for their white words (WCAG: a contrast of 4.5).
    """
    import gradio as gr

    red = gr.themes.colors.red
    fills = {
        "primary_background_fill": "*primary_700",
        "primary_background_fill_hover": "*primary_800",
        "cancel_background_fill": red.c700,
        "cancel_background_fill_hover": red.c800,
    }
    return gr.themes.Default(
        font=[gr.themes.Font("system-ui"), gr.themes.Font("sans-serif")],
        font_mono=[gr.themes.Font("ui-monospace"), gr.themes.Font("monospace")],
    ).set(
        **{f"button_{name}{mode}": fill for name, fill in fills.items() for mode in ("", "_dark")}
    )
