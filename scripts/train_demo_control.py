#!/usr/bin/env python3
"""Train the demo model's ControlNet, or judge it."""

import sys

from maskserve_training.control import main

if __name__ == "__main__":
    sys.exit(main())
