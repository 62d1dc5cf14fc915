#!/usr/bin/env python3
"""Do harm to two real workers behind a router and count what becomes of their edits."""

import sys

from maskserve_harness.cluster.faults_command import main

if __name__ == "__main__":
    sys.exit(main())
