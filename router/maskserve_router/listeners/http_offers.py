"""Offers of other protocols are ignored, and the request that makes them is answered (RFC 9110,
section 7.8): Java's client offers HTTP/2 with its first request.

The parser takes an offer for accepted: it gives no body, and what follows is read as the next
request, whatever it is. So the head of such a request is read once more without the offer, by
another parser that goes on with the body.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import httptools

_OFFERS = frozenset((b"upgrade", b"http2-settings"))
"""Headers of an offer, which `Connection` names too."""


class Reader(Protocol):
    """What a parser calls, and what it has called of a message's head so far."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class OfferlessParser:
    """An HttpRequestParser to which nobody offers anything.

    Args:
        reader: its callbacks are called as by HttpRequestParser. Of a message with an offer those
            before its body are called twice; at the end of the first time `should_upgrade` says so.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._parser = _parser(reader)

    def feed_data(self, data: bytes) -> None:
        """Parse what has come.

        Raises:
            httptools.HttpParserError: it is no HTTP, or asks for a tunnel.
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
        """Whether the message that is being read makes an offer: it will be read once more."""
        return self._parser.should_upgrade()

    def _head(self) -> bytes:
        """Of the message that is being read, without its offer."""
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
    # As uvicorn has it: what comes behind the last request of a connection is not looked at.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
