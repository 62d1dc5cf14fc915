"""The error of this package."""


class ServeError(Exception):
    """Serving cannot start or continue; the message is one sentence for the terminal."""
