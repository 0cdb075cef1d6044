#!/usr/bin/env python3
"""Every verb of this repository: `python3 tools/dev.py VERB`, on a machine that has nothing but Python."""

import os
import sys

if sys.version_info < (3, 11) or sys.version_info >= (3, 14):
    sys.exit(
        "dev.py: Python %d.%d cannot run this workspace; start it with Python 3.11, 3.12 or 3.13 (python3.11 tools/dev.py ...)"
        % sys.version_info[:2]
    )
if sys.platform != "linux":
    sys.exit("dev.py: this workspace needs Linux (NIXL publishes wheels for nothing else); found %s" % sys.platform)

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from kvdev.cli import main  # noqa: E402  (the version must be checked before newer syntax is read)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
