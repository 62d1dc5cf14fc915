"""`maskserve serve --plan`: a table of what cards of several sizes hold of a model."""

from __future__ import annotations

import sys
from functools import partial

import tomli_w

from maskserve_serving.engine_process import ask_engine
from maskserve_serving.errors import ServeError
from maskserve_serving.files import checked, read_tables, with_values
from maskserve_serving.options import ServeOptions
from maskserve_serving.source import with_model, with_model_cache
from maskserve_serving.spec import with_services

_TABLE = "maskserve_engine.fitting.card_table"
_SHAPES = ["*.json"]
"""Files of a hub model that contain its shapes."""


def print_cards(options: ServeOptions) -> int:
    """Print the table and return the exit code."""
    try:
        options.check()
        tables = read_tables(options.config)
        options.check_tables(tables)
        tables = with_model(tables, options.model, _SHAPES, parts=options.checkpoint_parts)
        tables = with_model_cache(tables, partial(print, file=sys.stderr))
        tables = with_services(options, with_values(tables, "model", **options.model_overrides))
        checked(tables)
        print(ask_engine(_TABLE, tomli_w.dumps(tables).encode()), end="")
    except ServeError as error:
        print(f"maskserve serve: {error}", file=sys.stderr)
        return 1
    return 0
