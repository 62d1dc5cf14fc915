"""The page of `maskserve web`, a client like any other (`pip install -e '.[web]'`)."""
