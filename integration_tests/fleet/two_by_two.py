"""Two prefill and two decode engines with our connector, which drain when they are asked to end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from judging import LEASE_S, fleet_python, model_folder

from kvdev.demo import connector_config
from kvdev.engines import Engine, EngineSpec, Launch, start_all, wait_healthy

SHUTDOWN_TIMEOUT_S = 40
_FLUSH = {"model": "tiny", "prompt": "flush", "max_tokens": 2, "temperature": 0}


@dataclass
class TwoByTwo:
    """The engines, in the order prefill, prefill, decode, decode."""

    engines: list[Engine]

    @property
    def prefill(self) -> list[Engine]:
        """The prefill engines."""
        return self.engines[:2]

    @property
    def decode(self) -> list[Engine]:
        """The decode engines."""
        return self.engines[2:]

    def pages(self) -> list[str]:
        """Return the metrics pages of all engines."""
        return [engine.metrics() for engine in self.engines]

    def take_steps(self) -> None:
        """Let each engine take a few steps."""
        for engine in self.engines:
            engine.complete(_FLUSH)

    def start_again(self, place: int) -> None:
        """Start an engine anew that has ended, on the same ports, and wait until it is healthy."""
        self.engines[place] = self.engines[place].again()
        wait_healthy([self.engines[place]])


@contextlib.contextmanager
def started_two_by_two(launch: Launch) -> Iterator[TwoByTwo]:
    """Start the four engines together, each by a call of `launch`."""
    specs = [
        EngineSpec(
            f"fleet-{side}-{number}",
            model_folder(),
            str(number),
            connector_config(role, kv_lease_duration=LEASE_S),
            ["--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)],
        )
        for side, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
        for number in range(2)
    ]
    # Ends what is in the list at its end: engines that were started anew, too.
    with start_all(specs, fleet_python(), quiet=True, launch=launch) as engines:
        yield TwoByTwo(engines)
