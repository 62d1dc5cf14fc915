"""A parser that ignores offers of other protocols (RFC 9110, section 7.8).

Java's client, for example, offers HTTP/2 with its first request. httptools treats an offer as
accepted: it reports no body, and parses the body as the next request. The head of such a request is
therefore parsed again without the offer, by a new parser that continues with the body.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import httptools

_OFFERS = frozenset((b"upgrade", b"http2-settings"))
"""Headers of an offer, which `Connection` names too."""


class Reader(Protocol):
    """The callbacks of a parser, and the parts of the head that it has reported."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class OfferlessParser:
    """An HttpRequestParser that ignores offers.

    Args:
        reader: receives the callbacks of HttpRequestParser. For a message with an offer, the
            callbacks before its body come twice; `should_upgrade` is True at the end of the first
            time.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._parser = _parser(reader)

    def feed_data(self, data: bytes) -> None:
        """Parse received data.

        Raises:
            httptools.HttpParserError: it is not HTTP, or asks for a tunnel.
        """
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            head = self._head()
            self._parser = _parser(self._reader)
            self._parser.feed_data(head)
            if remaining_data := data[offer.args[0] :]:
                self.feed_data(remaining_data)

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        """Return True if the message being parsed has an offer and will be parsed again."""
        return self._parser.should_upgrade()

    def _head(self) -> bytes:
        """Return the head of the message being parsed, without its offer."""
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError("no tunnels")
        lines = [b"%b %b HTTP/%b" % (method, self._reader.url, version)]
        for name, value in self._reader.headers:
            if name == b"connection":
                value = b",".join(_without_offers(value.split(b",")))
            if name not in _OFFERS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join((*lines, b"", b""))


def _without_offers(tokens: Iterable[bytes]) -> list[bytes]:
    return [token for token in tokens if token.strip().lower() not in _OFFERS]


def _parser(reader: Reader) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(reader)
    # As in uvicorn: data after the last request of a connection is ignored.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
