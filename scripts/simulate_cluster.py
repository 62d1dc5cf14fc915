#!/usr/bin/env python3
"""Simulate a cluster that serves masked edits of FLUX.1 dev, in virtual time."""

import sys

from maskserve_harness.simulator.command import main

if __name__ == "__main__":
    sys.exit(main())
