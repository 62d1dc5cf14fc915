"""Node files: what is read of them, and the errors of those that cannot be served."""

from __future__ import annotations

import dataclasses
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
from msgspec import Meta

from maskserve_common.config import Config, ConfigError
from maskserve_common.config_file import config_of
from maskserve_workflows.node_files import NodeFiles, open_model, signatures
from maskserve_workflows.node_folders import check_worker_names, node_folders
from maskserve_workflows.node_request import ModelSetup
from maskserve_workflows.nodes import BUILT_IN, NODE_FILES, edit
from maskserve_workflows.ports import WorkflowError
from tests.support.workflows import node_path

HEAD = (
    "from maskserve_workflows.node_types import node, node_model\n"
    "from maskserve_workflows.ports import Mask, Picture\n"
)
TURN = '@node(model="turn", price_s=0.1)\ndef turn(picture: Picture) -> Picture: ...\n'
TURNER = '@node_model("turn")\nclass Turner:\n    def __init__(self, setup): ...\n'


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def read(folder: Path) -> tuple[NodeFiles, list[str]]:
    files = NodeFiles(edit)
    return files, files.read([folder])


def test_signatures_are_read_without_the_model(tmp_path: Path) -> None:
    """Neither its imports, nor its bases, nor its body."""
    text = (
        '"""A model."""\nfrom __future__ import annotations\n'
        "import math, nowhere\nfrom nowhere import Base\n"
        "from typing import Literal, NamedTuple\n" + HEAD
        + "WEIGHTS = nowhere.open('weights')\nSide = Literal['left', 'right']\n"
        + "class Turned(NamedTuple):\n    picture: Picture\n    mask: Mask\n"
        + '@node(model="turn", price_s=0.1)\n'
        + "def turn(picture: Picture, *, side: Side = 'left', by: float = math.pi) -> Turned:\n"
        + "    '''Turn it.'''\n    return nowhere.turn()\n"
        + '@nowhere.fast\n@node_model("turn", source="turn", kinds=("turner",))\n'
        + "class Turner(Base):\n    '''A turner.'''\n    size = nowhere.size\n"
    )  # fmt: skip
    files, problems = read(write(tmp_path, turn=text))
    assert problems == []
    assert files.types["turn"].outputs == {"picture": "picture", "mask": "mask"}
    assert files.types["turn"].about == "Turn it."
    [model] = files.classes("turn")
    assert (model.about, model.kinds, model.source) == ("A turner.", ("turner",), "turn")
    line = text.splitlines().index("import math, nowhere") + 1
    with pytest.raises(WorkflowError, match=rf"turn.py:{line}: ModuleNotFoundError: .*'nowhere'"):
        open_model(model, ModelSetup("", Config()))


def test_a_signature_does_not_depend_on_who_else_has_the_type(tmp_path: Path) -> None:
    """Python keeps one annotated type for equal bounds: here that with 0.0 and 7.0."""
    assert Annotated[float, Meta(ge=0.0, le=7.0)] is Annotated[float, Meta(ge=0, le=7)]
    text = HEAD + "from typing import Annotated\nfrom msgspec import Meta\n" + TURN.replace(
        "picture: Picture)", "picture: Picture, *, by: Annotated[float, Meta(ge=0, le=7)] = 1)"
    )  # fmt: skip
    files, problems = read(write(tmp_path, turn=text + TURNER))
    assert problems == []
    assert '"maximum":7,"minimum":0' in files.types["turn"].signature


@pytest.mark.parametrize("name", sorted(path.stem for path in BUILT_IN.glob("[a-z]*.py")))
def test_signatures_are_those_of_the_whole_file(name: str) -> None:
    part = signatures(BUILT_IN / f"{name}.py")
    whole = vars(importlib.import_module(f"maskserve_engine.nodes.{name}"))
    declared = 0
    for key, value in part.items():
        attributes = getattr(value, "__dict__", {})
        if (kind := attributes.get("node_type")) is not None:
            oracle = vars(whole[key])["node_type"]
            assert kind.signature == oracle.signature
            settings, returns = kind.settings, kind.returns
            assert dataclasses.replace(oracle, settings=settings, returns=returns) == kind
        elif (model := attributes.get("node_model")) is not None:
            assert model == vars(whole[key])["node_model"]
        else:
            continue
        declared += 1
    members = [x for x in whole.values() if getattr(x, "__module__", "") == whole["__name__"]]
    marks = [{"node_type", "node_model"} & getattr(x, "__dict__", {}).keys() for x in members]
    assert declared == sum(map(bool, marks))


def test_a_signature_tells_versions_apart(tmp_path: Path) -> None:
    signatures = set()
    variants = ("", ", *, by: int = 1", ", *, by: int = 2", ", *, by: float = 1", ", mask: Mask")
    for parameters in variants:
        text = TURN.replace("picture: Picture", f"picture: Picture{parameters}")
        files, problems = read(write(tmp_path, turn=HEAD + text + TURNER))
        assert problems == []
        assert files.types["turn"].signature == read(tmp_path)[0].types["turn"].signature
        signatures.add(files.types["turn"].signature)
    assert len(signatures) == len(variants)


GOOD = HEAD + TURN.replace("turn", "good") + TURNER.replace("turn", "good")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def turn(:", r"bad.py:1: SyntaxError"),
        (HEAD + "import nowhere\n" + TURN.replace("0.1", "nowhere.s") + TURNER,
         r"bad.py:3: ModuleNotFoundError: No module named 'nowhere'"),
        (HEAD + TURN.replace(": Picture)", ": int)") + TURNER,
         r"bad.py:3: turn.picture: is int; accepted: a port \(Picture, "),
        (HEAD + TURN.replace(": Picture)", ")") + TURNER,
         r"bad.py:3: turn.picture: is without a type; accepted: a port"),
        (HEAD + TURN.replace(" -> Picture", "") + TURNER,
         r"bad.py:3: turn.return: is without a type; accepted: a port"),
        (HEAD + TURN.replace(" -> Picture", " -> list[int]") + TURNER,
         r"bad.py:3: turn.return: is list.*; accepted: a port"),
        (HEAD + TURN.replace(": Picture)", ": Picture, *, by: object = 1)") + TURNER,
         r"bad.py:3: turn.by: has no type that JSON has"),
        (HEAD + TURN.replace(": Picture)", ": Image)") + TURNER,
         r"bad.py:3: NameError: name 'Image' is not defined"),
        (HEAD + TURN.replace("def turn", "def Turn") + TURNER,
         r"bad.py:3: Turn: cannot name a node"),
        (HEAD + TURN, r"bad.py: node turn is run by model turn, which no file declares"),
        (HEAD + TURN.replace('"turn"', '"goood"'), r"which no file declares \(did you mean good\?"),
        (HEAD + TURN.replace('"turn"', '"edit"'), r"bad.py: node turn names model 'edit'"),
        (HEAD + TURN.replace("turn", "good"), r"bad.py: node good is declared in .*a_good.py, too"),
        (HEAD + TURNER.replace("turn", "good"), r"bad.py: model good is declared in .*good.py"),
        (HEAD + TURN.replace("turn", "edit"), r"bad.py: node edit is declared in .*nodes.py"),
        (HEAD + TURN + TURNER.replace('"turn"', '"turn", source="load"'),
         r"bad.py: Turner has source 'load'; accepted: "),
        (HEAD + TURN + TURNER.replace('"turn"', '"turn", source="other"'),
         r"bad.py: Turner has source 'other'; accepted: turn"),
        ("import os\n", r"bad.py: declares nothing"),
        (HEAD + "import sys\nS = sys.exit('no')\n" + TURN.replace("0.1", "S") + TURNER,
         r"bad.py:4: SystemExit: no"),
        (HEAD + TURN + TURNER.replace('"turn"', "5"), r"bad.py: Turner names model 5; accepted: "),
        (HEAD + TURN + TURNER + TURNER.replace("Turner", "Other"),
         r"bad.py: model turn is declared in .*bad.py, too"),
    ],
)  # fmt: skip
def test_a_bad_file_is_left_out_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    files, problems = read(write(tmp_path, a_good=GOOD, bad=text))
    [problem] = problems
    assert re.search(words, problem), problem
    assert set(files.types) == {"edit", "good"}
    assert files.functions["good"].__name__ == "good"
    write(tmp_path, bad=HEAD + TURN + TURNER)
    assert files.read([tmp_path]) == []  # the file is repaired
    assert set(files.types) == {"edit", "good", "turn"}


def test_a_folder_that_is_not_there_is_an_error_of_its_own(tmp_path: Path) -> None:
    [problem] = NodeFiles(edit).read([tmp_path / "no"])
    assert problem == f"{tmp_path / 'no'}: is not a folder; accepted: a folder of node files"


def test_classes_of_one_model_accept_different_folders(tmp_path: Path) -> None:
    other = '@node_model("turn", source="turn", kinds=("b",))\nclass Other: ...\n'
    first = TURNER.replace('"turn"', '"turn", source="turn", kinds=("a",)')
    files, problems = read(write(tmp_path, turn=HEAD + TURN + first, other=HEAD + other))
    assert problems == []
    assert {model.class_name: model.kinds for model in files.classes("turn")} == {
        "Turner": ("a",), "Other": ("b",)
    }  # fmt: skip
    _, problems = read(write(tmp_path, other=HEAD + other.replace('"b"', '"a"')))
    assert len(problems) == 1


def test_keys_of_nodes_are_those_that_files_declare(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.bin").write_bytes(bytes(50))
    text = TURNER.replace('"turn"', '"turn", source="turn"')
    write(tmp_path, turn=HEAD + TURN + text)
    tables: dict[str, Any] = {"nodes": {"turn": str(tmp_path / "weights")}}
    with pytest.raises(ConfigError, match=r"^\[nodes\] turn: is not a known key"):
        node_folders(config_of(tables).nodes)
    with node_path(tmp_path) as problems:
        assert problems == []
        [folder] = node_folders(config_of(tables).nodes)["turn"]
        assert folder.nbytes == 50
        tables["nodes"]["turns"] = "x"
        with pytest.raises(ConfigError, match=r"^\[nodes\] turns: .* \(did you mean turn\?\)"):
            node_folders(config_of(tables).nodes)


def test_a_worker_refuses_keys_of_nodes_that_no_file_declares(tmp_path: Path) -> None:
    """A name of text was taken for a model's by every process but a node server."""
    text = TURNER.replace('"turn"', '"turn", source="turn"')
    folder = str(write(tmp_path, turn=HEAD + TURN + text))
    tables: dict[str, Any] = {"nodes": {"find": "a", "turns": "x", "path": [folder]}}
    with node_path():  # leaves the files of this process as they were
        with pytest.raises(ConfigError, match=r"^\[nodes\] turns: .* \(did you mean turn\?\)"):
            check_worker_names(config_of(tables).nodes)
        tables["nodes"]["turn"] = tables["nodes"].pop("turns")
        check_worker_names(config_of(tables).nodes)


def test_a_router_reads_built_in_files_without_the_model_libraries() -> None:
    probe = (
        "import sys, maskserve_workflows.nodes as nodes\n"
        "assert 'segment' in nodes.NODE_TYPES and nodes.agrees\n"
        "assert not {'torch', 'transformers', 'httpx', 'diffusers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)
    kinds = {kind for model in NODE_FILES.models for kind in model.kinds}
    assert {"clipseg", "grounding-dino", "sam", "sam2", "sam2_video", "swin2sr", "clip"} <= kinds
