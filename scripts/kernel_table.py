#!/usr/bin/env python3
"""How many kernels a step of FLUX.1-dev at 1024x1024 launches on CUDA, by case; needs no GPU."""

import sys

from maskserve_harness.benchmarks.kernel_table import main

if __name__ == "__main__":
    sys.exit(main())
