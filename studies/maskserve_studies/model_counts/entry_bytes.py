"""Print a markdown table of the bytes of a template's entries at one anchor, by kind and format.

The bytes come from the model's configuration (planning/entry_bytes.py); a test compares them with
stored entries.

    python scripts/bench bytes_table
"""

from __future__ import annotations

import argparse

from maskserve_benchmarks.published_models import FLUX_DEV, SD21, SDXL
from maskserve_benchmarks.reports import table as markdown
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.families.unet.spec import unet_work
from maskserve_engine.planning.entry_bytes import FORMATS, entry_bytes

KINDS = ("kv", "h")
TABLE_FORMATS = ("bfloat16", "int8", "int4")


def table() -> str:
    """Return the markdown table, in GiB per anchor, at the models' native sizes. Both halves of a
    guided step share entries.
    """
    works = {
        "FLUX.1 1024": flux_work(FLUX_DEV, 128, 128),
        "SDXL 1024": unet_work(SDXL, 128, 128, guidance=False),
        "SD 2.1 768": unet_work(SD21, 96, 96, guidance=False),
    }
    forms = [(kind, name) for kind in KINDS for name in TABLE_FORMATS]
    rows = [
        [model, *(f"{entry_bytes(work, kind, FORMATS[name]) / 2**30:.3f}" for kind, name in forms)]
        for model, work in works.items()
    ]
    return markdown(["GiB per anchor", *(f"{kind}, {name}" for kind, name in forms)], rows)


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0]).parse_args()
    print(table())
    return 0
