"""`maskserve serve --plan`: a table of what cards of several sizes hold of a model."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import tomli_w

from maskserve_serving.errors import ServeError
from maskserve_serving.files import checked, read_tables, with_values
from maskserve_serving.options import ServeOptions
from maskserve_serving.source import with_model, with_model_cache
from maskserve_serving.spec import with_services

_SHAPES = ["*.json"]
"""Files of a hub model that contain its shapes."""


def print_cards(options: ServeOptions) -> int:
    """Print the table and return the exit code."""
    try:
        options.check()
        tables = read_tables(options.config)
        options.check_tables(tables)
        named = with_model(tables, options.model, _SHAPES, parts=options.checkpoint_parts)
        tables = with_model_cache(named, partial(print, file=sys.stderr))
        tables = with_services(options, with_values(tables, "model", **options.model_overrides))
        checked(tables)
    except ServeError as error:
        print(f"maskserve serve: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="maskserve-plan-") as folder:
        config = Path(folder) / "config.toml"
        config.write_text(tomli_w.dumps(tables), encoding="utf-8")
        command = [sys.executable, "-m", "maskserve_engine.fitting.card_table", str(config)]
        ended = subprocess.run(command, check=False, capture_output=True)
    # Libraries print much on import: if the error is one of our sentences, show only that.
    stderr_text = ended.stderr.decode(errors="replace")
    if ended.returncode:
        last = next(reversed(stderr_text.strip().splitlines()), "")
        print(last if last.startswith("maskserve serve: ") else stderr_text, file=sys.stderr)
    print(ended.stdout.decode(), end="")
    return 1 if ended.returncode else 0
