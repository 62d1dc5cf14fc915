"""Every command that a document or the Makefile names is there, with the flags that it is given.

All start with `--help`; their flags are read, as the benchmarks behind most take minutes.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from maskserve_benchmarks.bench import COMMANDS, module_of
from maskserve_client import cli as client_cli
from maskserve_router import cli as router_cli

ROOT = Path(__file__).resolve().parents[2]
TEXTS = sorted(
    path
    for path in [
        ROOT / "Makefile",
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("docs/*.toml"),
        *ROOT.glob("assets/**/*.md"),
        *ROOT.glob("deploy/**/*.md"),
        *ROOT.glob("studies/**/*.md"),
    ]
    if path.name != "CHANGELOG.md"
)
"""CHANGELOG.md tells of commands that have left."""
CODE = re.compile(r"`([^`\n]+)`|^(?: {4}|\t)(.+)$|^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
WORDS = ("serve", "edit", "mask", "status", "cancel", "drain", "templates", "adapters", "jobs")
COMMAND_WORDS = (*WORDS, "workflows", "web", "demo", "check")


def commands_of(text: str, name: str) -> Iterator[list[str]]:
    """The words behind a program's name, of each call in a document's code."""
    for match in CODE.finditer(text.replace("\\\n", " ")):
        for line in (match[1] or match[2] or match[3]).splitlines():
            for call in re.findall(rf"(?:^|[\s/]){name}(?= )([^|;&#`]*)", line):
                try:
                    yield shlex.split(call.replace("…", " "))
                except ValueError:  # a quotation that goes on in the next line
                    yield call.replace("…", " ").split()


def flags_of(words: list[str]) -> set[str]:
    return {word.split("=")[0] for word in words if re.match(r"--[a-z]", word)}


def path_of(module: str) -> Path | None:
    """The file of a module of benchmarks or studies."""
    file = Path(*module.split(".")).with_suffix(".py")
    paths = (ROOT / folder / file for folder in ("benchmarks", "studies"))
    return next((path for path in paths if path.is_file()), None)


@cache
def flags_and_imports(module: str) -> tuple[frozenset[str], frozenset[str]]:
    """Flags that a module of benchmarks or studies names, and what it imports; of others none."""
    path = path_of(module)
    if not path:
        return frozenset(), frozenset()
    source = path.read_text(encoding="utf-8")
    imports = re.findall(r"^\s*from ([\w.]+) import", source, re.MULTILINE)
    return frozenset(re.findall(r"[\"'](--[a-z][\w-]*)[\"']", source)), frozenset(imports)


@cache
def flags_of_bench(name: str) -> frozenset[str]:
    """Flags that a command of scripts/bench takes: those of its module, and of ours that it reads
    them from.
    """
    flags, todo, visited = set[str](), [module_of(name)], set[str]()
    while todo:
        module = todo.pop()
        if module not in visited:
            visited.add(module)
            named, imports = flags_and_imports(module)
            flags |= named
            todo += imports
    return frozenset(flags)


def parsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Subcommands by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def flags_of_parser(parser: argparse.ArgumentParser) -> set[str]:
    """Its flags and those of all its subcommands."""
    flags = {flag for action in parser._actions for flag in action.option_strings}
    return flags.union(*(flags_of_parser(subparser) for subparser in parsers_of(parser).values()))


@cache
def flags_of_command(name: str) -> set[str]:
    """Flags of a subcommand of maskserve."""
    return flags_of_parser(parsers_of(client_cli.parser())[name])


def texts() -> Iterator[tuple[str, str]]:
    """Path and content of each document."""
    for path in TEXTS:
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_benchmarks_that_are_named_are_there_with_their_flags() -> None:
    """None is excused by a commit that had it: a figure whose command has left leaves, too."""
    wrong = []
    for path, content in texts():
        for name in re.findall(r"scripts/bench ([a-z_]+)", content):
            if name not in COMMANDS:
                wrong.append((path, name))
        for name, *words in commands_of(content, r"scripts/bench"):
            if name in COMMANDS:
                unknown = flags_of(words) - flags_of_bench(name)
                wrong += [(path, f"{name} {flag}") for flag in sorted(unknown)]
    assert not wrong


def test_targets_that_are_named_are_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    wrong = []
    for path, content in texts():
        code = "\n".join(match.group().strip("` \n") for match in CODE.finditer(content))
        calls = re.findall(r"^(?:[A-Z_]+=\S+ )*make ([a-z][a-z-]*)", code, re.MULTILINE)
        wrong += [(path, name) for name in calls if name not in targets]
    assert not wrong


def test_commands_of_maskserve_take_the_flags_that_are_named() -> None:
    wrong = []
    for path, content in texts():
        for words in commands_of(content, "maskserve"):
            if words and words[0] in COMMAND_WORDS:
                unknown = flags_of(words) - flags_of_command(words[0])
                wrong += [(path, f"{words[0]} {flag}") for flag in sorted(unknown)]
    assert not wrong


def test_commands_of_the_router_take_the_flags_that_are_named() -> None:
    source = Path(router_cli.__file__).read_text(encoding="utf-8")
    known_flags = set(re.findall(r"\"(--[a-z][\w-]*)\"", source))
    wrong = [
        (path, flag)
        for path, content in texts()
        for words in commands_of(content, "maskserve-router")
        for flag in flags_of(words) - known_flags
    ]
    assert not wrong


STARTED = """
import contextlib, io, os, sys
# What commands import of libraries and of the product, once, for all.
import matplotlib, peft, scipy.optimize, skimage.metrics, tritonclient.grpc, tritonclient.http
from diffusers import FluxFillPipeline, StableDiffusionXLPipeline
from maskserve_engine.start import assembly
from maskserve_serving import supervisor
from maskserve_client import cli as client
from maskserve_benchmarks import bench
from maskserve_router import cli as router

starts = {f"bench {name}": (bench.main, name) for name in bench.COMMANDS}
starts |= {f"maskserve {name}": (client.main, name) for name in sys.argv[1:]}
starts["maskserve-router"] = router.main, None
for command, (main, name) in starts.items():
    sys.stdout.flush()
    if os.fork():
        _, status = os.wait()
        if status:
            print(command, flush=True)
        continue
    code, said = 1, io.StringIO()
    sys.argv = [command.split()[0], *([name] if name else []), "--help"]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException as error:
            said.write(repr(error))
    good = not code and "usage: " in said.getvalue()
    if not good:
        print(said.getvalue()[-300:], flush=True)
    os._exit(not good)
"""
"""Starts each command with `--help` in a process of its own, and prints those that do not say how
they are used.
"""


@pytest.mark.timeout(900)
def test_every_command_starts_and_says_how_it_is_used() -> None:
    command = [sys.executable, "-W", "ignore", "-c", STARTED, *COMMAND_WORDS]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr[-2000:]


def test_a_command_that_is_not_there_is_seen() -> None:
    text = "`python scripts/bench stepp --json x` and\n\n    maskserve serve --nosuch 1\n"
    assert list(commands_of(text, r"scripts/bench")) == [["stepp", "--json", "x"]]
    assert [flags_of(words) for words in commands_of(text, "maskserve")] == [{"--nosuch"}]
    assert "--json" in flags_of_bench("step")
    assert "--nosuch" not in flags_of_bench("step")
