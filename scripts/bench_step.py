#!/usr/bin/env python3
"""How much faster is a step of cached rows than one of dense rows, and how near the FLOP limit?"""

import sys

from maskserve_harness.benchmarks.step import main

if __name__ == "__main__":
    sys.exit(main())
