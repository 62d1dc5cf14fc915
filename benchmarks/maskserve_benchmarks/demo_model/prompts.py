"""Ways to ask for a coloured shape, as the text encoders learn them."""

from __future__ import annotations

from typing import Final

import numpy as np

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES

MAX_SEQUENCE_LENGTH: Final = 16
"""Number of T5 tokens of a prompt that the demo model reads."""

TEMPLATES: Final = (
    "a {c} {s}",
    "{c} {s}",
    "the {c} {s}",
    "one {c} {s}",
    "A {c} {s}.",
    "a {s} that is {c}",
    "a {s} in {c}",
    "{s}, {c}",
    "draw a {c} {s}",
    "put a {c} {s} here",
    "please add a {c} {s}",
    "a photo of a {c} {s}",
    "a picture of a {c} {s}",
    "a big {c} {s}",
    "a small {c} {s}",
    "a bright {c} {s}",
    "a {c} {s} on the table",
    "a {c} {s} in the sky",
    "replace it with a {c} {s}",
    "fill the region with a {c} {s}",
    "an image of one {c} {s}, centred",
    "a flat {c} {s} icon",
    "a simple {c} coloured {s}",
    "a {c} colored {s}",
    "make it a {c} {s}",
)
SAME: Final = "same"  # stands for the colour or shape of the picture's only other object
SAME_BOTH: Final = (
    "another one",
    "one more",
    "the same again",
    "one more of the same",
    "another one like it",
    "a copy of the other one",
    "the same thing",
    "put another one here",
)
SAME_COLOUR: Final = (
    "a {s} in the other one's colour",
    "a {s} in the same colour",
    "a {s} of the same colour",
    "a {s} coloured like the other one",
    "the same colour, but a {s}",
    "put a {s} in the other one's colour here",
)
SAME_SHAPE: Final = (
    "the same shape in {c}",
    "the same in {c}",
    "another one in {c}",
    "the same, but {c}",
    "one more, but {c}",
    "a {c} one",
    "a {c} copy of the other one",
    "put the same shape in {c} here",
)
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


def templates(colour: str, shape: str) -> tuple[str, ...]:
    """Return all wordings of a prompt for this colour and shape; both may be SAME."""
    if colour == SAME:
        return SAME_BOTH if shape == SAME else SAME_COLOUR
    return SAME_SHAPE if shape == SAME else TEMPLATES


def first_phrase(colour: str, shape: str) -> str:
    """Return the plainest wording of a prompt for this colour and shape; both may be SAME."""
    return templates(colour, shape)[0].format(c=colour, s=shape)


def words() -> list[str]:
    """Return every word that the tokenizers keep whole, in lower case, sorted."""
    phrases = (*TEMPLATES, *SAME_BOTH, *SAME_COLOUR, *SAME_SHAPE)
    text = " ".join(phrases).replace("{c}", " ").replace("{s}", " ")
    vocabulary = set("".join(ch if ch.isalpha() else " " for ch in text.lower()).split())
    return sorted(vocabulary | set(COLOURS) | set(SHAPES) | {s + "s" for s in SHAPES})


def phrase(rng: np.random.Generator, colour: str, shape: str, *, noisy: bool = False) -> str:
    """Draw a prompt for a `colour` `shape`; both may be SAME.

    `noisy` adds words that the encoders have never met.
    """
    text = str(rng.choice(templates(colour, shape))).format(c=colour, s=shape)
    return vary(rng, text, noisy=noisy)


def vary(rng: np.random.Generator, text: str, *, noisy: bool) -> str:
    """Return `text` in a random letter case; `noisy` may add a word of random letters."""
    if noisy and rng.random() < 0.3:
        parts = text.split(" ")
        stranger = "".join(rng.choice(list(_LETTERS), size=rng.integers(2, 5)))
        parts.insert(int(rng.integers(0, len(parts) + 1)), stranger)
        text = " ".join(parts)
    case = rng.random()
    if case < 0.1:
        return text.upper()
    return text.capitalize() if case < 0.3 else text


def every_phrase() -> list[tuple[str, str, str]]:
    """Return (prompt, colour, shape) of every template with every colour and shape, and SAME."""
    return [
        (template.format(c=colour, s=shape), colour, shape)
        for colour in (*COLOURS, SAME)
        for shape in (*SHAPES, SAME)
        for template in templates(colour, shape)
    ]
