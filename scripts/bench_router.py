#!/usr/bin/env python3
"""What a router adds to an edit, and how its policies balance workers in real time."""

import sys

from maskserve_harness.cluster.command import main

if __name__ == "__main__":
    sys.exit(main())
