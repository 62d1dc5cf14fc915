#!/usr/bin/env python3
"""Load a worker with perf_analyzer, Triton's own load generator."""

import sys

from maskserve_harness.perf.command import main

if __name__ == "__main__":
    sys.exit(main())
