#!/usr/bin/env python3
"""Do harm to a real worker and measure what its clients see and how soon it is back."""

import sys

from maskserve_harness.faults.command import main

if __name__ == "__main__":
    sys.exit(main())
