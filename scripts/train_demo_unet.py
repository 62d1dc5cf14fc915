#!/usr/bin/env python3
"""Train the demo UNet and write it as a diffusers folder."""

import sys

from maskserve_training.unet_command import main

if __name__ == "__main__":
    sys.exit(main())
