"""The page of `maskserve web`, a client of the server (`pip install -e '.[web]'`)."""
