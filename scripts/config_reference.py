#!/usr/bin/env python3
"""Write docs/configuration.md: every key of the worker's and the router's configuration."""

import sys

from maskserve_harness.documents.configuration import main

if __name__ == "__main__":
    sys.exit(main())
