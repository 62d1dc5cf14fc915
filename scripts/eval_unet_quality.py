#!/usr/bin/env python3
"""What cached activations cost a UNet in quality."""

import sys

from maskserve_harness.quality.unet_command import main

if __name__ == "__main__":
    sys.exit(main())
