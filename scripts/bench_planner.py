#!/usr/bin/env python3
"""How long planning takes: FLUX.1 at 1024x1024, 57 blocks, 8 rows."""

import sys

from maskserve_harness.benchmarks.planner import main

if __name__ == "__main__":
    sys.exit(main())
