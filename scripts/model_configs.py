#!/usr/bin/env python3
"""Write every config.pbtxt from the declared tensors."""

import sys

from maskserve_harness.documents.model_configs import main

if __name__ == "__main__":
    sys.exit(main())
