#!/usr/bin/env python3
"""Whether what we ask for can be installed: each extra and each image, from the public index."""

import sys

from maskserve_harness.documents.install_check import main

if __name__ == "__main__":
    sys.exit(main())
