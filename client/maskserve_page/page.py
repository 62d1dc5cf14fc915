"""The components of the page, and the handlers of its buttons.

The page is made of Gradio's components and its own canvas (`painter.js`): Gradio's canvas draws by
WebGL, which takes seconds without a GPU, and its brush has soft edges.
"""

from __future__ import annotations

import base64
import io
import json
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from maskserve_client import EditResult, Final, Masks, Preview, Progress
from maskserve_common.contracts.request import EditKind
from maskserve_common.contracts.settings import CACHE_MODES
from maskserve_common.errors import Cancelled, InvalidRequest, MaskserveError
from maskserve_page import texts
from maskserve_page.edit_inputs import (
    decode_picture,
    painted_of,
    references_of,
    settings_of,
    sizes_of,
)
from maskserve_page.pictures import EXPIRES_S, PagePicture, PagePictures
from maskserve_page.session import ServedModel, Session

_PREVIEW_S = 0.25
"""Least seconds between two progress updates: updates take time of the cores that compute."""
WORDS = {
    "demo": (
        "a red star",
        "a blue circle",
        "a green square",
        "a yellow triangle",
        "a pink heart",
        "a purple cross",
    )
}
"""Model name -> prompts of the suggestion buttons, for models that know few words."""
_LEAST_MASK = {"demo": 0.02}
"""Model name -> smallest share of a picture that a mask should cover for this model."""
_MOST_RESULTS = 24
"""Most results of a session that the page shows."""
_MOST_UNDONE = 8
"""Most pictures that Undo can go back."""


class _Tab(NamedTuple):
    """Words of the page for a kind of edit."""

    name: str
    button: str
    label: str
    """Label of the prompt."""
    example: str


_TABS: dict[EditKind, _Tab] = {
    "generate": _Tab("Create", "Create", "What to show", "a red star"),
    "inpaint": _Tab("Edit", "Edit", "What to paint there", "a red star"),
    "edit": _Tab("Instruct", "Edit", "What to change", "make the star blue"),
}
"""Kind -> its tab, in the order of the page."""
_STRENGTH = 0.75
"""Strength of an edit without a mask, for models that need one."""


def make_page(
    session: Session, pictures_on_disk: PagePictures, pictures: list[Path], masks: Masks | None
) -> Any:
    """Return the page as Gradio's Blocks.

    Args:
        session: connection to the worker or router that runs the edits.
        pictures_on_disk: pictures of the page's users.
        pictures: example pictures to begin with.
        masks: finds the mask of a clicked object; None: masks are only painted.
    """
    import gradio as gr

    model = session.model()
    with gr.Blocks(
        title="maskserve",
        analytics_enabled=False,
        fill_width=True,
        delete_cache=(600, int(EXPIRES_S)),
    ) as page:
        gr.HTML(f"<h1>maskserve</h1> <p>{_about(model.kinds)}</p>", elem_classes="head")
        with gr.Row():
            with gr.Column(scale=5, elem_id="request"):
                form = _form(gr, session, model, pictures_on_disk, pictures, masks)
            with gr.Column(scale=4, elem_classes="outcome"):
                outcome = _outcome(gr)
        _edits(gr, form, outcome, session, pictures_on_disk)
        _continue_and_undo(gr, form, outcome, pictures_on_disk)
    return page


def _about(kinds: Collection[EditKind]) -> str:
    """Return what the page is for, in a sentence."""
    if set(kinds) == {"inpaint"}:
        return "Paint over the part to change, describe its new content, and edit."
    return "Make pictures, and change them."


@dataclass(frozen=True)
class _Form:
    """Input components."""

    kind: Any
    """Tabs of the kinds of edits."""
    editor: Any
    prompt: Any
    references: Any
    run: Any
    stop: Any
    seed: Any
    more: list[Any]
    """Components in the order of `settings_of`, after the seed."""


def _form(
    gr: Any,
    session: Session,
    model: ServedModel,
    pictures_on_disk: PagePictures,
    pictures: list[Path],
    masks: Masks | None,
) -> _Form:
    kinds = [kind for kind in _TABS if kind in model.kinds]
    first: EditKind = "inpaint" if "inpaint" in kinds else kinds[0]

    def take(encoded: str) -> dict[str, str]:
        """Keep a picture in base64; return its name and URL, or an error sentence."""
        try:
            picture = pictures_on_disk.take(decode_picture(encoded))
        except InvalidRequest as error:
            return {"error": error.message}
        session.prepare(picture)
        return picture.template()

    def find(thing: dict[str, Any]) -> dict[str, str]:
        """Return the mask of the object at a pixel, or of words, as a PNG in base64, or an error
        sentence.
        """
        try:
            file = pictures_on_disk.get(thing["name"]).file
            assert masks is not None
            if "text" in thing:
                scored_mask = masks.find(file, text=thing["text"])
            else:
                scored_mask = masks.find(file, points=[[thing["x"], thing["y"], 1]])
        except MaskserveError as error:
            return {"error": error.message}
        # Without alpha, because a canvas loses the colour of transparent pixels.
        plain = io.BytesIO()
        Image.open(io.BytesIO(scored_mask.mask)).convert("L").save(plain, "PNG")
        return {"mask": base64.b64encode(plain.getvalue()).decode()}

    kind = gr.Radio(
        [(_TABS[name].name, name) for name in kinds],
        value=first,
        show_label=False,
        container=False,
        visible=len(kinds) > 1,
        elem_id="kinds",
    )
    painter = _text("painter.html").replace("{least}", str(_LEAST_MASK.get(model.name, 0)))
    editor = gr.HTML(
        html_template=painter.replace("{clicks}", "" if masks else "hidden"),
        js_on_load=_text("files.js") + _text("painter.js"),
        server_functions=[take, find],
        apply_default_css=False,
        padding=False,
        elem_id="editor",
    )
    with gr.Row(elem_classes="ask"):
        prompt = gr.Textbox(
            label=_TABS[first].label,
            placeholder=_TABS[first].example,
            elem_id="prompt",
            scale=4,
            min_width=300,  # on a phone the button is under it
        )
        run = gr.Button(_TABS[first].button, variant="primary", elem_id="run", min_width=100)
        stop = gr.Button("Stop", variant="stop", elem_id="stop", visible="hidden", min_width=100)
    references = gr.HTML(
        html_template=_text("references.html"),
        js_on_load=_text("files.js") + _text("references.js"),
        server_functions=[take],
        apply_default_css=False,
        padding=False,
        visible=model.most_pictures > 1,
        elem_id="references",
    )
    size = gr.Dropdown(
        sizes_of(model.native_resolution),
        value="auto",
        label="Size",
        allow_custom_value=True,
        elem_id="size",
    )
    if model.name in WORDS:
        with gr.Row(elem_classes="chips", elem_id="chips"):
            for words in WORDS[model.name]:
                chip = gr.Button(words, size="sm")
                chip.click(None, None, prompt, js=f"() => {json.dumps(words)}")
    if pictures:
        _gallery(gr, editor, session, pictures_on_disk, pictures)
    seed, draw, steps, guidance, *after_size = _further_settings(gr, model)
    kind.change(_words_of, kind, [prompt, run], show_progress="hidden")
    further_inputs = [draw, steps, guidance, size, *after_size]
    return _Form(kind, editor, prompt, references, run, stop, seed, further_inputs)


def _further_settings(gr: Any, model: ServedModel) -> list[Any]:
    """Return the components under *More*, in the order of the page."""
    with gr.Accordion("More", open=False):
        with gr.Row():
            seed = gr.Number(label="Seed", value=0, precision=0, minimum=0)
            draw = gr.Checkbox(label="New seed for each edit", value=True)
        with gr.Row():
            steps = gr.Number(label="Steps (0: the model's default)", value=0, precision=0)
            guidance = gr.Number(label="Guidance (0: the model's default)", value=0)
        strength = gr.Slider(
            0.05,
            1,
            1 if model.references else _STRENGTH,
            step=0.05,
            label="Strength (how far the picture may change)",
            visible=not model.references,
            elem_id="strength",
        )
        with gr.Row(elem_classes="of-masks"):
            dilate = gr.Slider(0, 64, 0, step=1, label="Grow the mask (pixels)")
            feather = gr.Slider(0, 64, 0, step=1, label="Feather the mask (pixels)")
        with gr.Row():
            cache = gr.Dropdown(
                list(CACHE_MODES), value="auto", label="Cache", elem_classes="of-masks"
            )
            loras = gr.Textbox(label="LoRAs", placeholder="hollow:0.8, other")
    return [seed, draw, steps, guidance, strength, dilate, feather, cache, loras]


def _words_of(kind: EditKind) -> tuple[Any, Any]:
    """Return the updates of the prompt and the button for a kind."""
    import gradio as gr

    tab = _TABS[kind]
    return gr.Textbox(label=tab.label, placeholder=tab.example), gr.Button(tab.button)


def _gallery(
    gr: Any, editor: Any, session: Session, pictures_on_disk: PagePictures, pictures: list[Path]
) -> None:
    gr.HTML("Or start with one of these", elem_classes="caption", padding=False)
    gallery = _thumbnails(gr, [str(path) for path in pictures], elem_id="pictures")

    def picked(event: Any) -> str:
        picture = pictures_on_disk.take(pictures[event.index].read_bytes())
        session.prepare(picture)
        return json.dumps(picture.template())

    picked.__annotations__["event"] = gr.SelectData  # Gradio reads this annotation
    gallery.select(picked, None, editor, show_progress="hidden")


@dataclass(frozen=True)
class _Outcome:
    """Output components."""

    status: Any
    live: Any
    preview: Any
    bar: Any
    """Row of buttons for a finished picture."""
    go_on: Any
    undo: Any
    file: Any
    details: Any
    last: Any
    """State of the page: the name of the last finished picture."""
    history: Any
    results: Any
    """State of the page: the names of the pictures in `history`, the oldest first."""


def _outcome(gr: Any) -> _Outcome:
    status = gr.HTML("", elem_classes="status", elem_id="status", padding=False)
    live = gr.HTML("", elem_classes="live", elem_id="live", padding=False)
    picture = gr.HTML("", elem_id="result", padding=False)
    with gr.Row(visible=False, elem_id="done") as bar:
        go_on = gr.Button("Go on with this picture", min_width=180)
        undo = gr.Button("Undo", interactive=False, elem_id="undo", min_width=65)
        file = gr.DownloadButton("Download", elem_id="download", min_width=90)
    details = gr.HTML("", elem_classes="edit-details", elem_id="edit-details", padding=False)
    gr.HTML("Results, to edit on", elem_classes="caption", padding=False)
    history = _thumbnails(gr, [], elem_id="history", visible=False)
    last, results = gr.State(""), gr.State([])
    return _Outcome(status, live, picture, bar, go_on, undo, file, details, last, history, results)


def _thumbnails(gr: Any, files: list[str], **options: Any) -> Any:
    """Return a row of pictures to choose from."""
    return gr.Gallery(
        files,
        container=False,
        columns=8,
        allow_preview=False,
        interactive=False,
        buttons=[],
        show_label=False,
        **options,
    )


def _edits(
    gr: Any, form: _Form, outcome: _Outcome, session: Session, pictures_on_disk: PagePictures
) -> None:
    """Connect Edit and Stop."""
    request = gr.State(_fresh_id)  # id of the edit under way, or of the next one

    def buttons(*, running: bool) -> dict[Any, Any]:
        """Show Stop in the place of Edit while an edit runs.

        Edit returns in an event of its own, after the edit's: until an event has ended, Gradio
        drops clicks that would start it again. So each update of an edit has Stop, and all that an
        update before it shows or hides: Gradio sends only differences, and its page takes out of
        updates that it has not shown yet what the next one lacks.
        """
        visibility = {True: True, False: "hidden"}
        return {
            form.run: gr.Button(visible=visibility[not running]),
            form.stop: gr.Button(visible=visibility[running]),
        }

    def progress_updates(event: Progress | Preview) -> dict[Any, Any]:
        """Return the updates for an edit under way."""
        updates = {**buttons(running=True), outcome.status: texts.progress(event)}
        if isinstance(event, Preview):
            updates |= {outcome.live: texts.preview(event.image), outcome.preview: ""}
        return updates

    def picture_updates(html: str, result: EditResult) -> dict[Any, Any]:
        """Return the updates that show a finished picture. They come first, because the others take
        time.
        """
        return {
            **buttons(running=True),
            outcome.bar: gr.Row(visible=True),
            outcome.status: texts.note("done", result.meta.get("warnings", ())),
            outcome.live: "",
            outcome.preview: html,
        }

    def result_updates(result: EditResult, picture: PagePicture) -> dict[Any, Any]:
        """Return the other updates for a finished edit."""
        return {
            **buttons(running=True),
            outcome.bar: gr.Row(visible=True),
            outcome.details: texts.summary(result.meta),
            form.seed: result.seed,
            outcome.file: gr.DownloadButton(value=str(picture.file), interactive=True),
            outcome.go_on: gr.Button(interactive=True),
            outcome.last: picture.name,
            request: _fresh_id(),
        }

    def error_updates(error: Exception) -> dict[Any, Any]:
        """Return the updates for an edit that was stopped or failed."""
        stopped = isinstance(error, Cancelled)
        return {
            **buttons(running=True),
            outcome.status: texts.note("stopped") if stopped else texts.error_note(error),
            outcome.live: "",
            request: _fresh_id(),
        }

    def history(results: list[str]) -> dict[Any, Any]:
        """Return the updates that show the session's results, the newest first."""
        available = pictures_on_disk.available(results)
        files = [str(picture.file) for picture in reversed(available)]
        return {
            outcome.results: [picture.name for picture in available],
            outcome.history: gr.Gallery(files, visible=len(files) > 1),
        }

    def edit(*inputs: Any) -> Iterator[Any]:
        """Yield updates while an edit runs; errors become sentences of the page."""
        painted, text, name, kind, further, results, *setting_values = inputs
        try:
            source, mask, expand = painted_of(painted, pictures_on_disk, kind)
            references = references_of(further, pictures_on_disk, kind)
            settings = {**settings_of(kind, *setting_values), "request_id": name}
            if expand:
                settings["expand"] = expand
            yield buttons(running=True)
            shown_at = 0.0
            edited = session.events(source, mask, text or "", settings, references)
            with closing(edited) as events:
                for event in events:
                    if isinstance(event, Final):
                        picture = pictures_on_disk.take(event.result.encoded)
                        session.remember(picture, event.result)
                        html = texts.picture(picture)
                        if source and not expand:
                            html = texts.comparison(source, picture, mask)
                        yield picture_updates(html, event.result)
                        results = [*results, picture.name][-_MOST_RESULTS:]
                        yield {**result_updates(event.result, picture), **history(results)}
                    elif time.monotonic() - shown_at >= _PREVIEW_S:
                        yield progress_updates(event)
                        shown_at = time.monotonic()
        except (MaskserveError, OSError) as error:
            yield error_updates(error)

    triggers = [form.run.click, form.prompt.submit]
    # Only in the browser: a round trip to the server would delay the edit.
    gr.on(triggers, None, None, outcome.status, js=f"() => `{texts.note('sent')}`")
    edit_inputs = [form.editor, form.prompt, request, form.kind, form.references]
    edit_inputs += [outcome.results, form.seed, *form.more]
    outputs = [request, form.run, form.stop, form.seed, *vars(outcome).values()]
    edited = gr.on(triggers, edit, edit_inputs, outputs, show_progress="hidden")
    edited.then(lambda: buttons(running=False), None, [form.run, form.stop], show_progress="hidden")
    form.stop.click(session.stop, request, None, show_progress="hidden")


def _continue_and_undo(
    gr: Any, form: _Form, outcome: _Outcome, pictures_on_disk: PagePictures
) -> None:
    """Connect the buttons that make a result the picture to edit, and that undo it."""
    past = gr.State([])
    editing = next((kind for _, kind in form.kind.choices if kind != "generate"), None)

    def carry_on(painted: str | None, result: str, before: list[str], kind: EditKind) -> Any:
        """Make the result the picture to edit, and keep the previous picture."""
        earlier = [*before, json.loads(painted)["name"]][-_MOST_UNDONE:] if painted else before
        return (
            json.dumps(pictures_on_disk.get(result).template()),
            earlier,
            gr.Button(interactive=bool(earlier)),
            gr.Button(interactive=False),
            editing if kind == "generate" and editing else kind,
        )

    def go_back(before: list[str]) -> Any:
        """Return to the previous picture."""
        *older_names, name = before
        return (
            json.dumps(pictures_on_disk.get(name).template()),
            older_names,
            gr.Button(interactive=bool(older_names)),
        )

    def go_on_with(results: list[str], event: Any) -> Any:
        """Make an earlier result the picture to edit."""
        try:
            return json.dumps(pictures_on_disk.get(results[-1 - event.index]).template()), ""
        except InvalidRequest as error:
            return gr.skip(), texts.error_note(error)

    go_on_with.__annotations__["event"] = gr.SelectData  # Gradio reads this annotation
    outcome.history.select(
        go_on_with, outcome.results, [form.editor, outcome.status], show_progress="hidden"
    )
    editor, undo, go_on = form.editor, outcome.undo, outcome.go_on
    go_on.click(
        carry_on, [editor, outcome.last, past, form.kind], [editor, past, undo, go_on, form.kind]
    )
    undo.click(go_back, [past], [editor, past, undo])


def _fresh_id() -> str:
    return uuid.uuid4().hex


def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
