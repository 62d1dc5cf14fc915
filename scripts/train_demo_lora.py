#!/usr/bin/env python3
"""Train a LoRA of the demo model, or judge one."""

import sys

from maskserve_training.lora import main

if __name__ == "__main__":
    sys.exit(main())
