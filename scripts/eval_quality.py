#!/usr/bin/env python3
"""What cached activations cost in quality, measured against diffusers' own output."""

import sys

from maskserve_harness.quality.command import main

if __name__ == "__main__":
    sys.exit(main())
