#!/usr/bin/env python3
"""Write the tables of modules in docs/modules.md."""

import sys

from maskserve_harness.documents.module_index import main

if __name__ == "__main__":
    sys.exit(main())
