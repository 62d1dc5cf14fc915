#!/usr/bin/env python3
"""Time what one edit costs before and after the model: decode, masks, paste, encode."""

import sys

from maskserve_harness.benchmarks.codec import main

if __name__ == "__main__":
    sys.exit(main())
