#!/usr/bin/env python3
"""Make a demo model with Inpaint semantics of the one with Fill's, for eval_quality."""

import sys

from maskserve_training.inpaint import main

if __name__ == "__main__":
    sys.exit(main())
