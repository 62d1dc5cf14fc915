"""A reload takes on the whole file, or refuses by name what it cannot change."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
import trustme

import maskserve_router.router as router_module
from maskserve_benchmarks.emulator.worker import EmulatedWorker
from maskserve_common.config import ConfigError
from maskserve_router.config import check_change, load_router_config, router_config_of
from maskserve_router.router import Router
from tests.support.router import edit, until
from tests.support.router_requests import INFER

MODELS = "/v1/models"


def keys_toml(*names: str) -> str:
    return "".join(
        f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
        for name in names
    )


@asynccontextmanager
async def running(
    file: Path, text: Callable[[str], str] = lambda head: head
) -> AsyncIterator[tuple[Router, Callable[..., None]]]:
    """A router by a file, and what writes that anew."""
    worker = EmulatedWorker("w", None)
    await worker.start()
    head = (
        f'[workers]\naddresses = ["{worker.address}"]\n'
        "[listen]\nhttp_port = 0\ngrpc_port = 0\nadmin_port = 0\n"
    )

    def write(rest: str = "", changed: Callable[[str], str] = text) -> None:
        file.write_text(changed(head) + rest)

    write()
    try:
        async with Router(
            load_router_config(str(file)), lambda: load_router_config(str(file))
        ) as router:
            yield router, write
    finally:
        await worker.stop()


async def status_of(router: Router, key: str, scheme: str = "http", **more: Any) -> int:
    """Status of a request that needs a key."""
    url = f"{scheme}://localhost:{router.http.port}{MODELS}"
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, headers={"x-api-key": key}, **more) as answer,
    ):
        return answer.status


async def test_keys_that_are_taken_away_end_and_those_added_work(tmp_path: Path):
    """A withdrawn key went on working until the router was restarted, and a new one did not."""
    async with running(tmp_path / "router.toml", lambda head: head + keys_toml("old")) as (
        router,
        write,
    ):
        target = f"127.0.0.1:{router.grpc.port}"
        async with grpc.aio.insecure_channel(target) as channel:
            stream = channel.stream_stream(INFER.replace("ModelInfer", "ModelStreamInfer"))
            opened = stream(metadata=(("x-api-key", "old"),))
            await opened.write(edit())
            await opened.read()
            assert (await status_of(router, "old"), await status_of(router, "new")) == (200, 401)
            write(keys_toml("new"), lambda head: head)
            url = f"http://127.0.0.1:{router.admin.port}/reload"
            async with aiohttp.ClientSession() as session, session.post(url) as answer:
                assert answer.status == 200
            assert (await status_of(router, "old"), await status_of(router, "new")) == (401, 200)
            await opened.write(edit())  # on a stream that was let in before
            assert b"API key" in await opened.read()
            opened.cancel()


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("[http]\nmax_body_bytes = 7\n", r"\[http\] max_body_bytes: is changed by a restart"),
        ('[log]\nlevel = "DEBUG"\n', r"\[log\] level: is changed"),
        ("[workers]\nmisses = 3\n", r"\[workers\] misses: is changed"),
    ],
)
def test_what_a_reload_cannot_change_is_refused_by_name(rest: str, message: str, tmp_path: Path):
    file = tmp_path / "router.toml"
    file.write_text(keys_toml("a"))
    old = load_router_config(str(file))
    file.write_text(rest + keys_toml("b"))
    with pytest.raises(ConfigError, match=message):
        check_change(old, load_router_config(str(file)))


def test_keys_that_were_asked_for_and_are_none_end_the_start(tmp_path: Path):
    file = tmp_path / "router.toml"
    file.write_text("keys = []\n")
    with pytest.raises(ConfigError, match="is empty"):
        load_router_config(str(file))


def test_the_last_key_goes_by_a_restart_alone():
    old = router_config_of({"keys": [{"name": "a", "sha256": "0" * 64}]})
    with pytest.raises(ConfigError, match="keys"):
        check_change(old, router_config_of({}))
    check_change(router_config_of({}), old)


async def test_a_refused_reload_leaves_all_as_it_was(tmp_path: Path):
    async with running(tmp_path / "router.toml", lambda head: head + keys_toml("old")) as (
        router,
        write,
    ):
        write("[http]\nmax_chunks = 5\n" + keys_toml("new"), lambda head: head)
        with pytest.raises(ConfigError, match="max_chunks"):
            await router.reload()
        assert (await status_of(router, "old"), await status_of(router, "new")) == (200, 401)


async def test_a_rotated_secret_is_taken_on_without_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As Kubernetes rotates a mounted secret: the link to its folder is turned."""
    monkeypatch.setattr(router_module, "_POLL_S", 0.02)

    def mount(*names: str) -> None:
        folder = tmp_path / f"data-{'-'.join(names) or 'empty'}"
        folder.mkdir()
        (folder / "keys.toml").write_text(keys_toml(*names))
        (tmp_path / "turned").symlink_to(folder)
        (tmp_path / "turned").replace(tmp_path / "data")

    mount("old")
    file = tmp_path / "data" / "keys.toml"
    async with running(tmp_path / "router.toml", lambda head: f'keys_file = "{file}"\n' + head) as (
        router,
        _,
    ):
        assert (await status_of(router, "old"), await status_of(router, "new")) == (200, 401)
        mount("new")
        await until("the new key is known", lambda: router._config.keys[0].name == "new")
        assert (await status_of(router, "old"), await status_of(router, "new")) == (401, 200)
        stamps = router._secrets
        mount()  # refused: no key would open the door to all
        await until("the change is seen", lambda: router._secrets != stamps)
        assert await status_of(router, "new") == 200


async def test_certificates_are_taken_on_by_both_ports(tmp_path: Path):
    authorities = [trustme.CA(), trustme.CA()]
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def issue(number: int) -> None:
        issued = authorities[number].issue_cert("localhost")
        certificate.write_bytes(b"".join(b.bytes() for b in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())

    async def trusted(number: int) -> tuple[bool, bool]:
        context = ssl.create_default_context()
        authorities[number].configure_trust(context)
        try:
            http = await status_of(router, "", "https", ssl=context) == 200
        except aiohttp.ClientConnectorCertificateError:
            http = False
        roots = grpc.ssl_channel_credentials(authorities[number].cert_pem.bytes())
        target = f"localhost:{router.grpc.port}"
        async with grpc.aio.secure_channel(target, roots) as channel:
            try:
                await channel.unary_unary(INFER)(edit(), timeout=10)
                return http, True
            except grpc.aio.AioRpcError:
                return http, False

    issue(0)
    files = f'[listen]\ntls_cert = "{certificate}"\ntls_key = "{key}"\nhost = "localhost"\n'
    async with running(
        tmp_path / "router.toml", lambda head: head.replace("[listen]\n", files)
    ) as (router, _):
        assert (await trusted(0), await trusted(1)) == ((True, True), (False, False))
        key.write_text("no key")
        with pytest.raises(ConfigError, match="tls_cert and tls_key"):
            await router.reload()
        assert await trusted(0) == (True, True)
        issue(1)
        await router.reload()
        assert (await trusted(0), await trusted(1)) == ((False, False), (True, True))
