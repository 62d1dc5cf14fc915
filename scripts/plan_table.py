#!/usr/bin/env python3
"""What planning gains over realistic costs: a table, and a plot over mask ratios."""

import sys

from maskserve_harness.benchmarks.plan_table import main

if __name__ == "__main__":
    sys.exit(main())
