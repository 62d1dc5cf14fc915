#!/usr/bin/env python3
"""Serve maskserve's workers on this host: the same as `maskserve serve`."""

import sys

from maskserve_client.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
