#!/usr/bin/env python3
"""Load a worker for a long time with everything that users do, and see that it stays as it was."""

import sys

from maskserve_harness.soaking.command import main

if __name__ == "__main__":
    sys.exit(main())
