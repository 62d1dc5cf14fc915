#!/usr/bin/env python3
"""Time the status record: to encode it, and to read it."""

import sys

from maskserve_harness.benchmarks.status import main

if __name__ == "__main__":
    sys.exit(main())
