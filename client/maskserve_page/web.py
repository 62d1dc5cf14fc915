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
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from maskserve_client import Client, EditResult, Event, Final, Preview, Progress
from maskserve_core.config import LimitsConfig
from maskserve_core.contracts.meta import STAGES
from maskserve_core.contracts.settings import CACHE_MODES
from maskserve_core.errors import Cancelled, InvalidRequest, MaskserveError, TemplateNotFound
from maskserve_core.imaging.images import Size, read_size
from maskserve_page.same_origin import SameOrigin

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

_PREVIEWS = 6
"""Of one edit, at most."""
_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
_SEED_BITS = 32
_SHOWN_EVERY_S = 0.25
"""Progress that comes sooner is not shown: to show it takes from the cores that compute."""
_MOST_PICTURES = 64
"""Kept by the page, those of all people; the one that was not used for longest goes."""
_MOST_KEPT_BYTES = 256 * 2**20
"""Of their files, which is all that is kept: nothing is decoded here."""
_EXPIRES_S = 3600.0
"""After its last use a picture goes, here and at the server."""
_TIDIED_EVERY_S = 60.0
_LIMITS = LimitsConfig()
_MOST_BODY = _LIMITS.max_image_bytes * 4 // 3 + 2**20
"""Bytes of a request: a picture as base64."""
_WORDS = {
    "demo": (
        "a red star",
        "a blue circle",
        "a green square",
        "a yellow triangle",
        "a pink heart",
        "a purple cross",
    )
}
"""What models that know few words can paint, by their names."""
_LEAST = {"demo": 0.02}
"""Share of a picture below which a mask is too small for such a model to show much."""
_CSS = """
.gradio-container, .gradio-container .fillable { width: 100%; max-width: 1500px; margin: auto }
.outcome { gap: .5rem }
.head h1 { display: inline; margin-right: .6rem; font-size: 1.4rem }
.head p { display: inline; opacity: .75 }
.status progress { width: 100%; height: .5rem }
.facts { font-size: .9rem }
.facts details { margin-top: .3rem }
.facts table { border-collapse: collapse; margin-top: .3rem }
.facts td { padding: .1rem .8rem .1rem 0; border: 0 }
.facts td + td { text-align: right; font-variant-numeric: tabular-nums }
.live img { width: 100%; border-radius: .4rem }
.painter .stack { position: relative; min-height: 16rem; border: 2px dashed #8886;
  border-radius: .4rem; display: flex; align-items: center; justify-content: center }
.painter .invite { opacity: .75; padding: 1rem; text-align: center }
.painter.ready .stack { border: 0; min-height: 0; display: block }
.painter.ready .invite { display: none }
.painter canvas { width: 100%; display: none; touch-action: none; border-radius: .4rem }
.painter.ready canvas { display: block }
.painter .paint { position: absolute; inset: 0; height: 100%; cursor: crosshair }
.painter .paint:focus-visible { outline: 2px solid #ff375f }
.painter .tools { display: flex; flex-wrap: wrap; gap: .4rem .6rem; align-items: center;
  margin-top: .5rem }
.painter .tools > * { white-space: nowrap }
.painter .tools button, .painter .choose { border: 1px solid #8888; border-radius: .3rem;
  padding: .25rem .6rem; cursor: pointer }
.painter .tools button:hover, .painter .choose:hover { background: #8882 }
.painter .choose:focus-within { outline: 2px solid #ff375f }
.painter .file { position: absolute; width: 1px; height: 1px; opacity: 0 }
.painter .brush { display: flex; align-items: center; gap: .4rem; flex: 1 1 7rem }
.painter .size { flex: 1; min-width: 4rem; max-width: 12rem }
.painter .said { font-size: .85rem; opacity: .8; margin-top: .2rem; min-height: 1.3em }
.caption { font-size: .85rem; opacity: .75 }
.chips { gap: .3rem; flex-wrap: wrap }
.chips button { flex: 0 0 auto; min-width: 0; border-radius: 1rem; font-weight: 400 }
.ask { align-items: end }
#pictures, #pictures .grid-wrap { height: auto; min-height: 0 }
#done button, #done a { font-size: .9rem; font-weight: 500; padding: .4rem .6rem }
#live:not(:has(img)), #result:not(:has(img)), #status:not(:has(p)) { display: none }
#pictures .grid-container { grid-template-columns: repeat(auto-fill, minmax(5.2rem, 1fr)) }
.compare { position: relative; border-radius: .4rem; overflow: hidden }
.compare img { width: 100%; display: block; margin: 0; user-select: none }
.compare .after { position: absolute; inset: 0; clip-path: inset(0 0 0 var(--at)) }
.compare span { position: absolute; top: .5rem; padding: .1rem .5rem; border-radius: 1rem;
  background: #000a; color: #fff; font-size: .8rem; pointer-events: none }
.compare .was { left: .5rem }
.compare .is { right: .5rem }
.compare .line { top: 0; bottom: 0; left: var(--at); width: 3px; margin-left: -1.5px; padding: 0;
  border-radius: 0; background: #fff; box-shadow: 0 0 3px #000a }
.compare .line::after { content: "\\2194"; position: absolute; top: 50%; left: 50%;
  transform: translate(-50%, -50%); width: 2rem; height: 2rem; line-height: 2rem;
  text-align: center; border-radius: 50%; background: #fff; color: #222;
  box-shadow: 0 0 4px #0008 }
.compare input { position: absolute; inset: 0; width: 100%; height: 100%; margin: 0; opacity: 0;
  cursor: ew-resize }
.compare input:focus-visible + .line { outline: 2px solid #ff375f }
"""
_PAINTER = """
<div class="painter" data-least="{least}">
  <div class="stack">
    <div class="invite">Choose, paste or drop a picture, then paint over what is to change.</div>
    <canvas class="base"></canvas>
    <canvas class="paint" tabindex="0" role="application" aria-label="Mask: arrows move the pen,
 space puts it down and up, plus and minus change the brush, Control Z takes a stroke back,
 Delete clears"></canvas>
  </div>
  <div class="tools">
    <label class="choose">Choose a picture
      <input class="file" type="file" accept=".png,.jpg,.jpeg,.webp"></label>
    <label class="brush">Brush <input class="size" type="range" min="1" max="128"
      value="16"></label>
    <label><input class="erase" type="checkbox"> erase</label>
    <button type="button" class="undo">Undo stroke</button>
    <button type="button" class="clear">Clear</button>
  </div>
  <div class="said" role="status"></div>
</div>
"""


def serve_page(options: argparse.Namespace, connect: Callable[[], Client]) -> None:
    """`maskserve web`: serves the page until it is interrupted.

    Raises:
        InvalidRequest: Gradio is not installed, or `--images` is no folder.
    """
    try:
        import gradio  # the extra `web` brings it
    except ImportError:
        needed = "pip install 'maskserve[web]'"
        raise InvalidRequest("web", "Gradio is not installed", needed) from None
    import uvicorn
    from fastapi import FastAPI

    pictures = _pictures(options.images)
    with (
        connect() as client,
        tempfile.TemporaryDirectory(prefix="maskserve-page-") as folder,
        closing(_Session(client)) as session,
    ):
        kept = _Pictures(Path(folder).resolve(), gone=session.forget)
        page = make_page(session, kept, pictures)
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
            css=_CSS,
            theme=_theme(),
            allowed_paths=[str(Path(folder).resolve()), *map(str, pictures)],
        )
        print(f"the page is at http://{options.host}:{options.port}  (Ctrl-C ends it)", flush=True)
        with kept.tidied():
            uvicorn.run(
                SameOrigin(app, _MOST_BODY),
                host=options.host,
                port=options.port,
                log_level="warning",
                timeout_graceful_shutdown=3,
            )


def make_page(session: _Session, kept: _Pictures, pictures: list[Path]) -> Any:
    """The page.

    Args:
        session: with the worker or router that does the edits.
        kept: pictures of those who use the page.
        pictures: to begin with, beside those that people bring.
    """
    import gradio as gr

    model = session.model()

    def take(encoded: str) -> dict[str, str]:
        """A picture that somebody brings, base64; where it is, or a sentence of what is wrong."""
        try:
            picture = kept.take(_decoded(encoded))
        except InvalidRequest as error:
            return {"error": error.message}
        session.prepare(picture)
        return picture.told()

    with gr.Blocks(
        title="maskserve",
        analytics_enabled=False,
        fill_width=True,
        delete_cache=(600, int(_EXPIRES_S)),
    ) as page:
        gr.HTML(
            "<h1>maskserve</h1> <p>Paint over what is to change, say what is to be there, and edit."
            "</p>",
            elem_classes="head",
        )
        past, last = gr.State([]), gr.State("")
        request = gr.State(_fresh_id)  # of the next edit, and of the one under way
        with gr.Row():
            with gr.Column(scale=5):
                editor = gr.HTML(
                    html_template=_PAINTER.replace("{least}", str(_LEAST.get(model, 0))),
                    js_on_load=(Path(__file__).with_name("painter.js")).read_text(encoding="utf-8"),
                    server_functions=[take],
                    apply_default_css=False,
                    padding=False,
                    elem_id="editor",
                )
                with gr.Row(elem_classes="ask"):
                    prompt = gr.Textbox(
                        label="What is to be there",
                        placeholder="a red star",
                        elem_id="prompt",
                        scale=4,
                        min_width=200,
                    )
                    run = gr.Button("Edit", variant="primary", elem_id="run", min_width=100)
                    stop = gr.Button(
                        "Stop", variant="stop", elem_id="stop", visible=False, min_width=100
                    )
                if model in _WORDS:
                    with gr.Row(elem_classes="chips", elem_id="chips"):
                        for words in _WORDS[model]:
                            chip = gr.Button(words, size="sm")
                            chip.click(None, None, prompt, js=f"() => {json.dumps(words)}")
                if pictures:
                    gr.HTML("Or begin with one of these", elem_classes="caption", padding=False)
                    gallery = gr.Gallery(
                        [str(path) for path in pictures],
                        show_label=False,
                        container=False,
                        columns=8,
                        allow_preview=False,
                        interactive=False,
                        buttons=[],
                        elem_id="pictures",
                    )
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
            with gr.Column(scale=4, elem_classes="outcome"):
                status = gr.HTML("", elem_classes="status", elem_id="status", padding=False)
                live = gr.HTML("", elem_classes="live", elem_id="live", padding=False)
                shown = gr.HTML("", elem_id="result", padding=False)
                with gr.Row(visible=False, elem_id="done") as bar:
                    go_on = gr.Button("Go on with this picture", min_width=210)
                    undo = gr.Button("Undo", interactive=False, elem_id="undo", min_width=80)
                    file = gr.DownloadButton("Download", elem_id="download", min_width=100)
                facts = gr.HTML("", elem_classes="facts", elem_id="facts", padding=False)

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
        outputs = [status, live, shown, request, run, stop, bar, *told]

        def buttons(*, running: bool) -> dict[Any, Any]:
            """Stop stands where Edit does, while there is something to stop."""
            return {run: gr.Button(visible=not running), stop: gr.Button(visible=running)}

        def edit(*given: Any) -> Iterator[Any]:
            """Shows an edit as it comes; its errors are sentences of the page."""
            painted, text, name, *rest = given
            try:
                source, mask = _source_and_mask(painted, kept)
                settings = {**_settings(*rest), "request_id": name}
                yield buttons(running=True)
                shown_at = 0.0
                with closing(session.events(source, mask, text or "", settings)) as events:
                    for event in events:
                        if isinstance(event, Final):
                            made = kept.take(event.result.encoded)
                            session.made(made, event.result)
                            # The picture first: what is told about it takes its time, too.
                            yield {
                                **buttons(running=False),
                                status: _note("done", event.result.meta.get("warnings", ())),
                                live: "",
                                shown: _compared(source, made, mask),
                                bar: gr.Row(visible=True),
                            }
                            yield {**_facts(gr, event.result, made, told), request: _fresh_id()}
                        elif time.monotonic() - shown_at >= _SHOWN_EVERY_S:
                            values = {status: _progress(event)}
                            if isinstance(event, Preview):
                                values |= {live: _preview(event.image), shown: ""}
                            yield values
                            shown_at = time.monotonic()
            except (MaskserveError, OSError) as error:
                said = _note("stopped") if isinstance(error, Cancelled) else _sentence(error)
                yield {**buttons(running=False), status: said, live: "", request: _fresh_id()}

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
    """One that the page has, as it came."""

    name: str
    """Digest of its file."""
    size: Size
    """(height, width), upright."""
    file: Path
    nbytes: int

    @property
    def url(self) -> str:
        """Where a browser finds it, relative to the page."""
        return f"gradio_api/file={self.file}"

    def told(self) -> dict[str, str]:
        """What the canvas is told to show."""
        return {"name": self.name, "url": self.url}


class _Pictures:
    """The pictures of the page's sessions: sources and results, in files. None is decoded: browsers
    show them and the server edits them; what is read here is the size, in the header.

    Args:
        folder: for their files.
        most: that are kept; the one that was not used for longest goes first.
        most_bytes: likewise, of their files.
        expires_s: after its last use a picture goes.
        gone: told the name of each that goes.
        now: a clock.
    """

    def __init__(
        self,
        folder: Path,
        most: int = _MOST_PICTURES,
        most_bytes: int = _MOST_KEPT_BYTES,
        expires_s: float = _EXPIRES_S,
        gone: Callable[[str], None] = lambda name: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._most, self._most_bytes = folder, most, most_bytes
        self._expires_s, self._gone, self._now = expires_s, gone, now
        self._kept: OrderedDict[str, tuple[_Picture, float]] = OrderedDict()
        """With the time of its last use."""
        self._lock = threading.Lock()

    def take(self, encoded: bytes) -> _Picture:
        """Keep a picture: PNG, JPEG or WebP.

        Raises:
            InvalidRequest: it is none, or too large.
        """
        size = read_size(encoded, "picture", _LIMITS)
        name = hashlib.sha256(encoded).hexdigest()
        with self._lock:
            if name not in self._kept:
                file = self._folder / f"{name}{_suffix(encoded)}"
                file.write_bytes(encoded)
                picture = _Picture(name, size, file, len(encoded))
            else:
                picture, _ = self._kept[name]
            self._use(picture)
        self.tidy()
        return picture

    def get(self, name: Any) -> _Picture:
        """Raises InvalidRequest: there is none of that name."""
        self.tidy()
        with self._lock:
            if not isinstance(name, str) or name not in self._kept:
                raise InvalidRequest("picture", "is not here any more", "upload or pick it again")
            picture, _ = self._kept[name]
            self._use(picture)
        return picture

    def tidy(self) -> None:
        """Let go what is too old, or too much."""
        while (name := self._let_go()) is not None:
            self._gone(name)

    @contextmanager
    def tidied(self) -> Iterator[None]:
        """Tidy from time to time, used or not."""
        ended = threading.Event()

        def tidy() -> None:
            while not ended.wait(_TIDIED_EVERY_S):
                self.tidy()

        threading.Thread(target=tidy, name="tidy", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _use(self, picture: _Picture) -> None:
        self._kept[picture.name] = picture, self._now()
        self._kept.move_to_end(picture.name)

    def _let_go(self) -> str | None:
        """The name of one that went; None: all may stay."""
        with self._lock:
            kept = [picture for picture, _ in self._kept.values()]
            much = len(kept) > self._most or sum(p.nbytes for p in kept) > self._most_bytes
            if not kept:
                return None
            picture, used = self._kept[kept[0].name]
            if not (much and len(kept) > 1) and self._now() - used < self._expires_s:
                return None
            del self._kept[picture.name]
            picture.file.unlink(missing_ok=True)
            return picture.name


class _Session:
    """Edits of one server; pictures that it has, results among them, need not be sent again.

    What the page registers there, and nobody has before, goes again with the page's own picture.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._templates: dict[str, Future[str]] = {}
        self._own: set[str] = set()
        """Templates that are at the server by this page alone."""
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(2, "register")

    def close(self) -> None:
        """Take back what was registered."""
        for name in list(self._templates):
            self.forget(name)
        self._pool.shutdown()

    def model(self) -> str:
        """Name of the served model; empty where that cannot be known now."""
        try:
            return str(self._client.control("status").get("model", ""))
        except MaskserveError:
            return ""

    def stop(self, request_id: str) -> None:
        """Withdraw an edit; one that is done already is left."""
        with suppress(MaskserveError):
            self._client.cancel(request_id)

    def prepare(self, source: _Picture) -> None:
        """Have the server keep the picture while the mask is being painted."""
        self._template(source)

    def forget(self, name: str) -> None:
        """The page's picture has gone."""
        with self._lock:
            known = self._templates.pop(name, None)
        if known is not None:
            self._pool.submit(self._evict, known)

    def _evict(self, known: Future[str]) -> None:
        with suppress(MaskserveError):
            template = known.result()
            with self._lock:
                own = template in self._own
                self._own.discard(template)
            if own:
                self._client.control("evict", template_id=template)

    def _register(self, file: Path) -> str:
        listed: set[str] | None = None
        with suppress(MaskserveError):
            found = self._client.control("templates")["templates"]
            listed = {each["template_id"] for each in found if each["registered"]}
        template = self._client.register(file)
        if listed is not None and template not in listed:
            with self._lock:
                self._own.add(template)
        return template

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
                known = self._pool.submit(self._register, source.file)
                self._templates[source.name] = known
        return known


def _fresh_id() -> str:
    return uuid.uuid4().hex


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise InvalidRequest("picture", "came broken", "a PNG, JPEG or WebP file") from None


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
    height, width = source.size
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


def _compared(before: _Picture, after: _Picture, mask: Image.Image) -> str:
    """Both pictures, the second one from a line on that people move; it begins left of the mask, so
    that all of the edit is seen.
    """
    left, _, _, _ = mask.getbbox() or (0, 0, 0, 0)
    at = max(3, 100 * left // mask.width - 3)
    return (
        f'<div class="compare" style="--at: {at}%">'
        f'<img alt="before" src="{html.escape(before.url)}">'
        f'<img class="after" alt="after" src="{html.escape(after.url)}">'
        '<span class="was">before</span><span class="is">after</span>'
        f'<input type="range" min="0" max="100" value="{at}" aria-label="from before to after" '
        "oninput=\"this.parentNode.style.setProperty('--at', this.value + '%')\">"
        '<span class="line"></span></div>'
    )


def _preview(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    text = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="as it comes" src="data:image/jpeg;base64,{text}">'


def summary(meta: Mapping[str, Any]) -> str:
    """What an edit took and what the cache saved; times of stages are folded."""
    timings = meta.get("timings_ms", {})
    total = sum(timings.get(stage, 0.0) for stage in STAGES) / 1e3
    computed, whole = meta.get("computed_tokens"), meta.get("total_tokens", 0) * meta["steps"]
    said = {
        "hit": "the picture's activations were there",
        "miss": "the picture's activations are being made for the next edit",
        "off": "not used",
    }.get(str(meta.get("cache")), str(meta.get("cache")))
    cache = f"Cache: {html.escape(said)}."
    if computed is not None and whole:
        cache += f" {computed / whole:.0%} of the tokens were computed."
    rows = "".join(
        f"<tr><td>{stage}</td><td>{timings[stage]:.0f} ms</td></tr>"
        for stage in STAGES
        if stage in timings
    )
    return (
        f"<strong>{total:.2f} s</strong>, {meta['steps']} steps, seed {meta['seed']}, worker "
        f"{html.escape(str(meta['worker']))}. {cache}"
        f"<details><summary>Times</summary><table>{rows}</table></details>"
    )


def _progress(event: Progress | Preview) -> str:
    return (
        f'<p role="status">step {event.step} of {event.steps}</p>'
        f'<progress value="{event.step}" max="{event.steps}"></progress>'
    )


def _note(text: str, warnings: Sequence[str] = ()) -> str:
    told = "".join(f"<p>{html.escape(each)}</p>" for each in warnings)
    return f'<p role="status">{html.escape(text)}</p>{told}'


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
