"""`python -m kv_topology._tools` is the command line `kv-topology`."""

import sys

from kv_topology._tools._cli import main

__all__: list[str] = []

sys.exit(main())
