"""`maskserve web`: a page on which people paint a mask, say what is to be there, and watch it come.

The page is made of Gradio's components. It is a client like any other: it asks a worker or a router
over gRPC, and holds no key or picture longer than its session.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import io
import os
import secrets
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from maskserve_client.client import Client
from maskserve_client.events import EditResult, Event, Final, Preview, Progress
from maskserve_core.contracts.meta import STAGES
from maskserve_core.contracts.settings import CACHE_MODES
from maskserve_core.errors import Cancelled, InvalidRequest, MaskserveError, TemplateNotFound

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

_PREVIEWS = 6
"""Of one edit, at most."""
_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
_SEED_BITS = 32
_CSS = """
.status progress { width: 100%; height: .6rem }
.status { min-height: 3.2rem }
.facts table { width: 100% }
"""
Painted = Mapping[str, Any]
"""What the editor gives: `background`, and `layers` of what was painted on it."""


def serve_page(options: argparse.Namespace, connect: Callable[[], Client]) -> None:
    """`maskserve web`: serves the page until it is interrupted.

    Raises:
        InvalidRequest: Gradio is not installed, or `--images` is no folder.
    """
    try:
        import gradio  # noqa: F401  # the extra `web` brings it
    except ImportError:
        needed = "pip install 'maskserve[web]'"
        raise InvalidRequest("web", "Gradio is not installed", needed) from None
    pictures = _pictures(options.images)
    with connect() as client:
        page = make_page(client, pictures)
        print(f"the page is at http://{options.host}:{options.port}  (Ctrl-C ends it)", flush=True)
        page.queue(default_concurrency_limit=options.edits).launch(
            server_name=options.host,
            server_port=options.port,
            quiet=True,
            show_error=True,
            share=False,
            footer_links=[],
            ssr_mode=False,
            css=_CSS,
            theme=_theme(),
            max_file_size="64mb",
            allowed_paths=[str(path) for path in pictures],
        )


def make_page(client: Client, pictures: list[Path]) -> Any:
    """The page.

    Args:
        client: of the worker or router that does the edits.
        pictures: to begin with, beside those that people bring.
    """
    import gradio as gr

    session = _Session(client)
    with gr.Blocks(title="maskserve", analytics_enabled=False, fill_width=True) as page:
        gr.Markdown("# maskserve\nPaint over what is to change, say what is to be there, and edit.")
        past, request = gr.State([]), gr.State("")
        with gr.Row():
            with gr.Column(scale=5):
                editor = gr.ImageEditor(
                    label="Picture: paint what is to change",
                    type="pil",
                    format="png",
                    sources=("upload", "clipboard"),
                    transforms=(),
                    layers=False,
                    brush=gr.Brush(colors=["#ff375fb0"], color_mode="fixed"),
                    height=520,
                    elem_id="editor",
                )
                if pictures:
                    gallery = gr.Gallery(
                        [str(path) for path in pictures],
                        label="Or begin with one of these",
                        columns=8,
                        height=140,
                        allow_preview=False,
                        interactive=False,
                        elem_id="pictures",
                    )
                prompt = gr.Textbox(
                    label="What is to be there", placeholder="a red star", elem_id="prompt"
                )
                with gr.Row():
                    run = gr.Button("Edit", variant="primary", elem_id="run")
                    stop = gr.Button("Stop", variant="stop", elem_id="stop")
                with gr.Accordion("More", open=False):
                    with gr.Row():
                        seed = gr.Number(label="Seed", value=0, precision=0, minimum=0)
                        draw = gr.Checkbox(label="A new seed for each edit", value=True)
                    with gr.Row():
                        steps = gr.Number(label="Steps (0: the model's own)", value=0, precision=0)
                        guidance = gr.Number(label="Guidance (0: the model's own)", value=0)
                    with gr.Row():
                        dilate = gr.Slider(0, 64, 0, step=1, label="Grow the mask (pixels)")
                        feather = gr.Slider(0, 64, 0, step=1, label="Soft rim (pixels)")
                    with gr.Row():
                        cache = gr.Dropdown(list(CACHE_MODES), value="auto", label="Cache")
                        loras = gr.Textbox(label="LoRAs", placeholder="hollow:0.8, other")
            with gr.Column(scale=4):
                status = gr.HTML("", elem_classes="status", elem_id="status")
                live = gr.Image(
                    label="As it comes", visible=False, format="png", elem_id="live", buttons=[]
                )
                shown = gr.ImageSlider(
                    label="Before and after", format="png", elem_id="result", max_height=520
                )
                facts = gr.Markdown("", elem_classes="facts", elem_id="facts")
                with gr.Row():
                    go_on = gr.Button("Go on with this picture", interactive=False)
                    undo = gr.Button("Undo", interactive=False, elem_id="undo")
                    file = gr.DownloadButton("Download", interactive=False, elem_id="download")

        asked = [editor, prompt, seed, draw, steps, guidance, dilate, feather, cache, loras]
        told = [status, live, shown, facts, seed, file, go_on, request]

        def edit(*given: Any) -> Iterator[Any]:
            """Shows an edit as it comes; its errors are sentences of the page."""
            painted, text, *rest = given
            values: dict[Any, Any] = {}
            try:
                source, mask = _source_and_mask(painted)
                settings = {**_settings(*rest), "request_id": uuid.uuid4().hex}
                yield {status: _note("sent"), request: settings["request_id"]}
                with closing(session.events(source, mask, text or "", settings)) as events:
                    for event in events:
                        if isinstance(event, Final):
                            session.made(event.result)
                            values = _final(gr, event.result, source, told)
                        elif isinstance(event, Preview):
                            values = {
                                status: _progress(event),
                                live: gr.Image(event.image, visible=True),
                            }
                        else:
                            values = {status: _progress(event)}
                        yield values
            except (MaskserveError, OSError) as error:
                said = _note("stopped") if isinstance(error, Cancelled) else _sentence(error)
                yield {status: said, live: gr.Image(visible=False)}

        gr.on([run.click, prompt.submit], edit, asked, told, show_progress="hidden")
        stop.click(session.stop, request, None, show_progress="hidden")

        def carry_on(painted: Painted, result: Any, before: list[Any]) -> Any:
            """The result becomes the picture to edit; the one before is kept."""
            kept = [*before, painted["background"]][-8:]
            picture = Image.open(result[1]) if isinstance(result[1], str) else result[1]
            return (
                _unpainted(picture),
                kept,
                gr.Button(interactive=True),
                gr.Button(interactive=False),
            )

        def go_back(before: list[Any]) -> Any:
            """The picture before."""
            *rest, last = before
            return _unpainted(last), rest, gr.Button(interactive=bool(rest))

        go_on.click(carry_on, [editor, shown, past], [editor, past, undo, go_on])
        undo.click(go_back, [past], [editor, past, undo])
        if pictures:

            def picked(event: Any) -> Any:
                picture = Image.open(pictures[event.index]).convert("RGB")
                return _unpainted(picture)

            picked.__annotations__["event"] = gr.SelectData  # which is how Gradio knows to give it
            gallery.select(picked, None, editor)
    return page


class _Session:
    """Edits of one server; pictures that it has, results among them, need not be sent again."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._templates: dict[str, str] = {}

    def stop(self, request_id: str) -> None:
        """Withdraw an edit; one that is done already is left."""
        with suppress(MaskserveError):
            self._client.cancel(request_id)

    def events(
        self, source: Image.Image, mask: Image.Image, prompt: str, settings: dict[str, Any]
    ) -> Generator[Event, None, None]:
        """The events of one edit; the first of a picture that was uploaded registers it."""
        name = _name(source)
        for again in (False, True):
            if name not in self._templates or again:
                self._templates[name] = self._client.register(source)
            more = {**settings, "template_id": self._templates[name], "keep_result": True}
            try:
                with closing(self._client.edit_stream(None, mask, prompt, **more)) as events:
                    yield from events
                return
            except TemplateNotFound:  # the server was restarted, or has dropped it
                if again:
                    raise

    def made(self, result: EditResult) -> None:
        """An edit's picture: the server has it, to be gone on with."""
        if result.result_template_id is not None:
            self._templates[_name(result.image)] = result.result_template_id


def _name(picture: Image.Image) -> str:
    """Digest of an RGB picture's pixels."""
    return hashlib.sha256(repr(picture.size).encode() + picture.tobytes()).hexdigest()


def _unpainted(picture: Image.Image) -> dict[str, Any]:
    """As the editor takes it."""
    return {"background": picture, "layers": [], "composite": None}


def _source_and_mask(painted: Painted | None) -> tuple[Image.Image, Image.Image]:
    """The picture, and white where something was painted.

    Raises:
        InvalidRequest: there is no picture, or nothing was painted.
    """
    background = painted["background"] if painted else None
    if background is None:
        raise InvalidRequest("picture", "there is none yet", "upload, paste or pick one")
    source = background.convert("RGB")
    touched = np.zeros(source.size[::-1], bool)
    for layer in painted["layers"] if painted else ():
        if layer.size != source.size:
            layer = layer.resize(source.size, Image.Resampling.NEAREST)
        touched |= np.asarray(layer.convert("RGBA"))[..., 3] > 0
    if not touched.any():
        raise InvalidRequest("mask", "is empty", "paint over what is to change")
    return source, Image.fromarray(np.where(touched, 255, 0).astype(np.uint8))


def _settings(
    seed: float | None,
    draw: bool,
    steps: float | None,
    guidance: float | None,
    dilate: int,
    feather: int,
    cache: str,
    loras: str | None,
) -> dict[str, Any]:
    """SETTINGS of an edit; what is left at the model's own is not sent."""
    asked: dict[str, Any] = {
        "seed": secrets.randbits(_SEED_BITS) if draw or seed is None else int(seed),
        "mask_dilate": int(dilate),
        "mask_feather": int(feather),
        "cache": cache,
        "preview_every": max(1, int(steps or 28) // _PREVIEWS),
    }
    if steps:
        asked["num_inference_steps"] = int(steps)
    if guidance:
        asked["guidance_scale"] = float(guidance)
    named = [part.strip() for part in (loras or "").split(",") if part.strip()]
    if named:
        asked["loras"] = [_lora(text) for text in named]
    return asked


def _lora(text: str) -> dict[str, Any]:
    name, colon, scale = text.partition(":")
    try:
        return {"name": name, "scale": float(scale)} if colon else {"name": name}
    except ValueError:
        raise InvalidRequest("LoRAs", f"{scale!r} is no number", "NAME or NAME:SCALE") from None


def _final(gr: Any, result: EditResult, source: Image.Image, told: list[Any]) -> dict[Any, Any]:
    """What the page shows of an edit that is done."""
    status, live, shown, facts, seed, file, go_on, _ = told
    with tempfile.NamedTemporaryFile(prefix="edit-", suffix=".png", delete=False) as kept:
        kept.write(result.encoded)
    return {
        status: _note("done"),
        live: gr.Image(visible=False),
        shown: (source, Image.open(io.BytesIO(result.encoded))),
        facts: summary(result.meta),
        seed: result.seed,
        file: gr.DownloadButton(value=kept.name, interactive=True),
        go_on: gr.Button(interactive=True),
    }


def summary(meta: Mapping[str, Any]) -> str:
    """What an edit took and what the cache saved, as Markdown."""
    timings = meta.get("timings_ms", {})
    total = sum(timings.get(stage, 0.0) for stage in STAGES) / 1e3
    computed, whole = meta.get("computed_tokens"), meta.get("total_tokens", 0) * meta["steps"]
    said = {
        "hit": "the picture's activations were there",
        "miss": "the picture's activations are being made for the next edit",
        "off": "not used",
    }.get(str(meta.get("cache")), str(meta.get("cache")))
    lines = [
        f"**{total:.2f} s**, {meta['steps']} steps, seed `{meta['seed']}`, worker {meta['worker']}",
        "",
        f"Cache: {said}.",
    ]
    if computed is not None and whole:
        lines[-1] += f" {computed / whole:.0%} of the tokens were computed."
    rows = [f"| {stage} | {timings[stage]:.0f} |" for stage in STAGES if stage in timings]
    return "\n".join([*lines, "", "| stage | ms |", "|---|---:|", *rows])


def _progress(event: Progress | Preview) -> str:
    return (
        f'<p role="status">step {event.step} of {event.steps}</p>'
        f'<progress value="{event.step}" max="{event.steps}"></progress>'
    )


def _note(text: str) -> str:
    return f'<p role="status">{html.escape(text)}</p>'


def _sentence(error: Exception) -> str:
    """An error without its code, as people read it."""
    text = error.message if isinstance(error, MaskserveError) else str(error)
    return f'<p role="alert"><strong>That did not work.</strong> {html.escape(text)}</p>'


def _pictures(folder: str | None) -> list[Path]:
    if folder is None:
        return []
    if not Path(folder).is_dir():
        raise InvalidRequest("--images", f"there is no folder {folder}", "an existing folder")
    found = [p for p in sorted(Path(folder).iterdir()) if p.suffix.lower() in _SUFFIXES]
    return [path.resolve() for path in found][:64]


def _theme() -> Any:
    """Fonts of the reader's machine: nothing is fetched from elsewhere."""
    import gradio as gr

    return gr.themes.Default(
        font=[gr.themes.LocalFont("system-ui"), "sans-serif"],
        font_mono=[gr.themes.LocalFont("ui-monospace"), "monospace"],
    )
