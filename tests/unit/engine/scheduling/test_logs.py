"""Log lines: one JSON object each, whole, whoever writes beside."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from maskserve_common.config import Config, ConfigError, LogConfig
from maskserve_common.logs import JsonFormatter, TextFormatter, about, log_handler, start_log

ROOT = Path(__file__).parents[4]


def record(message: str = "hello", *args: Any, **values: Any) -> logging.LogRecord:
    log_record = logging.LogRecord("maskserve", logging.INFO, "x.py", 1, message, args, None)
    for name, value in values.items():
        setattr(log_record, name, value)
    return log_record


def parsed(log_record: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter("worker-0", "edit").format(log_record)
    assert "\n" not in line
    values = json.loads(line)
    assert isinstance(values, dict)
    return values


@pytest.fixture
def root_log() -> Iterator[logging.Logger]:
    """The root logger, as it was before afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield root
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = handlers, level


def test_a_line_says_when_who_and_what() -> None:
    values = parsed(record("%d of %s", 3, "four"))
    when = datetime.fromisoformat(values.pop("time").replace("Z", "+00:00"))
    assert abs((datetime.now(timezone.utc) - when).total_seconds()) < 60
    assert values == {
        "level": "INFO",
        "worker": "worker-0",
        "model": "edit",
        "logger": "maskserve",
        "message": "3 of four",
    }


def test_fields_stand_beside_the_lines_own_and_never_replace_them() -> None:
    fields = {"steps": 4, "level": "forged", "path": Path("/a")}
    values = parsed(record(event="edit", request_id="mine", fields=fields))
    assert (values["event"], values["request_id"], values["steps"]) == ("edit", "mine", 4)
    assert values["level"] == "INFO"
    assert values["path"] == "/a"
    assert "request_id" not in parsed(record(**about("")))


def test_an_exception_is_a_field() -> None:
    try:
        raise ValueError("boom\nboom")
    except ValueError:
        log_record = record(exc_info=sys.exc_info())
    assert parsed(log_record)["exc"].endswith("ValueError: boom\nboom")


@pytest.mark.parametrize("text", ['"', "two\nlines", "\ud800 half a pair", "ä\u2028\x00"])
def test_any_text_stays_one_line(text: str) -> None:
    assert parsed(record("%s", text, request_id=text))["message"] == text


def test_text_for_people() -> None:
    log_record = record("edit done", request_id="mine", fields={"steps": 4})
    line = TextFormatter("worker-0", "edit").format(log_record)
    assert line.endswith("Z INFO worker-0 edit: edit done request_id=mine steps=4")
    assert TextFormatter("w", "m").format(record("x")).endswith(" INFO w m: x")


def test_a_process_logs_into_its_file_from_its_level_on(
    tmp_path: Path, root_log: logging.Logger
) -> None:
    file = tmp_path / "worker-0.jsonl"
    start_log(Config(log=LogConfig(level="WARNING", file=str(file))), "encoder")
    logging.getLogger("maskserve").info("unheard")
    logging.getLogger("anybody").warning("heard")
    [line] = file.read_text().splitlines()
    assert json.loads(line)["message"] == "heard"
    assert json.loads(line)["model"] == "encoder"


def test_without_a_file_lines_go_to_standard_error(
    capsys: pytest.CaptureFixture[str], root_log: logging.Logger
) -> None:
    start_log(Config(), "encoder")
    logging.getLogger("maskserve").info("heard")
    assert json.loads(capsys.readouterr().err)["message"] == "heard"


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    config = LogConfig(file=str(tmp_path / "none" / "a.jsonl"))
    with pytest.raises(ConfigError, match=r"\[log\] file: cannot open .*none/a.jsonl: No such"):
        log_handler(config, "w", "m")


def test_a_file_that_was_moved_away_is_opened_anew(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    handler = log_handler(LogConfig(file=str(file)), "w", "m")
    handler.handle(record("one"))
    file.rename(tmp_path / "a.jsonl.1")
    handler.handle(record("two"))
    handler.close()
    handler.emit(record("too late"))
    assert [json.loads(line)["message"] for line in file.read_text().splitlines()] == ["two"]


WRITER = """
import logging, sys
from maskserve_common.config import Config
from maskserve_common.config import LogConfig
from maskserve_common.logs import start_log
start_log(Config(log=LogConfig(file=sys.argv[1])), sys.argv[2])
for number in range(200):
    logging.info("%d %s", number, "x" * (number * 97 % 20000))
"""


def test_lines_of_several_processes_never_mix(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(file), f"model-{number}"],
            env={"PYTHONPATH": str(ROOT / "engine")},
        )
        for number in range(4)
    ]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 4 * 200
    for number in range(4):
        messages = [line["message"] for line in lines if line["model"] == f"model-{number}"]
        assert [int(text.split()[0]) for text in messages] == list(range(200))


def test_a_full_disk_costs_lines_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """/dev/full can be opened, and every write to it says that no space is left."""
    file = tmp_path / "a.jsonl"
    handler = log_handler(LogConfig(file=str(file)), "w", "m")
    handler.handle(record("one"))
    file.rename(tmp_path / "kept")
    file.symlink_to("/dev/full")
    for _ in range(3):
        handler.handle(record("lost"))
    err = capfd.readouterr().err
    assert err == f"cannot write {file}: No space left on device; lines are lost\n"
    file.unlink()
    (tmp_path / "kept").rename(file)
    handler.handle(record("two"))
    handler.close()
    messages = [json.loads(line)["message"] for line in file.read_text().splitlines()]
    assert messages == ["one", "3 lines before this one could not be written", "two"]


def test_a_file_that_cannot_be_opened_anew_is_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    handler = log_handler(LogConfig(file=str(folder / "a.jsonl")), "w", "m")
    folder.rename(tmp_path / "away")
    for _ in range(2):
        handler.handle(record("lost"))
    folder.mkdir()
    handler.handle(record("two"))
    handler.close()
    assert len((folder / "a.jsonl").read_text().splitlines()) == 2


def test_a_process_serves_without_its_log_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root_log: logging.Logger
) -> None:
    start_log(Config(log=LogConfig(file=str(tmp_path / "none" / "a.jsonl"))), "encoder")
    logging.getLogger("maskserve").info("heard")
    assert json.loads(capsys.readouterr().err)["message"] == "heard"
