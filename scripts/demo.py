#!/usr/bin/env python3
"""One masked edit of a photograph through a real Triton, from start to stop."""

import sys

from maskserve_harness.demo import main

if __name__ == "__main__":
    sys.exit(main())
