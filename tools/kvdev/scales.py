"""Units of a dashboard as a person reads them: the divisor and the word that suit the highest value of a picture."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Scale", "scale_for"]

_STEPS: dict[str, tuple[tuple[float, str], ...]] = {
    "s": ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s")),
    "bytes": ((1.0, "B"), (2.0**10, "KiB"), (2.0**20, "MiB"), (2.0**30, "GiB")),
    "Bps": ((1.0, "B/s"), (1e3, "kB/s"), (1e6, "MB/s"), (1e9, "GB/s")),
    "cps": ((1.0, "/s"),),
    "short": ((1.0, ""),),
}
"""Grafana's name of a unit -> what it is shown in, from small to large."""

_PLAIN = {unit: next(step for step in steps if step[0] == 1.0) for unit, steps in _STEPS.items()}


@dataclass(frozen=True, slots=True)
class Scale:
    """Unit in which the values of a picture are shown."""

    divisor: float
    word: str

    def shown(self, value: float) -> str:
        """Return a value with its unit, e.g. 3145728 in MiB as `3 MiB`; three digits, or all before the point."""
        scaled = value / self.divisor
        digits = f"{scaled:.0f}" if abs(scaled) >= 1000 else f"{scaled:.3g}"
        return f"{digits} {self.word}".strip()


def scale_for(unit: str, highest: float) -> Scale:
    """Return the largest scale of a unit in which the highest value is at least 1; `scale_for("s", 0.02)` is ms.

    A picture in which everything is 0 is in the unit itself.
    """
    fitting = [step for step in _STEPS[unit] if highest >= step[0]]
    return Scale(*(fitting[-1] if fitting else _STEPS[unit][0]) if highest else _PLAIN[unit])
