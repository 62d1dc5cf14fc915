"""The command line: what it sends, prints and writes, and how it ends."""

from __future__ import annotations

import argparse
import hashlib
import http.server
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from msgspec import structs
from PIL import Image

from maskserve_benchmarks.checkout import DEMO_MODEL as DEMO
from maskserve_client import Client
from maskserve_client.address import grpc_address, http_address
from maskserve_client.cli import main, parser
from maskserve_client.commands import write_whole
from maskserve_common.config import Config, ModelConfig
from maskserve_common.contracts.keys import template_id
from maskserve_lora.operations import AdapterOperations
from tests.fakes.loras import OTHER_MODEL, lora, write
from tests.fakes.pictures import blob_mask, encode, scene
from tests.fakes.triton_server import PAINT, STATUS, FakeServer, FakeWorker

SIZE = (40, 56)
SOURCE, MASK = scene(*SIZE), blob_mask(*SIZE)
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    with FakeServer() as worker:
        yield worker


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(encode(SOURCE))
    (tmp_path / "m.png").write_bytes(encode(MASK))
    return tmp_path


def edit(worker_url: str, folder: Path, *more: str, out: str = "b.png") -> int:
    pictures = ["--image", str(folder / "a.png"), "--mask", str(folder / "m.png")]
    target = ["--prompt", "a red star", "--out", str(folder / out)]
    return main(["edit", "--url", worker_url, *pictures, *target, *more])


def check_file(path: Path) -> None:
    pixels = np.asarray(Image.open(path))
    np.testing.assert_array_equal(pixels[MASK == 0], SOURCE[MASK == 0])
    assert (pixels[MASK > 0] == PAINT).all()


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_an_edit_is_written_and_summed_up(
    worker: FakeWorker, folder: Path, capsys: Capture, stream: str
) -> None:
    assert edit(worker.url, folder, "--seed", "5", stream) == 0
    check_file(folder / "b.png")
    line = capsys.readouterr().out
    assert line.startswith(f"{folder / 'b.png'}: seed 5, 4 steps, ")
    assert " tokens active, 100% computed, cache off" in line
    expected = b"edit_stream" if stream == "--stream" else b"edit"
    assert worker.requests[0]["model_name"] == expected
    assert sorted(path.name for path in folder.iterdir()) == ["a.png", "b.png", "m.png"]


def test_every_option_reaches_the_server(worker: FakeWorker, folder: Path) -> None:
    options = {
        "--mask-mode": ("mask_mode", "white"),
        "--dilate": ("mask_dilate", 2),
        "--feather": ("mask_feather", 3),
        "--seed": ("seed", 9),
        "--steps": ("num_inference_steps", 3),
        "--strength": ("strength", 0.5),
        "--guidance": ("guidance_scale", 2.5),
        "--true-cfg": ("true_cfg_scale", 1.0),
        "--model": ("model", "demo"),
        "--cache": ("cache", "off"),
        "--priority": ("priority", 4),
        "--deadline-ms": ("deadline_ms", 60000),
        "--request-id": ("request_id", "mine"),
    }
    words = [word for name, (_, value) in options.items() for word in (name, str(value))]
    assert edit(worker.url, folder, "--reproducible", *words, "--timeout", "30", out="b.webp") == 0
    settings = json.loads(worker.requests[0]["SETTINGS"])
    expected = dict(options.values()) | {"output_format": "webp", "reproducible": True}
    assert settings == expected
    assert Image.open(folder / "b.webp").format == "WEBP"


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_a_picture_is_made_without_a_source(
    worker: FakeWorker, folder: Path, capsys: Capture, stream: str
) -> None:
    worker.edit_kinds = frozenset({"generate"})
    out = folder / "made.png"
    sizes = {"--seed": "5", "--steps": "3", "--size": "48x32"}
    words = [word for pair in sizes.items() for word in pair]
    command = ["generate", "--url", worker.url, "--prompt", "a red star", "--out", str(out), stream]
    assert main([*command, *words]) == 0
    assert Image.open(out).size == (48, 32)
    assert capsys.readouterr().out.startswith(f"{out}: seed 5, 3 steps, ")
    request = worker.requests[0]
    assert (request["IMAGE"], request["MASK"]) == (b"", b"")
    settings = json.loads(request["SETTINGS"])
    expected = {"seed": 5, "num_inference_steps": 3, "size": "48x32", "output_format": "png"}
    assert settings == {**expected, **({"progress": True} if stream == "--stream" else {})}


def test_references_are_sent_behind_the_image(worker: FakeWorker, folder: Path) -> None:
    worker.edit_kinds, worker.most_pictures = frozenset({"edit"}), 3
    image, other, out = (str(folder / name) for name in ("a.png", "m.png", "b.png"))
    command = ["edit", "--url", worker.url, "--image", image, "--prompt", "x", "--out", out]
    words = ["--strength", "0.5", "--region", "off", "--reference", other, "--reference", image]
    assert main([*command, *words]) == 0
    [request] = worker.requests
    assert json.loads(request["SETTINGS"]).items() >= {"strength": 0.5, "region": "off"}.items()
    sent = [request[name] for name in ("IMAGE", "IMAGE[1]", "IMAGE[2]")]
    assert sent == [Path(name).read_bytes() for name in (image, other, image)]


def test_an_edit_needs_no_mask(worker: FakeWorker, folder: Path, capsys: Capture) -> None:
    image, out = str(folder / "a.png"), str(folder / "b.png")
    command = ["edit", "--url", worker.url, "--image", image, "--prompt", "x", "--out", out]
    assert main(command) == 2
    assert "MASK: is missing: this model repaints masks only" in capsys.readouterr().err
    worker.edit_kinds = frozenset({"edit"})
    assert main([*command, "--strength", "0.5", "--size", "48x32"]) == 0
    assert Image.open(out).size == (48, 32)


def test_nothing_is_sent_that_was_not_given(worker: FakeWorker, folder: Path) -> None:
    assert edit(worker.url, folder, out="b.JPG") == 0
    assert json.loads(worker.requests[0]["SETTINGS"]) == {"output_format": "jpeg"}


def test_warnings_go_to_the_terminal(worker: FakeWorker, folder: Path, capsys: Capture) -> None:
    (folder / "all.png").write_bytes(encode(Image.new("L", (56, 40), 255)))
    assert edit(worker.url, folder, "--mask", str(folder / "all.png")) == 0
    assert "warning: MASK: 100% of the picture is edited" in capsys.readouterr().err


def test_json_prints_the_meta_alone(worker: FakeWorker, folder: Path, capsys: Capture) -> None:
    assert edit(worker.url, folder, "--json", "--stream") == 0
    meta = json.loads(capsys.readouterr().out)
    assert (meta["event"], meta["steps"]) == ("final", 4)


def test_previews_are_written(worker: FakeWorker, folder: Path) -> None:
    options = ["--previews", str(folder / "steps"), "--preview-every", "2", "--steps", "5"]
    assert edit(worker.url, folder, *options) == 0
    names = sorted(path.name for path in (folder / "steps").iterdir())
    assert names == ["step-0002.png", "step-0004.png"]
    check_file(folder / "steps" / "step-0004.png")


def test_the_url_comes_from_the_environment(
    worker: FakeWorker, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("MASKSERVE_URL", worker.url)
    assert main(["status"]) == 0
    assert "fake-0" in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_status_without_a_live_worker_is_told_and_fails(
    worker: FakeWorker, capsys: Capture, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    monkeypatch.setitem(STATUS, "alive", False)
    assert main(["status", "--url", worker.url, *more]) == 3
    output = capsys.readouterr()
    assert "fake-0" in output.out
    assert "no worker is alive" in output.err


def test_status_tells_rows_and_tiers(worker: FakeWorker, capsys: Capture) -> None:
    assert main(["status", "--url", worker.url]) == 0
    text = capsys.readouterr().out
    assert "fake-0: demo, ready\n" in text
    assert "running  1 of 8" in text
    assert "r1: dense, 3 steps left, 256 of 256 tokens" in text
    assert "host     1 templates, 1.0 MiB" in text
    assert main(["status", "--url", worker.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["worker"] == "fake-0"


def test_templates_are_added_listed_used_and_removed(
    worker: FakeWorker, folder: Path, capsys: Capture
) -> None:
    def run(*words: str) -> str:
        assert main(["templates", *words, "--url", worker.url]) == 0
        return capsys.readouterr().out

    name = template_id(SOURCE)
    assert run("add", str(folder / "a.png")) == f"{name}  {folder / 'a.png'}\n"
    assert run("ls") == f"{name}  registered, not cached\n"
    listed = {"template_id": name, "registered": True, "entries": []}
    assert json.loads(run("ls", "--json")) == {"templates": [listed]}
    assert run("pin", name) == f"pin {name}\n"
    assert run("unpin", name) == f"unpin {name}\n"
    words = ["--template-id", name, "--mask", str(folder / "m.png"), "--prompt", "x"]
    assert main(["edit", "--url", worker.url, *words, "--out", str(folder / "b.png")]) == 0
    check_file(folder / "b.png")
    run("rm", name)
    assert run("ls") == ""
    assert main(["templates", "rm", name, "--url", worker.url]) == 2


def test_a_template_that_cannot_be_named_in_an_edit_is_marked(capsys: Capture) -> None:
    with FakeServer(cached_only=["c" * 32]) as worker:
        assert main(["templates", "ls", "--url", worker.url]) == 0
    assert capsys.readouterr().out == (
        f"{'c' * 32}  cached on disk 1.0 MiB only: register the image to edit it by this id\n"
        "1 templates, cached on disk 1.0 MiB\n"
    )


def test_templates_of_many_entries_are_summed_by_tier(
    monkeypatch: pytest.MonkeyPatch, worker: FakeWorker, capsys: Capture
) -> None:
    first_entries = [
        {"tier": tier, "bytes": 2**20, "whole": True} for tier in ("device", "host", "device")
    ]
    second_entries = [{"tier": "host", "bytes": 2**21, "whole": False, "pinned": True}]
    listed = [
        {"template_id": letter * 32, "registered": True, "entries": entries}
        for letter, entries in (("a", first_entries), ("b", second_entries))
    ]
    monkeypatch.setattr(Client, "control", lambda *_: {"templates": listed})
    assert main(["templates", "ls", "--url", worker.url]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{'a' * 32}  registered, cached on device 2.0 MiB, host 1.0 MiB",
        f"{'b' * 32}  registered, cached on host 2.0 MiB (in part), pinned",
        "2 templates, cached on device 2.0 MiB, host 3.0 MiB (in part), pinned",
    ]


def test_a_server_that_loads_is_waited_for(
    worker: FakeWorker, folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(["loading", "loading", "ready"])
    status = STATUS.copy()
    monkeypatch.setattr(Client, "control", lambda *_: {**status, "state": next(states)})
    assert edit(worker.url, folder, "--wait", "60") == 0
    assert "not ready yet, loading for 0 s\n" in capsys.readouterr().err
    check_file(folder / "b.png")
    assert list(states) == []


def test_a_server_that_does_not_come_is_waited_for_no_longer_than_asked(
    folder: Path, capsys: Capture
) -> None:
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{bound_socket.getsockname()[1]}"
        assert edit(url, folder, "--wait", "0.3") == 3
        assert "not ready yet, loading for 0 s" in (error_output := capsys.readouterr().err)
        assert f"[UNAVAILABLE] {url}: not ready within 0.3 s" in error_output
        assert edit(url, folder) == 3
        assert "use --wait SECONDS to wait for a server that is loading" in capsys.readouterr().err


def test_edits_are_cancelled_by_their_ids(worker: FakeWorker, capsys: Capture) -> None:
    assert main(["cancel", "in-flight", "--url", worker.url]) == 0
    assert capsys.readouterr().out == "cancelled in-flight\n"
    assert main(["cancel", "in-flight", "gone", "--url", worker.url]) == 2
    output = capsys.readouterr()
    assert output.out == "cancelled in-flight\n"
    assert output.err == "maskserve: [INVALID_REQUEST] ID: no edit in flight has this id: gone\n"
    assert main(["cancel", "in-flight", "--json", "--url", worker.url]) == 0
    assert json.loads(capsys.readouterr().out) == {"in-flight": True}


def test_a_worker_is_drained(worker: FakeWorker, capsys: Capture) -> None:
    assert main(["drain", "--url", worker.url]) == 0
    assert capsys.readouterr().out == "takes no new edits; 3 in flight\n"


# Adapters


def test_adapters_are_listed_checked_loaded_and_evicted(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path / "store" / "hollow.safetensors", lora(rank=7))
    write(tmp_path / "store" / "other.safetensors", lora(OTHER_MODEL, prefix="unet."))
    plain = Config(runtime_dir=str(tmp_path), model=ModelConfig(path=str(DEMO)))
    served = structs.replace(
        plain, adapters=structs.replace(plain.adapters, store=str(tmp_path / "store"))
    )
    with FakeServer(adapters=AdapterOperations(served)) as worker:

        def run(*words: str, code: int = 0) -> str:
            assert main(["adapters", *words, "--url", worker.url]) == code
            return capsys.readouterr().out

        listed = run("ls").splitlines()
        assert (
            listed[0].split(maxsplit=1)[1].startswith("rank 7, 0.0 MiB, denoiser; in the storage")
        )
        assert "other" in listed[1]
        assert "not served: it is for another model" in listed[1]
        assert run("load", "hollow") == "load hollow\n"
        assert run("ls").splitlines()[0].endswith("; host")
        assert run("check", "hollow").startswith("hollow: rank 7,")
        run("check", "other", code=2)
        run("load", "nothing", code=2)
        assert run("evict", "hollow") == "evict hollow\n"
        assert json.loads(run("ls", "--json"))["adapters"][0]["tiers"] == []


def test_files_of_adapters_are_checked_without_a_server(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "mine.safetensors"
    write(path)
    raw = path.read_bytes()
    assert main(["adapters", "check", str(path), "--model", str(DEMO), "--json"]) == 0
    [about] = json.loads(capsys.readouterr().out)
    assert about["digest"] == hashlib.sha256(raw).hexdigest()
    path.write_bytes(raw[:-1])
    assert main(["adapters", "check", str(path)]) == 2
    assert "cut short" in capsys.readouterr().err
    write(path, lora(OTHER_MODEL, prefix="unet."))
    assert main(["adapters", "check", str(path), "--model", str(DEMO)]) == 2
    assert "another model" in capsys.readouterr().err
    assert main(["adapters", "check", str(tmp_path / "gone.safetensors")]) == 2


def test_loras_are_asked_for_by_name_and_scale(
    worker: FakeWorker, folder: Path, capsys: Capture
) -> None:
    options = ["--lora", "hollow:0.8", "--lora", "ninth-colour", "--lora", "x:-1.5"]
    assert edit(worker.url, folder, "--no-stream", *options, "--adapters", "fast") == 2
    assert "SETTINGS.loras: adapters are not served here" in capsys.readouterr().err
    settings = json.loads(worker.requests[-1]["SETTINGS"])
    assert settings["loras"] == [
        {"name": "hollow", "scale": 0.8},
        {"name": "ninth-colour"},
        {"name": "x", "scale": -1.5},
    ]
    assert settings["adapters"] == "fast"
    assert edit(worker.url, folder, "--lora", "hollow:much") == 2
    assert "--lora: 'much' is not a number" in capsys.readouterr().err


# How it ends


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("[INVALID_REQUEST] MASK: is bad", grpc.StatusCode.INVALID_ARGUMENT, 2),
        ("[TEMPLATE_NOT_FOUND] gone", grpc.StatusCode.NOT_FOUND, 2),
        ("[ADAPTER_NOT_FOUND] gone", grpc.StatusCode.NOT_FOUND, 2),
        ("[OVERLOADED] full", grpc.StatusCode.UNAVAILABLE, 3),
        ("[DEADLINE_EXCEEDED] late", grpc.StatusCode.UNAVAILABLE, 3),
        ("[CANCELLED] by an operator", grpc.StatusCode.CANCELLED, 3),
        ("[ENGINE_FAILED] dead", grpc.StatusCode.INTERNAL, 4),
        ("boom", grpc.StatusCode.UNKNOWN, 4),
    ],
)
@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_exit_codes(
    folder: Path, capsys: Capture, text: str, status: grpc.StatusCode, code: int, stream: str
) -> None:
    (folder / "b.png").write_bytes(b"what was there before")
    with FakeServer(error=text, error_status=status) as worker:
        assert edit(worker.url, folder, stream) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("maskserve: [")
    assert text.partition("] ")[2] in captured.err
    assert (folder / "b.png").read_bytes() == b"what was there before"


def test_nobody_there_is_3(folder: Path, capsys: Capture) -> None:
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{bound_socket.getsockname()[1]}"
        assert edit(url, folder) == 3
        assert main(["status", "--url", url]) == 3
    assert "[UNAVAILABLE]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--image", "none.png", "--mask", "m.png", "--out", "b.png"], "none.png: No such file"),
        (
            ["--image", "a.png", "--mask", "m.png", "--out", "b.gif"],
            "--out: b.gif has an unknown suffix",
        ),
        (["--image", "a.png", "--mask", "m.png", "--out", "no/b.png"], "there is no folder no"),
        (["--image", "a.png", "--mask", "a.png", "--out", "b.png", "--seed", "-1"], "seed"),
        (["--image", "m.png", "--mask", "t.png", "--out", "b.png"], "MASK"),
        (
            ["--image", "a.png", "--mask", "m.png", "--out", "b.png", "--preview-every", "2"],
            "--preview-every: needs --previews",
        ),
    ],
)
def test_bad_input_is_2_and_says_what(
    worker: FakeWorker,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    (folder / "t.png").write_bytes(encode(MASK.T.copy()))
    assert main(["edit", "--url", worker.url, "--prompt", "x", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "b.png").exists()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["edit"],
        ["paint"],
        ["templates"],
        ["edit", "--steps", "many"],
        ["edit", "--image", "a", "--template-id", "b", "--mask", "m", "--prompt", "", "--out", "o"],
    ],
)
def test_misused_options_are_2(words: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: maskserve" in capsys.readouterr().err


def test_help_names_the_exit_codes(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "the server's fault" in text
    for command in ("edit", "status", "templates"):
        assert command in text


def test_every_option_has_help() -> None:
    def options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    yield from options(command)
            else:
                yield action

    actions = list(options(parser()))
    assert len(actions) > 40
    assert [action.dest for action in actions if not action.help] == []


def test_the_version_is_told(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"maskserve \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize("url", ["https://host/v2", "ftp://host:1", "localhost:port"])
def test_what_is_no_address_is_told(url: str, capsys: Capture) -> None:
    assert main(["status", "--url", url]) == 2
    error_output = capsys.readouterr().err
    assert f"url: {url} is n" in error_output
    assert "accepted: HOST:PORT" in error_output


def test_a_scheme_of_grpc_is_taken(worker: FakeWorker) -> None:
    assert main(["status", "--url", f"grpc://{worker.url}/"]) == 0


def test_either_address_finds_the_other() -> None:
    class Http(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Http)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_port
    try:
        for url in (f"127.0.0.1:{port}", f"http://127.0.0.1:{port}", f"127.0.0.1:{port + 1}"):
            assert grpc_address(url) == f"127.0.0.1:{port + 1}"
        for url in (f"127.0.0.1:{port}", f"http://127.0.0.1:{port}", f"127.0.0.1:{port + 1}"):
            assert http_address(url) == f"http://127.0.0.1:{port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_port_of_grpc_alone_is_taken(worker: FakeWorker) -> None:
    assert grpc_address(worker.url) == worker.url


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_an_interrupt_cancels_on_the_server_and_is_130(
    folder: Path, number: signal.Signals, stream: str
) -> None:
    with FakeServer(step_s=30) as worker:
        words = ["--image", "a.png", "--mask", "m.png", "--prompt", "x", "--out", "b.png", stream]
        command = [sys.executable, "-m", "maskserve_client.cli", "edit", "--url", worker.url]
        with subprocess.Popen(
            [*command, *words],
            cwd=folder,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ) as process:
            assert worker.started.wait(60)
            process.send_signal(number)
            _, error = process.communicate(timeout=30)
        assert process.returncode == 130
        assert error == b"maskserve: interrupted\n"
        assert worker.withdrawn.wait(30)
    assert sorted(path.name for path in folder.iterdir()) == ["a.png", "m.png"]


# Files


def test_files_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "out.png"
    write_whole(target, b"first")
    write_whole(target, b"second")
    assert target.read_bytes() == b"second"

    (folder := tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(folder, b"third")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "out.png"]


def test_written_files_have_ordinary_permissions(tmp_path: Path) -> None:
    plain, written = tmp_path / "plain", tmp_path / "written"
    plain.touch()
    write_whole(written, io.BytesIO(b"x").getvalue())
    assert written.stat().st_mode == plain.stat().st_mode


def test_a_terminal_gets_a_progress_bar(
    worker: FakeWorker, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    worker.step_s = 0.15  # the bar is drawn ten times a second at most
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert edit(worker.url, folder) == 0
    assert worker.requests[0]["model_name"] == b"edit_stream"
    assert "3/4" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert edit(worker.url, folder, "--stream") == 0
    assert capsys.readouterr().err == ""


def test_output_that_nobody_reads_is_no_fault(worker: FakeWorker) -> None:
    command = [sys.executable, "-m", "maskserve_client.cli", "status", "--url", worker.url]
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, "")
