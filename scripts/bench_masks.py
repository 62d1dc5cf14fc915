#!/usr/bin/env python3
"""Time the way from a decoded mask to edit mask, active tokens and paste weights."""

import sys

from maskserve_harness.benchmarks.masks import main

if __name__ == "__main__":
    sys.exit(main())
