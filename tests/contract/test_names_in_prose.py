"""Names in backticks, in docstrings and comments of the product, stand for something that is there.

A name with dots is looked for: a module and what it defines, or a class and what it has. A name by
itself, or one of a library, stands somewhere in the code.
"""

from __future__ import annotations

import ast
import builtins
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "engine/maskserve_common",
    "engine/maskserve_lora",
    "engine/maskserve_workflows",
    "engine/maskserve_engine",
    "engine/maskserve_triton",
    "router/maskserve_router",
    "client/maskserve_client",
    "serving/maskserve_serving",
)
BESIDE = (
    "client/maskserve_page",
    "benchmarks",
    "studies",
    "scripts",
    "model_repository",
    "services",
)
FILES = (".py", ".toml", ".json", ".md", ".pbtxt", ".safetensors", ".txt")
ALLOWED = {
    "CalcCost",  # the papers'
    "enable_slicing",  # diffusers'
    "except",
    "taskset",  # a program
}


class Code:
    """Names that the code defines, all words in it, and the prose of the product."""

    def __init__(self) -> None:
        self.modules: dict[str, list[Path]] = defaultdict(list)
        """Dotted ends of paths, as `maskserve_triton.edit_front` and `edit_front`."""
        self.rooms = {path.parent.name for p in PACKAGES for path in (ROOT / p).rglob("*.py")}
        self.defines: dict[Path, set[str]] = {}
        self.classes: dict[str, list[ast.ClassDef]] = defaultdict(list)
        self.words = set(dir(builtins))
        self.prose: dict[Path, list[tuple[int, str]]] = {}
        for folder in (*PACKAGES, *BESIDE):
            for path in sorted((ROOT / folder).rglob("*.py")):
                self._add(path)

    def _add(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        if str(path.relative_to(ROOT)).startswith(PACKAGES):
            self.prose[path] = list(prose(text, tree))
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        self.words.update(parts)
        for begin in range(len(parts)):
            self.modules[".".join(parts[begin:])].append(path)
        self.defines[path] = set().union(*(_targets(node) for node in tree.body))
        if path.name == "__init__.py":
            self.defines[path] |= {sibling.stem for sibling in path.parent.iterdir()}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self.classes[node.name].append(node)
            self.words |= _words(node)

    def has(self, name: str) -> bool:
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            paths = self.modules.get(".".join(parts[:end]))
            if paths is not None and (end > 1 or len(parts) > 1):
                tail_parts = parts[end:]
                if not tail_parts:
                    return True
                if any(tail_parts[0] in self.defines[path] for path in paths):
                    return len(tail_parts) == 1 or self._of_class(tail_parts[0], tail_parts[1])
                if parts[0] in self.rooms or tail_parts[0][:1].isupper():
                    return False
        if len(parts) == 2 and parts[0] in self.classes:
            return self._of_class(*parts)
        return all(part in self.words for part in parts)

    def _of_class(self, name: str, member: str) -> bool:
        if name not in self.classes:
            return member in self.words
        return any(self._member(definition, member) for definition in self.classes[name])

    def _member(self, owner: ast.ClassDef, member: str) -> bool:
        if any(member in _targets(node) for node in owner.body):
            return True
        for node in ast.walk(owner):
            if isinstance(node, ast.Attribute) and node.attr == member:
                return True
        bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in owner.bases]
        return any(
            base not in self.classes or any(self._member(c, member) for c in self.classes[base])
            for base in bases
            if base not in ("Protocol", "Generic", "NamedTuple", "ABC")
        )


def _targets(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    if isinstance(node, ast.If | ast.Try):
        return set().union(*(_targets(child) for child in node.body), {""})
    return set()


def _words(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute):
        return {node.attr}
    if isinstance(node, ast.arg | ast.keyword) and node.arg:
        return {node.arg}
    if isinstance(node, ast.alias):
        return {*node.name.split("."), node.asname or ""}
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and "`" not in node.value:
        return set(re.findall(r"\w+", node.value))
    return set()


def prose(text: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings and comments of a file, with their lines."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@cache
def code() -> Code:
    return Code()


def test_names_in_backticks_are_there() -> None:
    unknown = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, texts in code().prose.items()
        for line, text in texts
        for name in re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)`", text)
        if not name.endswith(FILES) and name not in ALLOWED and not code().has(name)
    ]
    assert unknown == []


def test_what_is_gone_is_found() -> None:
    for known_name in (
        "maskserve_triton.edit_front",
        "ResourceStates.wait",
        "memory_table",
        "control_link.reuse.Reuse",
    ):
        assert code().has(known_name), known_name
    for removed_name in (
        "batch.residuals.Residuals",
        "ResourceStates.nothing_of_it",
        "stack.Rest",
        "q_spanz",
    ):
        assert not code().has(removed_name), removed_name
