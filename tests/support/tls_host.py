"""A stand-in for an internet host: TLS, a name, and given answers."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trustme

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


@dataclass
class Host:
    """A TLS server on this machine that answers each request with `answer`."""

    port: int
    authority: trustme.CA
    answer: bytes = b""
    heads: list[bytes] = field(default_factory=list)
    """Heads of requests."""
    bodies: list[bytes] = field(default_factory=list)
    then: list[bytes] = field(default_factory=list)
    """Answers that come first, before `answer` is the answer to all requests."""
    silent: bool = False
    drips: bytes = b""
    """Bytes that it sends again and again, ten times a second, after one of `then` if there
    is any.
    """


@asynccontextmanager
async def serving(name: str = "pictures.example") -> AsyncIterator[Host]:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        host.bodies.append(await reader.readexactly(int(length[1]) if length else 0))
        host.heads.append(head)
        if host.drips and host.then:
            writer.write(host.then.pop(0))
        while host.drips:
            writer.write(host.drips)
            try:
                await writer.drain()
            except OSError:
                break
            await asyncio.sleep(0.1)
        if not host.silent and not host.drips:
            writer.write(host.then.pop(0) if host.then else host.answer)
            await writer.drain()
        else:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    host = Host(server.sockets[0].getsockname()[1], authority)
    try:
        yield host
    finally:
        server.close()


def trusted_by(host: Host) -> ssl.SSLContext:
    """An SSL context that trusts the host's authority."""
    trusted = ssl.create_default_context()
    host.authority.configure_trust(trusted)
    return trusted


def answer(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{more}\r\n"
    return head.encode() + body
