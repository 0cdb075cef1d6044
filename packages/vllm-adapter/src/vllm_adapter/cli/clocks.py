"""Differences between the clocks of processes, from messages between them.

Nothing is assumed of the clocks but that they run at the same speed for the minutes that a trace spans: processes of one
machine may share a clock, those of two machines do not, and both are treated alike. A message that leaves one process and
comes to another tells in which order two readings were taken. Each such pair bounds the difference of two clocks from one
side; messages in both directions bound it from both, and the middle is taken.

Example: a ticket is written when clock P shows 10.000 s and comes in when clock D shows 3.002 s, so D - P is at most -6.998 s.
"Read complete" leaves when D shows 3.004 s and comes in when P shows 10.008 s, so D - P is at least -7.004 s. D is 7.001 s
behind P, with an uncertainty of 0.003 s. Bounds also follow from others over a third clock.
"""

from __future__ import annotations

import math
from itertools import product
from typing import final

__all__ = ["Clocks"]

_NOISE_S = 1e-6
"""Contradiction that is ignored: clocks are read to less than a microsecond."""


@final
class Clocks:
    """Bounds of the differences between clocks that are known by name."""

    def __init__(self) -> None:
        self._most_s: dict[tuple[str, str], float] = {}
        self._settled_s: dict[tuple[str, str], float] = {}
        self._contradiction_s = 0.0

    def before(self, clock: str, at_s: float, other: str, other_at_s: float) -> None:
        """Take in that the moment `at_s` of `clock` came before the moment `other_at_s` of `other`.

        The reading of a clock is the true time plus its own shift x, so x(other) - x(clock) is at most `other_at_s - at_s`.
        """
        pair = clock, other
        self._most_s[pair] = min(self._most_s.get(pair, math.inf), other_at_s - at_s)
        self._settled_s.clear()

    def difference(self, clock: str, other: str) -> tuple[float, float] | None:
        """Return what `other` shows beyond `clock`, and the uncertainty (seconds); None if no messages went both ways.

        Bounds that contradict each other, as those of clocks that run at different speeds, give half the contradiction.
        """
        if clock == other:
            return 0.0, 0.0
        bounds = self._settled()
        most_s, least_s = bounds.get((clock, other), math.inf), -bounds.get((other, clock), math.inf)
        if math.isinf(most_s) or math.isinf(least_s):
            return None
        return (most_s + least_s) / 2, abs(most_s - least_s) / 2

    def contradiction_s(self) -> float:
        """Return by how much the bounds contradict each other; 0 if all can hold."""
        self._settled()
        return self._contradiction_s if self._contradiction_s > _NOISE_S else 0.0

    def _settled(self) -> dict[tuple[str, str], float]:
        """Return the tightest bounds, those that follow over other clocks included (shortest paths, Floyd and Warshall)."""
        if not self._settled_s:
            found = dict(self._most_s)
            names = sorted({name for pair in found for name in pair})
            self._contradiction_s = 0.0
            for over, clock, other in product(names, repeat=3):
                step_s = found.get((clock, over), math.inf) + found.get((over, other), math.inf)
                if clock == other:  # there and back: how long messages took, which cannot be less than nothing
                    self._contradiction_s = max(self._contradiction_s, -step_s)
                elif step_s < found.get((clock, other), math.inf):
                    found[clock, other] = step_s
            self._settled_s = found
        return self._settled_s
