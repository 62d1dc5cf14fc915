#!/usr/bin/env python3
"""Bytes that one template takes, by entry kind, format and anchor stride, as a markdown table."""

import sys

from maskserve_harness.benchmarks.bytes_table import main

if __name__ == "__main__":
    sys.exit(main())
