"""The one error of this package."""


class ServeError(Exception):
    """Serving cannot start or go on; the message is one sentence for the person at the terminal."""
