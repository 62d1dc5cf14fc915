#!/usr/bin/env python3
"""Write Grafana's dashboard (deploy/grafana) of the metrics that there are."""

import sys

from maskserve_harness.documents.dashboard import main

if __name__ == "__main__":
    sys.exit(main())
