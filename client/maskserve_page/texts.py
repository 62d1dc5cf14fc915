"""The page's texts about an edit, as HTML."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from maskserve_client import Preview, Progress
from maskserve_common.contracts.meta import STAGES
from maskserve_common.errors import MaskserveError
from maskserve_page.edit_inputs import InputMissing
from maskserve_page.pictures import PagePicture

_CUT = re.compile(r"(.+): text_encoder\w* reads \d+ tokens and not the last (\d+)")
_FIELDS = {"IMAGE": "The picture", "MASK": "The mask", "PROMPT": "The prompt"}


def picture(result: PagePicture) -> str:
    """Return a picture that was made without a source."""
    return f'<img class="made" alt="the picture" src="{html.escape(result.url)}">'


def comparison(before: PagePicture, after: PagePicture, mask: Image.Image | None) -> str:
    """Return both pictures with a movable line between them.

    At first the line is left of the mask, so that the whole edit is visible; without a mask it is
    in the middle.
    """
    at = 50
    if mask is not None:
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


def preview(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    text = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="preview" src="data:image/jpeg;base64,{text}">'


def summary(meta: Mapping[str, Any]) -> str:
    """Return the time of an edit, the effect of the cache, and the stages' times, folded away."""
    timings = meta.get("timings_ms", {})
    total = sum(timings.get(stage, 0.0) for stage in STAGES) / 1e3
    computed, whole = meta.get("computed_tokens"), meta.get("total_tokens", 0) * meta["steps"]
    is_masked = meta.get("kind", "inpaint") == "inpaint"
    sentences = {
        "hit": "The edit used cached activations of the picture.",
        "own": "Some steps computed the whole picture, and the other steps reused their results.",
        "miss": "The server is preparing the picture for the next edit.",
        "off": "The edit used no cached activations.",
    }.get(str(meta.get("cache")) if is_masked else "", "")
    if computed is not None and whole and is_masked:
        sentences += f" The edit took {computed / whole:.0%} of the work of a whole picture."
    window = meta.get("window")
    if window is not None:
        left, top, right, bottom = window["box"]
        sentences += (
            f" The model saw {right - left} × {bottom - top} pixels around the mask, at "
            f"{window['scale']:.0%} of their size."
        )
    rows = "".join(
        f"<tr><td>{stage}</td><td>{timings[stage]:.0f} ms</td></tr>"
        for stage in STAGES
        if stage in timings
    )
    return (
        f"<strong>{total:.2f} s</strong>, {meta['steps']} steps, seed {meta['seed']}, worker "
        f"{html.escape(str(meta['worker']))}. {sentences}"
        f"<details><summary>Times</summary><table>{rows}</table></details>"
    )


def progress(event: Progress | Preview) -> str:
    return (
        f'<p role="status">step {event.step} of {event.steps}</p>'
        f'<progress value="{event.step}" max="{event.steps}"></progress>'
    )


def note(text: str, warnings: Sequence[str] = ()) -> str:
    paragraphs = "".join(f"<p>{html.escape(plain_warning(warning))}</p>" for warning in warnings)
    return f'<p role="status">{html.escape(text)}</p>{paragraphs}'


def plain_warning(warning: str) -> str:
    """Return a warning without names of tensors and encoders."""
    match = _CUT.fullmatch(warning)
    if match is not None:
        words = "prompt" if match[1] == "PROMPT" else "negative prompt"
        return f"The {words} is too long: its end ({match[2]} tokens) was not read."
    field, _, text = warning.partition(": ")
    return f"{_FIELDS[field]} {text}." if field in _FIELDS else warning


def error_note(error: Exception) -> str:
    """Return the text of an error without its code; for missing input, a plain hint."""
    if isinstance(error, InputMissing):
        return note(error.sentence)
    text = error.message if isinstance(error, MaskserveError) else str(error)
    return f'<p role="alert"><strong>That did not work.</strong> {html.escape(text)}</p>'
