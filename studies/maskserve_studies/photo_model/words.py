"""The words that the photo model understands.

A wish is a thing and a look. The thing is an object as it is, a shape or the ground in a colour or
a material, nothing, or more of the picture's objects.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_benchmarks.demo_model.prompts import vary

OBJECTS: Final[tuple[str, ...]] = (
    "apple", "lemon", "banana", "strawberry", "watermelon", "mushroom", "sunflower", "rose",
    "cactus", "tree", "cat", "dog", "fox", "panda", "frog", "butterfly", "fish", "ladybird", "car",
    "bus", "bicycle", "plane", "boat", "balloon", "football", "guitar", "gift", "crown", "hat",
    "lamp", "clock", "camera", "coffee", "cake", "burger", "donut", "snowman", "sun", "moon",
    "house", "umbrella", "diamond",
)  # fmt: skip
MATERIALS: Final[tuple[str, ...]] = ("brick", "grass", "gravel", "wood")
GROUND: Final = "ground"  # a thing: all of the region in one material
NOTHING: Final = "nothing"  # a thing: the surroundings go on
MORE: Final = "more"  # a thing: one more of the picture's objects
THINGS: Final = (*OBJECTS, *SHAPES, GROUND, NOTHING, MORE)
LOOKS: Final = ("", *COLOURS, *MATERIALS)


class Wish(NamedTuple):
    """The wish of an edit."""

    thing: str
    """One of THINGS."""
    look: str = ""
    """One of LOOKS. A shape has a colour or a material, GROUND has a material, all others have
    none.
    """

    @property
    def numbers(self) -> tuple[int, int]:
        """The number of the look in LOOKS and of the thing in THINGS."""
        return LOOKS.index(self.look), THINGS.index(self.thing)


_OBJECT: Final = (
    "a {s}", "{s}", "the {s}", "one {s}", "A {s}.", "draw a {s}", "put a {s} here", "add a {s}",
    "please add a {s}", "a photo of a {s}", "a picture of a {s}", "a big {s}", "a small {s}",
    "a cute {s}", "a beautiful {s}", "a shiny {s}", "replace it with a {s}",
    "fill the region with a {s}", "a {s} on the table", "a {s} in the sky",
    "a {s} in the grass", "make it a {s}", "I want a {s} there", "an image of one {s}, centred",
)  # fmt: skip
_SHAPE: Final = (
    "a {c} {s}", "{c} {s}", "the {c} {s}", "A {c} {s}.", "a {s} that is {c}", "a {s} in {c}",
    "{s}, {c}", "draw a {c} {s}", "put a {c} {s} here", "please add a {c} {s}",
    "a photo of a {c} {s}", "a big {c} {s}", "a small {c} {s}", "a bright {c} {s}",
    "replace it with a {c} {s}", "make it a {c} {s}", "a {s} made of {c}", "a {s} of {c}",
)  # fmt: skip
_GROUND: Final = (
    "{c}", "only {c}", "fill it with {c}", "fill the region with {c}", "a {c} surface",
    "a {c} texture", "{c} everywhere", "cover it with {c}", "make it {c}", "replace it with {c}",
)  # fmt: skip
_NOTHING: Final = (
    "", "remove", "remove it", "remove the {s}", "remove this", "erase", "erase it",
    "erase the {s}", "delete the {s}", "take the {s} away", "nothing", "nothing here",
    "just the background", "clean it up", "an empty background", "fill the hole", "without the {s}",
)  # fmt: skip
_MORE: Final = (
    "more of the same", "more", "one more", "another one", "one more of the same", "more of it",
    "the same again", "put another one here", "another one like it", "go on like this",
)  # fmt: skip


def templates(wish: Wish) -> tuple[str, ...]:
    """The wordings of a wish, the plainest first; {c} is its look, {s} its thing."""
    if wish.thing == NOTHING:
        return _NOTHING
    if wish.thing == MORE:
        return _MORE
    if wish.thing == GROUND:
        return _GROUND
    return _SHAPE if wish.look else _OBJECT


def wishes() -> list[Wish]:
    """All wishes."""
    looks = (*COLOURS, *MATERIALS)
    return [
        *(Wish(thing) for thing in OBJECTS),
        *(Wish(shape, look) for shape in SHAPES for look in looks),
        *(Wish(GROUND, material) for material in MATERIALS),
        Wish(NOTHING),
        Wish(MORE),
    ]


def phrase(rng: np.random.Generator, wish: Wish, *, noisy: bool = False) -> str:
    """A prompt for `wish`; `noisy` adds words that the encoders have never met."""
    return vary(rng, wording(rng, wish), noisy=noisy)


def wording(rng: np.random.Generator, wish: Wish) -> str:
    """A template of `wish`, filled in. A wish to remove gets the name of a random object."""
    thing = str(rng.choice(OBJECTS)) if wish.thing == NOTHING else wish.thing
    return _grammatical(str(rng.choice(templates(wish))).format(c=wish.look, s=thing))


def first_phrase(wish: Wish) -> str:
    """The plainest wording; for NOTHING the empty prompt."""
    return _grammatical(templates(wish)[0].format(c=wish.look, s=wish.thing))


def words() -> list[str]:
    """Every word the tokenizers keep whole, lower case, sorted."""
    text = " ".join((*_OBJECT, *_SHAPE, *_GROUND, *_NOTHING, *_MORE))
    text = text.replace("{c}", " ").replace("{s}", " ").lower()
    vocabulary = set("".join(ch if ch.isalpha() else " " for ch in text).split())
    return sorted(vocabulary | {"an"} | set(OBJECTS) | set(SHAPES) | set(COLOURS) | set(MATERIALS))


def draw_prompts(rng: np.random.Generator, count: int) -> list[tuple[str, int, int]]:
    """Prompts with the numbers of look and thing, as the text encoders learn them. The first is the
    empty prompt; the others are random, with every kind of wish about as often.
    """
    kinds = {kind: [wish for wish in wishes() if templates(wish) is kind] for kind in _KINDS}
    result = [("", *Wish(NOTHING).numbers)]
    while len(result) < count:
        kind = _KINDS[int(rng.choice(len(_KINDS), p=_SHARES))]
        wish = kinds[kind][int(rng.integers(len(kinds[kind])))]
        result.append((phrase(rng, wish, noisy=True), *wish.numbers))
    return result


_KINDS: Final = (_OBJECT, _SHAPE, _GROUND, _NOTHING, _MORE)
_SHARES: Final = (0.4, 0.25, 0.1, 0.15, 0.1)


def _grammatical(text: str) -> str:
    """`text` with "an" before a vowel."""
    parts = text.split(" ")
    for i, (article, word) in enumerate(pairwise(parts)):
        if article in ("a", "A") and word[:1] in "aeio" and word:
            parts[i] = article + "n"
        if article in ("a", "A") and word.startswith("umbrella"):
            parts[i] = article + "n"
    return " ".join(parts)
