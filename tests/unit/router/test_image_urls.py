"""Which pictures a router fetches for a client, and how little it tells of those that it does not
fetch.
"""

from __future__ import annotations

import ssl
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskserve_common.config import LimitsConfig
from maskserve_common.errors import InvalidRequest
from maskserve_router.api.openai.image_urls import ImageUrls
from maskserve_router.api.public_hosts import is_public
from maskserve_router.config import AdmissionBounds, ImageHosts, router_config_of
from maskserve_router.fair_share import FairShare
from maskserve_router.keys import KeyRing
from maskserve_router.metrics import Metrics
from maskserve_router.scheduling.admission import Admission
from tests.support.examples import examples
from tests.support.tls_host import Host, answer, serving, trusted_by

LIMITS = LimitsConfig(max_image_bytes=2048)
FIELD = "images[0].image_url"
NOT_PUBLIC = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.3.4", "192.168.1.1",
    "169.254.169.254", "100.64.0.1", "192.0.0.8", "192.0.0.192", "192.0.2.7", "198.18.0.1",
    "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1",
    "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:7f00:1::", "localhost", "192.88.99.1",
    "192.31.196.1", "192.52.193.1", "192.175.48.1", "198.51.100.9", "203.0.113.9", "3fff::1",
    "fec0::1", "5f00::1", "100::1", "100:0:0:1::1", "64:ff9b:1::808:808", "2001:db8::1",
    "2001:2::1", "2001:20::1", "2620:4f:8000::1", "2002:808:808::", "::808:808", "4000::1",
    "::ffff:192.88.99.1", "64:ff9b::c058:6301", "168.63.129.16", "::ffff:168.63.129.16",
    "64:ff9b::a83f:8110",
]  # fmt: skip

ANYBODY = KeyRing((), 99).client({})


def urls_of(host: Host, timeout_s: float = 5.0, *, public: bool = True) -> ImageUrls:
    """URLs of a router that takes this machine for a public one, unless `public` is false."""

    async def resolve_here(name: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    return ImageUrls(
        ImageHosts(hosts=(f"pictures.example:{host.port}",), timeout_s=timeout_s),
        LIMITS,
        Admission(AdmissionBounds(), Metrics()),
        FairShare(1),
        resolve_here,
        (lambda _: True) if public else is_public,
        trusted_by(host),
    )


async def fetched(urls: ImageUrls, url: str) -> bytes:
    with ExitStack() as stack:
        return await urls.read(FIELD, url, ANYBODY, stack)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_no_address_of_this_or_a_private_network_is_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"]
)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


async def test_a_picture_of_a_listed_host_comes_whole() -> None:
    async with serving() as host:
        host.answer = answer(b"a picture")
        url = f"https://PICTURES.example:{host.port}/a.png?x=1#part"
        assert await fetched(urls_of(host), url) == b"a picture"
        head = host.heads[0].decode()
    assert head.startswith("GET /a.png?x=1 HTTP/1.1\r\n")
    assert f"\r\nhost: pictures.example:{host.port}\r\n" in head.lower()
    assert "cookie" not in head.lower()
    assert "authorization" not in head.lower()


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (answer(b"", "302 Found", "Location: https://pictures.example/b\r\n"), "status 302"),
        (answer(b"", "301 Moved", "Location: http://169.254.169.254/\r\n"), "status 301"),
        (answer(b"no", "404 Not Found"), "status 404"),
        (answer(b"x" * 2049), "is over 2048 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100_000, "is over 2048 bytes"),
        (b"no HTTP at all\r\n\r\n", "could not be fetched from pictures.example"),
        (answer(b"cut")[:-1].replace(b"h: 3", b"h: 9"), "could not be fetched"),
    ],
)
async def test_answers_that_are_no_picture_are_refused(sent: bytes, message: str) -> None:
    async with serving() as host:
        host.answer = sent
        with pytest.raises(InvalidRequest, match=f"images.*{message}"):
            await fetched(urls_of(host), f"https://pictures.example:{host.port}/a.png")
        assert len(host.heads) == 1  # no redirect is followed


async def test_certificates_are_read_once_and_not_for_each_url(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That takes 50 ms of the loop that routes all edits."""
    context_options: list[object] = []
    make = httpx.create_ssl_context

    def counted(**options: Any) -> ssl.SSLContext:
        context_options.append(options)
        return make(**options)

    async with serving() as host:
        host.answer = answer(b"a picture")
        urls = urls_of(host)
        monkeypatch.setattr(httpx, "create_ssl_context", counted)
        monkeypatch.setattr("httpx._transports.default.create_ssl_context", counted)
        for _ in range(3):
            assert await fetched(urls, f"https://pictures.example:{host.port}/") == b"a picture"
        assert len(host.heads) == 3
        assert context_options == []


async def test_a_host_at_a_private_address_is_not_even_connected() -> None:
    async with serving() as host:
        host.answer = answer(b"a secret")
        urls, url = urls_of(host, public=False), f"https://pictures.example:{host.port}/"
        with pytest.raises(InvalidRequest, match="could not be fetched"):
            await fetched(urls, url)
        assert host.heads == []


async def test_a_certificate_of_another_name_is_refused() -> None:
    async with serving("other.example") as host:
        host.answer = answer(b"a picture")
        with pytest.raises(InvalidRequest, match="could not be fetched"):
            await fetched(urls_of(host), f"https://pictures.example:{host.port}/")
        assert host.heads == []


async def test_a_host_that_is_silent_holds_nobody() -> None:
    async with serving() as host:
        host.silent = True
        with pytest.raises(InvalidRequest, match=r"was not fetched within 0\.3 s"):
            await fetched(urls_of(host, 0.3), f"https://pictures.example:{host.port}/")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://pictures.example/a", "is not an https URL"),
        ("file:///etc/passwd", "is not an https URL"),
        ("ftp://pictures.example/a", "is not an https URL"),
        ("//pictures.example/a", "is not an https URL"),
        ("https://other.example/a", "host that is not listed"),
        ("https://pictures.example:8443/a", "host that is not listed"),
        ("https://pictures.example.evil.example/a", "host that is not listed"),
        ("https://pictures.example@evil.example/a", "has a user or password"),
        ("https://user:pw@pictures.example/a", "has a user or password"),
        ("https://pictures.example\\@evil.example/", "has a user or password|not listed|not a URL"),
        ("https://127.0.0.1/a", "host that is not listed"),
        ("https://[::1]/a", "host that is not listed"),
        ("https://2130706433/a", "host that is not listed"),
        ("https:///a", "host that is not listed"),
        ("https://[", "is not a URL|not listed"),
        ("https://pictures.example/" + "a" * 5000, "over 4096 characters"),
        ("", "is not an https URL"),
    ],
)
async def test_other_urls_are_refused_before_anything_is_asked(url: str, message: str) -> None:
    async with serving() as host:
        with pytest.raises(InvalidRequest, match=message):
            await fetched(NOWHERE, url)
        assert host.heads == []


async def _nowhere(name: str, port: int) -> list[str]:
    return []


NOWHERE = ImageUrls(
    ImageHosts(hosts=("pictures.example",)),
    LIMITS,
    Admission(AdmissionBounds(), Metrics()),
    FairShare(1),
    _nowhere,
    trusted=ssl.create_default_context(),
)


@examples(200)
@given(st.text(max_size=60), st.sampled_from(["", "https://", "https://pictures.example", "data:"]))
async def test_any_text_is_refused_by_name(text: str, begin: str) -> None:
    with pytest.raises(InvalidRequest, match=r"images\[0\]\.image_url"):
        await fetched(NOWHERE, begin + text)


def test_hosts_are_names_and_no_urls() -> None:
    config = router_config_of({"image_urls": {"hosts": ["a.example", "b.example:8443"]}})
    assert config.image_urls.hosts == ("a.example", "b.example:8443")
    for wrong in ("https://a.example", "A.example", "a.example/", "*", ""):
        with pytest.raises(ValueError, match=r"image_urls"):
            router_config_of({"image_urls": {"hosts": [wrong]}})
