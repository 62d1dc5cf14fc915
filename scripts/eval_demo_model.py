#!/usr/bin/env python3
"""Judge the demo model on fixed held-out edits with diffusers' own FluxFillPipeline."""

import sys

from maskserve_harness.demo_model.eval_command import main

if __name__ == "__main__":
    sys.exit(main())
