#!/usr/bin/env python3
"""Time of one routing decision, per policy, cluster size and state."""

import sys

from maskserve_harness.benchmarks.routing import main

if __name__ == "__main__":
    sys.exit(main())
