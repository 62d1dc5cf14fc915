"""`maskserve web`: a page on which people paint a mask, say what is to be there, and watch it come.

The page is made of Gradio's components and a canvas of its own (`painter.js`): theirs draws by
WebGL, which takes seconds where there is no GPU, and its brush has soft rims. It is a client like
any other: it asks a worker or a router over gRPC, and holds no key or picture longer than its
session.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import hashlib
import html
import io
import json
import os
import secrets
import tempfile
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from maskserve_client import Client, EditResult, Event, Final, Preview, Progress
from maskserve_core.config import LimitsConfig
from maskserve_core.contracts.meta import STAGES
from maskserve_core.contracts.settings import CACHE_MODES
from maskserve_core.errors import Cancelled, InvalidRequest, MaskserveError, TemplateNotFound

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

_PREVIEWS = 6
"""Of one edit, at most."""
_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
_SEED_BITS = 32
_SHOWN_EVERY_S = 0.25
"""Progress that comes sooner is not shown: to show it takes from the cores that compute."""
_MOST_PICTURES = 64
"""Kept by the page, those of all people; the one that was not used for longest goes."""
_MOST_BYTES = LimitsConfig().max_image_bytes
_MOST_PIXELS = LimitsConfig().max_pixels
_CSS = """
.status progress { width: 100%; height: .6rem }
.status { min-height: 3.2rem }
.facts table { width: 100% }
.live img { width: 100% }
.painter .stack { position: relative; min-height: 16rem; border: 1px dashed #8888 }
.painter.ready .stack { border: 0; min-height: 0 }
.painter canvas { width: 100%; display: none; touch-action: none }
.painter.ready canvas { display: block }
.painter .paint { position: absolute; inset: 0; height: 100%; cursor: crosshair }
.painter .paint:focus-visible { outline: 2px solid #ff375f }
.painter .tools { display: flex; flex-wrap: wrap; gap: .6rem; align-items: center; margin: .4rem 0 }
.painter .tools button { border: 1px solid #8888; border-radius: .3rem; padding: .1rem .6rem }
.compare { position: relative }
.compare img { width: 100%; display: block; margin: 0 }
.compare .after { position: absolute; inset: 0; clip-path: inset(0 0 0 var(--at)) }
.compare input { position: absolute; bottom: .5rem; left: 2%; width: 96% }
"""
_PAINTER = """
<div class="painter">
  <div class="tools">
    <label>Picture: <input class="file" type="file" accept=".png,.jpg,.jpeg,.webp"></label>
    <label>Brush <input class="size" type="range" min="1" max="128" value="16"></label>
    <label><input class="erase" type="checkbox"> erase</label>
    <button type="button" class="undo">Undo stroke</button>
    <button type="button" class="clear">Clear</button>
  </div>
  <div class="stack">
    <canvas class="base"></canvas>
    <canvas class="paint" tabindex="0" role="application" aria-label="Mask: arrows move the pen,
 space puts it down and up, plus and minus change the brush, Control Z takes a stroke back,
 Delete clears"></canvas>
  </div>
  <div class="said" role="status">Choose, paste or drop a picture, then paint over what is to
 change.</div>
</div>
"""


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
    os.umask(0o077)  # what edits leave in files is nobody else's
    with connect() as client, tempfile.TemporaryDirectory(prefix="maskserve-page-") as folder:
        page = make_page(client, pictures, Path(folder).resolve())
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
            allowed_paths=[str(Path(folder).resolve()), *map(str, pictures)],
        )


def make_page(client: Client, pictures: list[Path], folder: Path) -> Any:
    """The page.

    Args:
        client: of the worker or router that does the edits.
        pictures: to begin with, beside those that people bring.
        folder: for the pictures of its sessions; the page serves its files.
    """
    import gradio as gr

    session, kept = _Session(client), _Pictures(folder)

    def take(encoded: str) -> dict[str, str]:
        """A picture that somebody brings, base64; where it is, or a sentence of what is wrong."""
        try:
            picture = kept.take(_decoded(encoded))
        except InvalidRequest as error:
            return {"error": error.message}
        session.prepare(picture)
        return picture.told()

    with gr.Blocks(title="maskserve", analytics_enabled=False, fill_width=True) as page:
        gr.Markdown("# maskserve\nPaint over what is to change, say what is to be there, and edit.")
        past, last = gr.State([]), gr.State("")
        request = gr.State(_fresh_id)  # of the next edit, and of the one under way
        with gr.Row():
            with gr.Column(scale=5):
                editor = gr.HTML(
                    html_template=_PAINTER,
                    js_on_load=(Path(__file__).with_name("painter.js")).read_text(encoding="utf-8"),
                    server_functions=[take],
                    apply_default_css=False,
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
                live = gr.HTML("", elem_classes="live", elem_id="live")
                shown = gr.HTML("", elem_id="result")
                facts = gr.Markdown("", elem_classes="facts", elem_id="facts")
                with gr.Row():
                    go_on = gr.Button("Go on with this picture", interactive=False)
                    undo = gr.Button("Undo", interactive=False, elem_id="undo")
                    file = gr.DownloadButton("Download", interactive=False, elem_id="download")

        asked = [
            editor,
            prompt,
            request,
            seed,
            draw,
            steps,
            guidance,
            dilate,
            feather,
            cache,
            loras,
        ]
        told = [facts, seed, file, go_on, last]
        outputs = [status, live, shown, request, *told]

        def edit(*given: Any) -> Iterator[Any]:
            """Shows an edit as it comes; its errors are sentences of the page."""
            painted, text, name, *rest = given
            try:
                source, mask = _source_and_mask(painted, kept)
                settings = {**_settings(*rest), "request_id": name}
                shown_at = 0.0
                with closing(session.events(source, mask, text or "", settings)) as events:
                    for event in events:
                        if isinstance(event, Final):
                            made = kept.take(event.result.encoded, event.result.image)
                            session.made(made, event.result)
                            # The picture first: what is told about it takes its time, too.
                            yield {status: _note("done"), live: "", shown: _compared(source, made)}
                            yield {**_facts(gr, event.result, made, told), request: _fresh_id()}
                        elif time.monotonic() - shown_at >= _SHOWN_EVERY_S:
                            values = {status: _progress(event)}
                            if isinstance(event, Preview):
                                values[live] = _preview(event.image)
                            yield values
                            shown_at = time.monotonic()
            except (MaskserveError, OSError) as error:
                said = _note("stopped") if isinstance(error, Cancelled) else _sentence(error)
                yield {status: said, live: "", request: _fresh_id()}

        # In the browser alone: the way to the server and back would hold the edit up.
        gr.on([run.click, prompt.submit], None, None, status, js=f"() => `{_note('sent')}`")
        gr.on([run.click, prompt.submit], edit, asked, outputs, show_progress="hidden")
        stop.click(session.stop, request, None, show_progress="hidden")

        def carry_on(painted: str | None, result: str, before: list[str]) -> Any:
            """The result becomes the picture to edit; the one before is kept."""
            earlier = [*before, json.loads(painted)["name"]][-8:] if painted else before
            return (
                json.dumps(kept.get(result).told()),
                earlier,
                gr.Button(interactive=bool(earlier)),
                gr.Button(interactive=False),
            )

        def go_back(before: list[str]) -> Any:
            """The picture before."""
            *rest, name = before
            return json.dumps(kept.get(name).told()), rest, gr.Button(interactive=bool(rest))

        go_on.click(carry_on, [editor, last, past], [editor, past, undo, go_on])
        undo.click(go_back, [past], [editor, past, undo])
        if pictures:

            def picked(event: Any) -> str:
                picture = kept.take(pictures[event.index].read_bytes())
                session.prepare(picture)
                return json.dumps(picture.told())

            picked.__annotations__["event"] = gr.SelectData  # which is how Gradio knows to give it
            gallery.select(picked, None, editor, show_progress="hidden")
    return page


class _Picture(NamedTuple):
    """One that the page has."""

    name: str
    """Digest of its pixels."""
    image: Image.Image
    """RGB."""
    file: Path

    @property
    def url(self) -> str:
        """Where a browser finds it, relative to the page."""
        return f"gradio_api/file={self.file}"

    def told(self) -> dict[str, str]:
        """What the canvas is told to show."""
        return {"name": self.name, "url": self.url}


class _Pictures:
    """The pictures of the page's sessions: sources and results.

    Args:
        folder: for their files.
        most: that are kept; the one that was not used for longest goes first.
    """

    def __init__(self, folder: Path, most: int = _MOST_PICTURES) -> None:
        self._folder, self._most = folder, most
        self._kept: OrderedDict[str, _Picture] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, encoded: bytes, image: Image.Image | None = None) -> _Picture:
        """Keep a picture.

        Args:
            encoded: PNG, JPEG or WebP.
            image: the same, if it is decoded already.

        Raises:
            InvalidRequest: it is none, or too large.
        """
        if image is None:
            encoded, image = _upright(encoded)
        name = hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()
        with self._lock:
            picture = self._kept.get(name)
            if picture is None:
                picture = _Picture(name, image, self._folder / f"{name}{_suffix(encoded)}")
                picture.file.write_bytes(encoded)
                self._kept[name] = picture
            self._kept.move_to_end(name)
            if len(self._kept) > self._most:
                _, gone = self._kept.popitem(last=False)
                gone.file.unlink(missing_ok=True)
        return picture

    def get(self, name: Any) -> _Picture:
        """Raises InvalidRequest: there is none of that name."""
        with self._lock:
            if not isinstance(name, str) or name not in self._kept:
                raise InvalidRequest("picture", "is not here any more", "upload or pick it again")
            self._kept.move_to_end(name)
            return self._kept[name]


class _Session:
    """Edits of one server; pictures that it has, results among them, need not be sent again."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._templates: dict[str, Future[str]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(2, "register")

    def stop(self, request_id: str) -> None:
        """Withdraw an edit; one that is done already is left."""
        with suppress(MaskserveError):
            self._client.cancel(request_id)

    def prepare(self, source: _Picture) -> None:
        """Have the server keep the picture while the mask is being painted."""
        self._template(source)

    def events(
        self, source: _Picture, mask: Image.Image, prompt: str, settings: dict[str, Any]
    ) -> Generator[Event, None, None]:
        """The events of one edit."""
        for again in (False, True):
            name = self._template(source, anew=again).result()
            more = {**settings, "template_id": name, "keep_result": True}
            try:
                with closing(self._client.edit_stream(None, mask, prompt, **more)) as events:
                    yield from events
                return
            except TemplateNotFound:  # the server was restarted, or has dropped it
                if again:
                    raise

    def made(self, picture: _Picture, result: EditResult) -> None:
        """An edit's picture: the server has it, to be gone on with."""
        if result.result_template_id is not None:
            known: Future[str] = Future()
            known.set_result(result.result_template_id)
            with self._lock:
                self._templates[picture.name] = known

    def _template(self, source: _Picture, *, anew: bool = False) -> Future[str]:
        """The template that the picture is at the server, or will be."""
        with self._lock:
            known = self._templates.get(source.name)
            failed = known is not None and known.done() and known.exception() is not None
            if known is None or failed or anew:
                known = self._pool.submit(self._client.register, source.file)
                self._templates[source.name] = known
        return known


def _fresh_id() -> str:
    return uuid.uuid4().hex


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise InvalidRequest("picture", "came broken", "a PNG, JPEG or WebP file") from None


def _upright(encoded: bytes) -> tuple[bytes, Image.Image]:
    """A file's picture as people see it, and a file of just that."""
    accepted = f"a PNG, JPEG or WebP file, up to {_MOST_BYTES >> 20} MB and {_MOST_PIXELS} pixels"
    if len(encoded) > _MOST_BYTES:
        raise InvalidRequest("picture", f"has {len(encoded)} bytes", accepted)
    try:
        with Image.open(io.BytesIO(encoded), formats=("PNG", "JPEG", "WEBP")) as opened:
            if opened.width * opened.height > _MOST_PIXELS:
                raise InvalidRequest("picture", "has too many pixels", accepted)
            plain = opened.mode == "RGB" and opened.getexif().get(0x0112, 1) == 1
            image = ImageOps.exif_transpose(opened).convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError):
        raise InvalidRequest("picture", "cannot be read", accepted) from None
    if not plain:
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=1)
        encoded = file.getvalue()
    return encoded, image


def _suffix(encoded: bytes) -> str:
    if encoded[:2] == b"\xff\xd8":
        return ".jpg"
    return ".webp" if encoded[:4] == b"RIFF" else ".png"


def _source_and_mask(painted: str | None, kept: _Pictures) -> tuple[_Picture, Image.Image]:
    """The picture, and white where something was painted.

    Args:
        painted: what the canvas told; see `painter.js`.
        kept: the page's pictures.

    Raises:
        InvalidRequest: there is no picture, or nothing was painted.
    """
    try:
        told = json.loads(painted or "{}")
        name, bits = told["name"], base64.b64decode(told.get("mask", ""), validate=True)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise InvalidRequest("picture", "there is none yet", "upload, paste or pick one") from None
    source = kept.get(name)
    width, height = source.image.size
    touched = np.unpackbits(np.frombuffer(bits, np.uint8))[: width * height]
    if not touched.any():
        raise InvalidRequest("mask", "is empty", "paint over what is to change")
    if len(bits) != -(-width * height // 8):
        raise InvalidRequest("mask", "is of another picture", "paint it again")
    return source, Image.fromarray(255 * touched.reshape(height, width))


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


def _facts(gr: Any, result: EditResult, made: _Picture, told: list[Any]) -> dict[Any, Any]:
    """What the page tells of an edit that is done, beside its picture."""
    facts, seed, file, go_on, last = told
    return {
        facts: summary(result.meta),
        seed: result.seed,
        file: gr.DownloadButton(value=str(made.file), interactive=True),
        go_on: gr.Button(interactive=True),
        last: made.name,
    }


def _compared(before: _Picture, after: _Picture) -> str:
    """Both pictures, the second one from a line on that people move."""
    return (
        '<div class="compare" style="--at: 0%">'
        f'<img alt="before" src="{html.escape(before.url)}">'
        f'<img class="after" alt="after" src="{html.escape(after.url)}">'
        '<input type="range" min="0" max="100" value="0" aria-label="from before to after" '
        "oninput=\"this.parentNode.style.setProperty('--at', this.value + '%')\"></div>"
    )


def _preview(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    text = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="as it comes" src="data:image/jpeg;base64,{text}">'


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
    # No links: the page shows what the folder holds, and nothing that one of its files names.
    found = [p for p in sorted(Path(folder).iterdir()) if p.suffix.lower() in _SUFFIXES]
    return [path.resolve() for path in found if path.is_file() and not path.is_symlink()][:64]


def _theme() -> Any:
    """Fonts of the reader's machine: nothing is fetched from elsewhere."""
    import gradio as gr

    return gr.themes.Default(
        font=[gr.themes.LocalFont("system-ui"), "sans-serif"],
        font_mono=[gr.themes.LocalFont("ui-monospace"), "monospace"],
    )
