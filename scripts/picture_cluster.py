#!/usr/bin/env python3
"""A cluster at work, drawn from what Prometheus has scraped of it."""

import sys

from maskserve_harness.cluster.picture import main

if __name__ == "__main__":
    sys.exit(main())
