"""The site whose page makes a browser send a request."""

from __future__ import annotations

import socket

import pytest

from maskserve_common.sites import foreign_site, has_name


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8082",
        "10.4.0.17",
        "[::1]:8082",
        "localhost:8082",
        "LOCALHOST.",
        "app.localhost",
        "router:8082",
        "ops.example.com",
        "OPS.example.com:8082",
        "a.b.internal.example",
        socket.gethostname(),
    ],
)
def test_a_listener_has_names_that_no_stranger_gives(host: str) -> None:
    assert has_name(host, ("Ops.example.com", ".internal.example"))


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example:8082",
        "localhost.evil.example",
        "internal.example.evil.org",
        "badinternal.example",
        "[::1",
        "",
        ":8082",
        "user@",
    ],
)
def test_a_name_that_dns_can_give_is_foreign(host: str) -> None:
    assert not has_name(host, (".internal.example",))
    assert "is not a name of this server" in foreign_site({"host": host}, ())


def test_a_page_of_another_site_is_foreign_wherever_it_asks() -> None:
    host_header = {"host": "127.0.0.1:8082"}
    assert foreign_site(host_header) == foreign_site({}) == ""
    assert foreign_site({**host_header, "origin": "http://127.0.0.1:8082"}, ()) == ""
    for origin in ("http://127.0.0.1:8083", "null", "", "http://[", "https://evil.example"):
        assert "is another site" in foreign_site({**host_header, "origin": origin}, ())
        assert "is another site" in foreign_site({**host_header, "origin": origin})
    assert foreign_site({"origin": "http://127.0.0.1:8082"}) != ""  # no Host to be like
    listed = {**host_header, "origin": "https://app.example.com"}
    assert foreign_site(listed, (), ["https://app.example.com"]) == ""
    assert foreign_site(listed, (), ["*"]) == ""


def test_a_rebound_name_is_its_own_origin_and_foreign_all_the_same() -> None:
    rebound = {"host": "evil.example:8082", "origin": "http://evil.example:8082"}
    assert foreign_site(rebound) == ""
    assert foreign_site(rebound, ()).startswith("Host: 'evil.example:8082'")
