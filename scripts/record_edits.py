#!/usr/bin/env python3
"""Record what a worker answers to 60 fixed edits, and compare it with an earlier record."""

import sys

from maskserve_harness.recording.command import main

if __name__ == "__main__":
    sys.exit(main())
