#!/usr/bin/env python3
"""The first thing to run on a machine with a GPU: under 10 minutes, one JSON to commit."""

import sys

from maskserve_harness.benchmarks.first_run import main

if __name__ == "__main__":
    sys.exit(main())
