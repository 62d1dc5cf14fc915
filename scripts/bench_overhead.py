#!/usr/bin/env python3
"""What serving adds to an edit: Triton and the step loop against calling the parts directly."""

import sys

from maskserve_harness.benchmarks.overhead import main

if __name__ == "__main__":
    sys.exit(main())
