"""Every draw of a test comes from the run's seed, which pytest prints."""

from __future__ import annotations

import ast
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.draws import drawing, fresh_random, fresh_rng, fresh_seed

ROOT = Path(__file__).parents[2]
UNSEEDED = re.compile(r"([\w.]+\.)?(default_rng|Random|SystemRandom|uuid4)|(np\.)?random\.seed")
"""Calls that draw by chance where they are given no seed."""
BY_CHANCE = re.compile(r"os\.urandom|os\.getrandom|secrets\.\w+|torch\.seed|torch\.initial_seed")
"""Calls that draw by chance whatever they are given."""
SEEDING = re.compile(r"([\w.]+\.)?(default_rng|Random|seed|manual_seed)")
"""Calls that draw by the clock where a time is the seed."""
DRAWING = re.compile(
    r"\b(default_rng|Random|SystemRandom|uuid4)\((\)|.*time\.)|seed\(|urandom|getrandom|secrets"
)
"""Text of each file with such a call."""
ALLOWED = {"tests/conftest.py": {"secrets.randbelow"}}


def unseeded_calls(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and name of calls that the run's seed does not reach."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [(call, ast.unparse(call.func)) for call in calls]
    return [
        (call.lineno, name)
        for call, name in names
        if BY_CHANCE.fullmatch(name)
        or (UNSEEDED.fullmatch(name) and not (call.args or call.keywords))
        or (SEEDING.fullmatch(name) and "time." in ast.unparse(call))
    ]


@pytest.mark.parametrize(
    "line",
    [
        "np.random.default_rng()",
        "random.Random()",
        "torch.seed()",
        "os.urandom(4)",
        "uuid.uuid4()",
        "hypothesis.seed(time.time_ns())",
    ],
)
def test_a_draw_without_a_seed_is_seen(line: str) -> None:
    assert unseeded_calls(ast.parse(f"x = {line}"))
    assert DRAWING.search(line)


def test_no_test_draws_without_the_seed() -> None:
    unseeded = {
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if DRAWING.search(text := path.read_text(encoding="utf-8"))
        for line, name in unseeded_calls(ast.parse(text))
        if name not in ALLOWED.get(str(path.relative_to(ROOT)), ())
    }
    assert not unseeded, "use tests/support/draws.py"


def test_a_place_draws_the_same_again_and_each_draw_another() -> None:
    def draws() -> list[float]:
        with drawing("a place"):
            library_draws = [
                fresh_seed(),
                fresh_seed(),
                fresh_random().random(),
                fresh_rng().random(),
            ]
            return [*library_draws, random.random(), np.random.random(), float(torch.rand(()))]

    first = draws()
    assert len(set(first)) == len(first)
    assert draws() == first
    with drawing("another place"):
        assert fresh_seed() != first[0]


def test_hypothesis_draws_by_the_place_too() -> None:
    """Not the same examples for each case of a test."""

    def examples(place: str) -> list[int]:
        numbers: list[int] = []

        @settings(max_examples=9)
        @given(number=st.integers(0, 10**9))
        def draw(number: int) -> None:
            numbers.append(number)

        with drawing(place):
            draw()
        return numbers

    first = examples("a place")
    assert examples("a place") == first
    assert examples("another place") != first


def drawn_by(*flags: str) -> tuple[str, str]:
    """Run pytest and return the seed that it prints and the number that it draws."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-s", *flags]
    result = subprocess.run(
        [*command, "tests/contract/test_a_draw.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    header = re.search(r"^seed: --seed (\d+)$", result.stdout, re.M)
    draw = re.search(r"drawn (\d+)", result.stdout)
    assert header, result.stdout
    return header[1], draw[1] if draw else ""


def test_the_header_says_the_seed_and_the_option_sets_it() -> None:
    fresh, draw = drawn_by("--seed", "fresh")
    assert drawn_by("--seed", fresh) == (fresh, draw)
    number, other_draw = drawn_by()
    assert number == "0"
    assert other_draw != draw


def test_a_seed_that_is_none_is_refused() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--seed",
        "x",
        "--collect-only",
        "tests/contract/test_a_draw.py",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 4
    assert "--seed takes a number" in result.stderr
