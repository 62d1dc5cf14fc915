"""Where a worker's log lines go, and the supervisor's among them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from maskserve_common.config import Config, LogConfig
from maskserve_serving.errors import ServeError
from maskserve_serving.files import WorkerFiles
from maskserve_serving.options import ServeOptions
from maskserve_serving.runtime import Runtime
from maskserve_serving.spec import Spec
from maskserve_serving.supervisor_log import SupervisorLog


def spec(log_dir: Path) -> Spec:
    options = ServeOptions(model="m", log_dir=log_dir)
    server = Runtime(Path("/t/bin/tritonserver"), None, (), "x")
    return Spec(2, options, server, {}, WorkerFiles(Path("/r"), Path("/t")))


@pytest.mark.parametrize(
    ("tables", "file"),
    [
        ({}, "/logs/worker-2.jsonl"),
        ({"log": {"level": "ERROR"}}, "/logs/worker-2.jsonl"),
        ({"log": {"file": "/mine"}}, "/mine"),
        ({"log": {"file": ""}}, ""),
        ({"log": {"format": "text"}}, None),  # beside Triton's own, for people
    ],
)
def test_each_worker_has_a_file_unless_told_otherwise(
    tables: dict[str, Any], file: str | None
) -> None:
    log = spec(Path("/logs")).with_log(tables).get("log", {})
    assert log.get("file") == file
    assert {**tables.get("log", {}), "file": file} == {"file": None, **log}


def test_the_supervisors_lines(tmp_path: Path) -> None:
    file = tmp_path / "worker-0.jsonl"
    log = SupervisorLog()
    log.write(logging.ERROR, "unheard", "failed")
    config = Config(log=LogConfig(file=str(file)))
    for _ in range(2):  # as after a restart
        log.open(config)
        log.write(logging.INFO, "ready", "ready", after_s=1.5)
    log.close()
    log.write(logging.INFO, "unheard", "stopped")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 2
    assert lines[0]["model"] == "supervisor"
    assert (lines[0]["event"], lines[0]["state"], lines[0]["after_s"]) == ("worker", "ready", 1.5)


def test_without_a_file_there_is_no_journal(capfd: pytest.CaptureFixture[str]) -> None:
    log = SupervisorLog()
    log.open(Config())
    log.write(logging.ERROR, "unheard", "failed")
    assert capfd.readouterr() == ("", "")


def test_a_file_that_cannot_be_opened_stops_the_start_and_no_restart(tmp_path: Path) -> None:
    config = Config(log=LogConfig(file=str(tmp_path)))
    with pytest.raises(ServeError, match=r"\[log\] file: cannot open .*: Is a directory"):
        SupervisorLog.check(config)
    log = SupervisorLog()
    log.open(config)
    log.write(logging.ERROR, "unheard", "failed")
