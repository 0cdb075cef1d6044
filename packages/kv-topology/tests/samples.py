"""Samples of products of axes: `KVDEV_LONG=1` runs all of their cases."""

import os
from itertools import count
from math import gcd

LONG = os.environ.get("KVDEV_LONG") == "1"


def sampled(cases, about=36):
    """Return every n-th case; n has no divisor in common with their number, so that each axis goes through all its values."""
    found = list(cases)
    step = next(n for n in count(max(1, len(found) // about)) if gcd(n, len(found)) == 1)
    return found if LONG else found[::step]
