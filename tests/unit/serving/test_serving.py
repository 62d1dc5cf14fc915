"""The parts of serving that need no server."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import tomli_w

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_client.wire import DEFAULT_URL
from maskserve_common.config import Config, ConfigError, SafetyConfig, gpus_required
from maskserve_common.config_file import config_of
from maskserve_serving import command, files, ports, runtime, shm_cleanup, triton_log
from maskserve_serving.errors import ServeError
from maskserve_serving.options import ServeOptions, default_cache_dir
from maskserve_serving.source import (
    node_path,
    node_tables,
    resolve_model,
    with_model,
    with_model_cache,
    with_node_folders,
)
from maskserve_serving.spec import Spec
from maskserve_serving.supervisor import Supervisor


def test_a_taken_port_is_named() -> None:
    base = ports.free_base_port()
    worker_ports = ports.Ports.of_worker(base, 0)
    ports.check_free("127.0.0.1", worker_ports)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", worker_ports.grpc))
        listener.listen()
        with pytest.raises(ServeError, match=rf"port {worker_ports.grpc} \(gRPC\) on 127.0.0.1"):
            ports.check_free("127.0.0.1", worker_ports)
        assert ports.free_base_port() != base


def test_processes_started_together_look_for_ports_far_apart() -> None:
    """Each may have found and not yet bound what the other would find."""
    first = 4000
    for other_pid in range(first + 1, first + 20):
        distance = abs(ports.begins_at(first) - ports.begins_at(other_pid))
        assert min(distance, 500 - distance) > 10


def test_ports_of_a_worker_that_is_started_again_are_not_free() -> None:
    base = ports.free_base_port(2)
    worker_files = files.worker_files(base, 2)
    try:
        for file_set in worker_files:
            file_set.runtime.mkdir(parents=True)
        assert ports.free_base_port() not in (base, base + ports.STRIDE)
        assert ports.free_base_port(2) != base
    finally:
        for folder in files.folders_of(worker_files):
            shutil.rmtree(folder)
    assert ports.free_base_port(2) == base


def test_workers_do_not_share_ports() -> None:
    all_ports = [p for i in range(5) for p in ports.Ports.of_worker(9000, i).all().values()]
    assert len(set(all_ports)) == len(all_ports) == 15
    with pytest.raises(ServeError, match="does not exist"):
        ports.check_free("127.0.0.1", ports.Ports.of_worker(65530, 1))


LOG = """\
I1120 20:20:37.820480 9597 model_lifecycle.cc:839] "successfully loaded 'edit'"
E1120 20:20:38.000000 9597 model_lifecycle.cc:642] "failed to load 'denoiser' version 1: \
Internal: ConfigError: [model] path: cannot load /m/transformer: it is broken\\n\\nAt:\\n  \
/w/model.py(19): initialize\\n"
I1120 20:20:39.000000 9597 model_lifecycle.cc:777] "failed to load 'denoiser'"
error: creating server: Internal - failed to load all models
"""


def test_the_models_own_sentence_is_taken_from_the_log() -> None:
    assert triton_log.loaded_models(LOG) == {"edit"}
    expected = (
        "model denoiser failed to load: ConfigError: [model] path: cannot load /m/transformer: "
        "it is broken"
    )
    assert triton_log.failure(LOG) == triton_log.refusal(LOG) == expected
    still_loads = "".join(LOG.splitlines(keepends=True)[:2])
    assert triton_log.refusal(still_loads) == expected
    doubt = (
        LOG.splitlines()[0]
        + "\n"
        + (
            "E1120 20:20:38.0 9597 model_lifecycle.cc:642] \"failed to load 'encoder' version 1: "
            'Internal: Stub process is not healthy."\n'
        )
    )
    assert triton_log.failure(doubt) == (
        "model encoder failed to load: Stub process is not healthy."
    )
    assert triton_log.refusal(doubt) is None
    assert triton_log.refusal(doubt + still_loads) == expected
    assert triton_log.failure('I1120 20:20:37.8 1 x.cc:1] "all is well"\n') is None
    last = "error: creating server: Invalid argument - unknown backend\n"
    assert triton_log.failure(last) == "creating server: Invalid argument - unknown backend"


def test_what_triton_says_of_every_machine_without_a_gpu_is_no_reason() -> None:
    start = 'E1121 16:27:58.2 24763 server.cc:241] "CudaDriverHelper has not been initialized."\n'
    assert triton_log.failure(start) is None
    thrown = "boost::interprocess::lock_exception"
    aborted = f"{start}terminate called after throwing an instance of '{thrown}'\n  what(): it\n"
    assert triton_log.failure(aborted) == f"tritonserver aborted ({thrown})"
    assert (
        triton_log.failure(f"{start}error: creating server: no port\n")
        == "creating server: no port"
    )


@pytest.mark.parametrize(
    ("libc", "problem"),
    [
        (("glibc", "2.36"), None),
        (("glibc", "2.35"), None),
        (("glibc", "2.31"), "this system has glibc 2.31"),
        (("", ""), "this system has another libc"),
        (("musl", "1.2"), "this system has another libc"),
    ],
)
def test_an_old_libc_is_told(libc: tuple[str, str], problem: str | None) -> None:
    if problem is None:
        runtime.check_glibc(libc)
    else:
        with pytest.raises(ServeError, match=problem):
            runtime.check_glibc(libc)


def test_a_wrong_python_is_told(tmp_path: Path) -> None:
    for version in ("3.9", "3.10"):
        folder = tmp_path / version
        folder.mkdir()
        (folder / "triton_python_backend_stub").touch()
    assert runtime.find_stub(tmp_path, (3, 10), "0.7.0").parent.name == "3.10"
    with pytest.raises(ServeError, match=r"under Python 3.14; .* one of Python 3.9, 3.10$"):
        runtime.find_stub(tmp_path, (3, 14), "0.7.0")


def test_an_installed_server_for_another_python_is_told(tmp_path: Path) -> None:
    stub = tmp_path / "backends" / "python" / "triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    server = tmp_path / "bin" / "tritonserver"
    server.parent.mkdir()
    server.touch(0o755)
    stub.write_bytes(b"\x7fELF\0libc.so.6\0libpython3.9.so.1.0\0")
    python_version = ".".join(map(str, sys.version_info[:2]))
    with pytest.raises(
        ServeError, match=rf"models under Python 3.9, .* under Python {python_version}; inst"
    ):
        runtime.installed_runtime(server)
    stub.write_bytes(f"\x7fELF\0libpython{python_version}.so.1.0\0".encode())
    assert runtime.installed_runtime(server).binary == server
    stub.write_bytes(b"\x7fELF\0linked to none")
    assert runtime.installed_runtime(server).binary == server


def test_the_stub_from_pip_says_which_python_it_is_for(tmp_path: Path) -> None:
    stub = runtime.pip_runtime(default_cache_dir()).backends
    assert stub is not None
    with pytest.raises(ServeError, match=r"under Python 3.99; install"):
        runtime.check_stub(stub / "python" / "triton_python_backend_stub", (3, 99))


def test_numpy_2_is_refused_where_the_stub_reads_numpy_1_alone(tmp_path: Path) -> None:
    stub = runtime.pip_runtime(default_cache_dir()).backends
    assert stub is not None
    pip_stub = stub / "python" / "triton_python_backend_stub"
    runtime.check_numpy(pip_stub, "1.26.4")
    with pytest.raises(ServeError, match=r"^numpy 2.5.2 is installed, .* numpy 1 alone; install"):
        runtime.check_numpy(pip_stub, "2.5.2")
    newer = tmp_path / "triton_python_backend_stub"
    newer.write_bytes(b"numpy.core\0numpy._core\0")
    runtime.check_numpy(newer, "2.5.2")
    runtime.check_numpy(tmp_path / "none", "2.5.2")


def test_a_stub_imports_what_its_parent_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub is an isolated interpreter that finds `python3` by PATH."""
    folder = tmp_path / "named"
    folder.mkdir()
    (folder / "only_by_pythonpath.py").write_text("there = True\n", encoding="utf-8")
    (folder / "msgspec.py").write_text("ours = True\n", encoding="utf-8")
    server = runtime.Runtime(Path("/t/bin/tritonserver"), None, (), "installed")
    code = "import msgspec, numpy, only_by_pythonpath as m; print(m.there, msgspec.ours)"

    def imports() -> subprocess.CompletedProcess[str]:
        env = command.environment(server, tmp_path / "config.toml", None, tmp_path / "cache")
        python = shutil.which("python3", path=env["PATH"])
        assert python is not None
        return subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)

    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert "No module named 'only_by_pythonpath'" in imports().stderr
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}/none")
    for _ in range(2):  # made once, then found
        assert imports().stdout == "True True\n", imports().stderr
    [interpreter] = (tmp_path / "cache").iterdir()
    assert interpreter.name.startswith("interpreter-")


def test_a_package_that_is_too_old_is_told() -> None:
    requirements = ["numpy>=1.26", "torch>=99.1; extra == 'engine'"]
    runtime.check_floors(["numpy"], requirements)
    with pytest.raises(ServeError, match=r"^torch .+ installed, and maskserve needs torch>=99.1"):
        runtime.check_floors(["numpy", "torch"], requirements)


def test_a_missing_libpython_is_told() -> None:
    with pytest.raises(ServeError, match=r"libpython3.99.so.1.0 is missing.*libpython3.99\)"):
        runtime.find_libpython((3, 99))


def test_an_installed_server_must_be_a_program(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="is not an executable file"):
        runtime.installed_runtime(tmp_path / "none")
    server = tmp_path / "bin" / "tritonserver"
    server.parent.mkdir()
    server.touch(0o755)
    assert runtime.installed_runtime(server).backends is None
    (tmp_path / "backends").mkdir()
    assert runtime.installed_runtime(server).backends == tmp_path / "backends"


def test_regions_are_closed_to_others_by_prefix(tmp_path: Path) -> None:
    prefix = shm_cleanup.region_prefix(9000)
    for name in (f"{prefix}x", "another's"):
        (tmp_path / name).touch(0o644)
        (tmp_path / name).chmod(0o644)
    shm_cleanup.close_regions(prefix, tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {f"{prefix}x": 0o600, "another's": 0o644}


def test_leftover_regions_are_removed_by_prefix(tmp_path: Path) -> None:
    prefix, other_prefix = shm_cleanup.region_prefix(9000), shm_cleanup.region_prefix(90001)
    for name in (prefix + "a", prefix + "b", other_prefix + "c", "unrelated"):
        (tmp_path / name).touch()
    assert shm_cleanup.remove_regions(prefix, tmp_path) == 2
    assert {path.name for path in tmp_path.iterdir()} == {other_prefix + "c", "unrelated"}


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("./no/such/folder", "--model: there is no folder ./no/such/folder"),
        ("/nowhere", "--model: there is no folder /nowhere"),
        ("typo", "--model: there is no folder typo"),
    ],
)
def test_a_missing_model_is_told(model: str, sentence: str) -> None:
    with pytest.raises(ServeError) as caught:
        resolve_model(model)
    assert str(caught.value) == sentence


def test_a_hub_id_that_cannot_be_had_is_told() -> None:
    downloads = []

    def refuse(name: str, **asked_for: object) -> str:
        downloads.append((name, asked_for["revision"]))
        raise OSError("the network is down\nand so on")

    with pytest.raises(ServeError, match=r"no folder some/model, .* it: the network is down$"):
        resolve_model("some/model", "v2", fetch=refuse)
    assert downloads == [("some/model", "v2")]


@pytest.mark.parametrize("gguf", ["", "weights.gguf"])
def test_of_a_hub_model_what_is_served_is_fetched(tiny_fill: Path, gguf: str) -> None:
    from huggingface_hub.utils import filter_repo_objects

    needed_files = ["model_index.json", "transformer/config.json", "vae/diffusion.safetensors"]
    twice = ["flux1.safetensors", "README.md", "schnell.jpg"]
    files = [*needed_files, *twice, "transformer/a-00001-of-00002.safetensors"]
    fetched: list[str] = []

    def fetch(name: str, revision: str | None, **patterns: list[str]) -> str:
        fetched.extend(filter_repo_objects(files, **patterns))
        return str(tiny_fill)

    with_model({"model": {"gguf": gguf}}, "some/model", fetch=fetch)
    assert fetched == (needed_files if gguf else [*needed_files, files[-1]])


def test_node_models_lie_in_folders_or_on_the_hub(tmp_path: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects

    needed_files = ["config.json", "model.safetensors", "vocab.txt"]
    all_files = [*needed_files, "sam2.pt", "tf_model.h5"]
    fetched: list[str] = []

    def fetch(name: str, **patterns: Any) -> str:
        assert name == "some/sam2"
        del patterns["revision"]
        fetched.extend(filter_repo_objects(all_files, **patterns))
        return str(tmp_path / "fetched")

    tables: dict[str, Any] = {"nodes": {"load": "use"}}
    nodes = {"find": str(tmp_path), "segment": "some/sam2"}
    assert with_node_folders(tables, nodes, "n.toml", fetch)["nodes"] == {
        "load": "use", "find": str(tmp_path), "segment": str(tmp_path / "fetched")
    }  # fmt: skip
    assert fetched == needed_files
    with pytest.raises(ServeError, match=r"^n.toml: nodes.find: there is no folder /nowhere$"):
        with_node_folders(tables, {"find": "/nowhere"}, "n.toml", fetch)
    fetched.clear()
    with_node_folders(tables, {"other": "some/sam2"}, "n.toml", fetch)  # it has a form of its own
    assert fetched == all_files


def test_paths_of_a_node_file_begin_at_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They began where the command ran, so that the demo's file served in the checkout only."""
    models = tmp_path / "models"
    (models / "some" / "sam").mkdir(parents=True)
    file = models / "n.toml"
    file.write_text(
        '[nodes]\nfind = "../find"\nsegment = "some/sam"\nenlarge = "some/swin"\n'
        + f'likeness = "{tmp_path}"\nverify_url = "http://there/v1"\nverify_key_file = "key"\n'
        + 'path = ["added"]\n'
    )
    monkeypatch.chdir(tmp_path)
    for name in (file, Path("models/n.toml")):
        assert node_tables(name)["nodes"] == {
            "find": str(models / "../find"),
            "segment": str(models / "some/sam"),
            "enlarge": "some/swin",
            "likeness": str(tmp_path),
            "verify_url": "http://there/v1",
            "verify_key_file": str(models / "key"),
            "path": [str(models / "added")],
        }
        assert node_path(name) == [str(models / "added")]
    assert node_path(None) == []


def test_a_model_without_a_cache_is_served_without_which_is_said(tmp_path: Path) -> None:
    """Two blocks of it have a second attention."""
    for name, file_config in (
        ("model_index", {"_class_name": "StableDiffusion3Pipeline"}),
        ("vae/config", {"block_out_channels": [8] * 4, "latent_channels": 16}),
        ("scheduler/scheduler_config", {"shift": 3.0}),
        (
            "transformer/config",
            {"qk_norm": "rms_norm", "in_channels": 16, "patch_size": 2}
            | {"dual_attention_layers": [0, 1]},
        ),
    ):
        file = tmp_path / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(file_config))
    tables: dict[str, Any] = {"model": {"path": str(tmp_path)}}
    messages: list[str] = []
    assert with_model_cache(tables, messages.append)["cache"] == {"enabled": False}
    assert "this model is served dense only" in messages.pop()
    enabled_tables = {**tables, "cache": {"enabled": True}}
    assert with_model_cache(enabled_tables, messages.append) == enabled_tables
    assert not messages


def test_a_folder_that_is_no_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match=r"is not a model folder \(no model_index.json\)"):
        resolve_model(str(tmp_path))
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImageLayeredPipeline"}')
    with pytest.raises(
        ServeError, match="QwenImageLayeredPipeline is not served; served: QwenImage"
    ):
        resolve_model(str(tmp_path))
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxFillPipeline"}')
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text("{}")
    with pytest.raises(ServeError, match=r"vae/config.json: block_out_channels is missing"):
        resolve_model(str(tmp_path))


def test_a_bad_configuration_is_told(tmp_path: Path) -> None:
    config = tmp_path / "maskserve.toml"
    config.write_text("[engine]\nmax_rows = 0\n")
    with pytest.raises(
        ServeError, match=r"\[engine\] max_rows: 0 is out of range; accepted: 1 to 256"
    ):
        files.read_tables(config)


def test_a_restart_keeps_templates_and_nothing_else(tmp_path: Path) -> None:
    worker = files.WorkerFiles(tmp_path / "memory" / "worker-0", tmp_path / "disk" / "worker-0")
    tables = {"worker": "worker-0", "runtime_dir": str(worker.runtime)}
    assert worker.prepare(tables).worker == "worker-0"
    worker.templates.mkdir(parents=True)
    (worker.templates / "x").touch()
    for path in ("fronts", "processes"):
        (worker.runtime / path).mkdir()
        (worker.runtime / path / "x").touch()
    worker.status.touch()
    worker.prepare(tables)
    assert list(worker.runtime.iterdir()) == []
    assert (worker.templates / "x").exists()
    worker.remove()
    assert not worker.root.exists()
    assert not worker.templates.exists()


def test_what_a_killed_supervisor_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "disk"))
    (tmp_path / "disk").mkdir()
    stale_files, other_files = files.worker_files(9000, 1)[0], files.worker_files(9010, 1)[0]
    new_files = files.worker_files(9000, 2)
    assert {file_set.root.parent.parent for file_set in new_files} == {tmp_path}
    assert {file_set.templates.parent.parent for file_set in new_files} == {tmp_path / "disk"}
    locks = files.hold(new_files)
    files.remove_stale(9000, new_files)
    assert not stale_files.root.parent.exists()
    assert not stale_files.templates.parent.exists()
    for file_set in (*new_files, other_files):
        assert file_set.root.parent.is_dir()
        assert file_set.templates.parent.is_dir()
    with pytest.raises(ServeError, match=r"another maskserve serve runs at port 9000"):
        files.remove_stale(9000, [])
    for file in locks:
        os.close(file)
    files.remove_stale(9000, [])
    assert not any(
        file_set.root.parent.exists() or file_set.templates.parent.exists()
        for file_set in new_files
    )


def test_what_a_living_supervisor_has_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton listens once its models are loaded: until then the ports look free to another."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server = tmp_path / "tritonserver"
    server.write_text("#!/bin/sh\nexec sleep 60\n")
    server.chmod(0o755)
    options = ServeOptions(
        model=str(DEMO_MODEL),
        base_port=ports.free_base_port(),
        log_dir=tmp_path,
        tritonserver=server,
        report=lambda line: None,
    )
    supervisor = Supervisor(options)
    supervisor.start(until=lambda: True)
    worker_files = supervisor.workers[0].spec.files
    try:
        with pytest.raises(ServeError, match=r"another maskserve serve"):
            Supervisor(options).start()
        assert worker_files.root.parent.is_dir()
        assert worker_files.templates.parent.is_dir()
    finally:
        supervisor.kill()
    assert not worker_files.root.parent.exists()
    assert not worker_files.templates.parent.exists()


FAKE_SERVER = """\
#!{python}
import http.server, os, sys, time, tomllib
tries = {tries!r}

def wait_in_vain():
    with open(os.environ["MASKSERVE_CONFIG"], "rb") as file:
        processes = tomllib.load(file)["runtime_dir"] + "/processes"
    os.makedirs(processes, exist_ok=True)
    open(processes + "/encoder." + str(os.getpid()), "w").close()
    time.sleep(60)

with open(tries, "a") as file:
    file.write("x")
if os.path.getsize(tries) <= {failures}:
    {fail}

class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

port = next(int(a.split("=")[1]) for a in sys.argv if a.startswith("--http-port="))
http.server.HTTPServer(("127.0.0.1", port), Ready).serve_forever()
"""


@pytest.mark.parametrize(
    ("fail", "failures", "tries", "error"),
    [
        ("os.abort()", 2, 3, None),
        ("os.abort()", 99, 3, r"worker-0: tritonserver ended \(signal 6\)"),
        ("wait_in_vain()", 2, 3, None),
        ("wait_in_vain()", 99, 3, "worker-0: tritonserver does not notice that encoder is loaded"),
        ("sys.exit(1)", 99, 1, r"worker-0: tritonserver ended \(exit code 1\)"),
    ],
)
def test_a_first_start_is_tried_again_when_the_machine_stalled(
    tmp_path: Path,
    fail: str,
    failures: int,
    tries: int,
    error: str | None,
) -> None:
    count, server = tmp_path / "tries", tmp_path / "tritonserver"
    server.write_text(
        FAKE_SERVER.format(python=sys.executable, tries=str(count), failures=failures, fail=fail)
    )
    server.chmod(0o755)
    options = ServeOptions(
        model=str(DEMO_MODEL),
        base_port=ports.free_base_port(),
        log_dir=tmp_path / "logs",
        tritonserver=server,
        unheard_s=0.3,
        report=lambda line: None,
    )
    supervisor = Supervisor(options, backoff_s=(0.1,))
    try:
        if error is None:
            supervisor.start()
        else:
            with pytest.raises(ServeError, match=error):
                supervisor.start()
    finally:
        supervisor.kill()
    assert count.stat().st_size == tries


def test_parts_of_tritons_api_are_closed() -> None:
    server = runtime.Runtime(Path("/t/bin/tritonserver"), None, (), "x")

    def closed(*opened: str) -> list[str]:
        options = ServeOptions(model="m", open_apis=opened)
        line = command.command(options, Config(), server, ports.Ports(1, 2, 3), "x")
        return [argument for argument in line if "restricted" in argument]

    for protocol, argument in zip(("http", "grpc"), closed(), strict=True):
        assert argument.startswith(f"--{protocol}-restricted-")
        assert f"=shared-memory,model-repository,logging:{command.NO_HEADER}=" in argument
    assert closed() != closed()
    assert f"=model-repository:{command.NO_HEADER}=" in closed("shared-memory", "logging")[0]
    assert closed("shared-memory", "logging", "model-repository") == []


def test_a_repository_without_the_model_that_checks_is_told(tmp_path: Path) -> None:
    safety = SafetyConfig(model="judge", repository=str(tmp_path))
    server = runtime.Runtime(Path("/t/bin/tritonserver"), None, (), "x")
    arguments = ServeOptions(model="m"), Config(safety=safety), server, ports.Ports(1, 2, 3), "x"
    with pytest.raises(ServeError, match="has no model 'judge'"):
        command.command(*arguments)
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "config.pbtxt").touch()
    line = command.command(*arguments)
    assert f"--model-repository={tmp_path}" in line


def test_the_command_line_is_hardened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/host/driver")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it for its process
    libraries = (Path("/t/lib"),)
    server = runtime.Runtime(Path("/t/bin/tritonserver"), Path("/t/backends"), libraries, "x")
    options = ServeOptions(model="m", triton_args=("--trace-config=rate=1",))
    worker_ports = ports.Ports(9000, 9001, 9002)
    line = command.command(options, Config(), server, worker_ports, "maskserve-9000-")
    for argument in (
        "--disable-auto-complete-config",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--metrics-address=127.0.0.1",
        "--backend-config=python,shm-region-prefix-name=maskserve-9000-",
        "--backend-directory=/t/backends",
        "--trace-config=rate=1",
    ):
        assert argument in line
    env = command.environment(server, tmp_path / "config.toml", "1")
    assert env["MASKSERVE_CONFIG"] == str(tmp_path / "config.toml")
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["CUDA_VISIBLE_DEVICES"] == "1"
    assert env["LD_LIBRARY_PATH"] == "/t/lib:/host/driver"
    assert env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    # torch makes the folder as it loads, where it may not be allowed to.
    assert "TORCHINDUCTOR_CACHE_DIR" not in env
    env = command.environment(server, tmp_path / "config.toml", "1", tmp_path)
    assert env["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    assert "TORCHINDUCTOR_CACHE_DIR" not in env


def test_workers_share_out_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert command.gpus_of_worker(0, 1) == "2"
    assert [command.gpus_of_worker(i, 2) for i in range(2)] == ["2", "5"]
    assert [command.gpus_of_worker(i, 3, share=True) for i in range(3)] == ["2", "5", "2"]
    with pytest.raises(ServeError, match=r"3 workers of 1 GPU\(s\) on 2 GPU"):
        command.gpus_of_worker(0, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert command.gpus_of_worker(0, 2) is None


def test_a_worker_sees_as_many_gpus_as_its_devices_count_up_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gpu_count(**devices: str) -> int:
        return gpus_required(config_of({"model": devices}))

    assert gpu_count() == gpu_count(device="cuda", encoder_device="cpu") == 1
    assert gpu_count(encoder_device="cuda:1", decoder_device="cuda") == 2
    served = {"model": {"encoder_device": "cuda:1"}, "stages": {"service": "127.0.0.1:9005"}}
    assert gpus_required(config_of(served)) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,4,5")
    assert [command.gpus_of_worker(i, 2, per_worker=2) for i in range(2)] == ["0,1", "4,5"]
    with pytest.raises(ServeError, match=r"3 workers of 2 GPU\(s\) on 4 GPU"):
        command.gpus_of_worker(0, 3, per_worker=2)
    for share in (False, True):
        with pytest.raises(ServeError, match=r"--devices-per-worker: 8 GPUs .* 4 are visible"):
            command.gpus_of_worker(0, 1, per_worker=8, share=share)


@pytest.mark.parametrize("libraries", [(), (Path("/t/lib"),)], ids=["installed", "from pip"])
def test_a_server_is_spared_the_hosts_cuda_and_finds_its_driver(
    libraries: tuple[Path, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, cuda = tmp_path / "driver", tmp_path / "cuda"
    for folder, name in ((driver, "libcuda.so.1"), (cuda, "libcublas.so.12")):
        folder.mkdir()
        (folder / name).touch()
    server = runtime.Runtime(Path("/t/bin/tritonserver"), None, libraries, "x")
    of_server = list(map(str, libraries))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{cuda}:{driver}:/none")
    env = command.environment(server, tmp_path / "config.toml", None)
    assert env["LD_LIBRARY_PATH"] == ":".join([*of_server, str(driver), "/none"])
    monkeypatch.setenv("LD_LIBRARY_PATH", str(cuda))
    env = command.environment(server, tmp_path / "config.toml", None)
    assert env.get("LD_LIBRARY_PATH", "") == ":".join(of_server)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_grow_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    server = runtime.Runtime(Path("/t/bin/tritonserver"), None, (), "installed")

    def allocator_settings() -> dict[str, str]:
        env = command.environment(server, tmp_path / "config.toml", None)
        return {key: value for key, value in env.items() if key.endswith("ALLOC_CONF")}

    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert allocator_settings() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert allocator_settings() == {name: "max_split_size_mb:64"}


def test_the_clients_default_address_is_the_first_worker_of_serve() -> None:
    first = ports.Ports.of_worker(ServeOptions(model="m").base_port, 0)
    assert f"localhost:{first.grpc}" == DEFAULT_URL


def test_a_server_gets_a_large_stack_and_its_models_know_it() -> None:
    launch = Path(command.__file__).with_name("launch.py")
    shell = ["/bin/sh", "-c", "ulimit -s; echo $$ $MASKSERVE_SERVER_PID"]
    result = subprocess.run(
        [sys.executable, str(launch), str(os.getpid()), *shell],
        capture_output=True,
        text=True,
        check=True,
    )
    stack_kib, shell_pid, server_pid = result.stdout.split()
    assert stack_kib == "unlimited" or int(stack_kib) >= 512 * 1024
    assert shell_pid == server_pid


@pytest.mark.parametrize(
    ("missing", "router", "extras"),
    [
        ("torch", False, "engine,server"),
        ("tomli_w", False, "engine,server"),
        ("uvicorn", True, "engine,server,router"),
    ],
)
def test_a_missing_package_is_told_with_its_remedy(missing: str, router: bool, extras: str) -> None:
    def find(name: str) -> object:
        return None if name == missing else importlib.util.find_spec(name)

    with pytest.raises(ServeError) as refused:
        runtime.check_packages(router=router, find=find)
    assert str(refused.value) == (
        f"the package {missing} is not installed (in the checkout: pip install -e '.[{extras}]')"
    )


def test_all_workers_share_the_adapters_in_memory(tmp_path: Path) -> None:
    def adapter_table(adapters: str, **table: str) -> dict[str, object]:
        options = ServeOptions(model="x", adapters=adapters, cache_dir=tmp_path / "cache")
        workers = [files.WorkerFiles(tmp_path / name, tmp_path) for name in ("w0", "w1")]
        worker_tables = [
            Spec(index, options, cast(Any, None), {}, file_set).with_adapters({"adapters": table})
            for index, file_set in enumerate(workers)
        ]
        assert worker_tables[0] == worker_tables[1]
        config_of(worker_tables[0])
        return dict(worker_tables[0]["adapters"])

    memory, disk = str(tmp_path / "adapters"), str(tmp_path / "cache" / "adapters")
    assert adapter_table("loras") == {"store": str(Path("loras").absolute()), "host_dir": memory}
    url = "s3://bucket/loras"
    assert adapter_table(url) == {"store": url, "host_dir": memory, "disk_dir": disk}
    assert adapter_table("", store=url, disk_dir="")["disk_dir"] == ""
    assert adapter_table(url, store="elsewhere")["store"] == url
    nothing = Spec(0, ServeOptions(model="x"), cast(Any, None), {}, cast(Any, None))
    assert nothing.with_adapters({}) == {}


@pytest.mark.parametrize(
    ("arguments", "code", "extras"),
    [(["serve", "--model", "x"], 1, "engine,server"), (["check", "x"], 2, "engine")],
)
def test_a_client_s_install_says_what_serving_needs(
    arguments: list[str], code: int, extras: str
) -> None:
    """The client's packages alone: what the supervisor imports is not there."""
    program = (
        "import sys\n"
        "sys.modules.update(psutil=None, tomli_w=None, torch=None)\n"
        "from maskserve_client.cli import main\n"
        f"sys.exit(main({arguments}))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == code
    assert re.fullmatch(
        rf"maskserve {arguments[0]}: the package (psutil|tomli_w) is not installed "
        rf"\(in the checkout: pip install -e '\.\[{extras}\]'\)\n",
        ran.stderr,
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"adapters": "nosuch"}, "--adapters: nosuch is not there; accepted: a folder, or a URL"),
        ({"adapters": __file__}, "is a file; accepted: a folder"),
        ({"controlnets": "nosuch"}, "--controlnets: nosuch is not there; accepted: a folder"),
        (
            {"workflows": Path()},
            "--workflows: is an option of the router; accepted: together with --router",
        ),
        ({"workflows": Path("nosuch"), "router": True}, "--workflows: nosuch is not there"),
        ({"router_config": Path("r.toml")}, "--router-config: is an option of the router"),
        ({"node_path": "nodes"}, "--node-path: is an option of node servers and routers; accepted"),
        ({"router_config": Path("r.toml"), "router": True}, "--router-config: r.toml is not there"),
        ({"nodes": Path()}, "--nodes: . is a folder; accepted: a file"),
        ({"config": Path("nosuch")}, "--config: nosuch is not there; accepted: a file"),
        ({"gguf": "nosuch.gguf"}, "--gguf: nosuch.gguf is not there"),
        ({"fuse_loras": ("nosuch:0.5",)}, "--fuse-lora: nosuch is not there"),
        (
            {"services": ("controlnet@gpu",)},
            "--service: is 'controlnet@gpu'; accepted: encoder, dec",
        ),
        ({"services": ("find@cpu",)}, "--service: is 'find@cpu'; accepted: encoder, decoder"),
    ],
)
def test_what_cannot_be_served_is_told_before_anything_starts(
    flags: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ServeError) as refused:
        ServeOptions(model="x", **flags).check()
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("section", "key", "accepted"),
    [
        ("adapters", "store", "a folder, or a URL"),
        ("adapters", "profiles", "a JSON file"),
        ("controls", "folder", "a folder with a subfolder for each ControlNet"),
        ("engine", "costs", "a JSON file"),
        ("safety", "repository", "a folder"),
        ("model", "gguf", "a GGUF file"),
        ("model", "fuse_loras", "FILE or FILE:SCALE"),
        ("provenance", "certificate", "a PEM file"),
        ("provenance", "private_key", "a PEM file"),
    ],
)
def test_what_a_configuration_names_is_there_or_told_before_anything_starts(
    section: str, key: str, accepted: str, tmp_path: Path
) -> None:
    value = ["nosuch:0.5"] if key == "fuse_loras" else "nosuch"
    file = tmp_path / "worker.toml"
    file.write_text(tomli_w.dumps({section: {key: value}}), encoding="utf-8")
    with pytest.raises(ServeError) as refused:
        Supervisor(ServeOptions(model="x", config=file)).start()
    assert f"[{section}] {key}: nosuch is not there; accepted: {accepted}" in str(refused.value)


def test_a_storage_elsewhere_and_what_a_flag_replaces_are_not_looked_for(tmp_path: Path) -> None:
    options = ServeOptions(model="x", adapters=str(tmp_path), controlnets=str(tmp_path))
    options.check_tables({"adapters": {"store": "nosuch"}, "controls": {"folder": "nosuch"}})
    ServeOptions(model="x").check_tables({"adapters": {"store": "s3://bucket/loras"}})


@pytest.mark.parametrize("key", ["device", "encoder_device", "decoder_device"])
def test_a_device_that_is_none_is_told_before_anything_starts(key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of({"model": {"path": "x", key: "gpu"}})
    assert "accepted: auto, cpu, cuda or cuda:N" in str(refused.value)
