#!/usr/bin/env python3
"""What a UNet would gain by convolving tiles round the mask alone: limits and bytes, counted."""

import sys

from maskserve_harness.benchmarks.conv_tiles import main

if __name__ == "__main__":
    sys.exit(main())
