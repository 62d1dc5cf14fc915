#!/usr/bin/env python3
"""A step whose entries travel: naive, block by block, by Algorithm 1, by our planner, and ideal."""

import sys

from maskserve_harness.benchmarks.pipeline import main

if __name__ == "__main__":
    sys.exit(main())
