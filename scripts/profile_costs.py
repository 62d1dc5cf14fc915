#!/usr/bin/env python3
"""Measure what steps and loads cost on this machine, and fit the cost model."""

import sys

from maskserve_harness.benchmarks.profile_costs import main

if __name__ == "__main__":
    sys.exit(main())
