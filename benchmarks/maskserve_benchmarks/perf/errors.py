"""The one error of this package."""


class PerfError(Exception):
    """A measurement cannot be made; the message is one sentence for the person at the terminal."""
