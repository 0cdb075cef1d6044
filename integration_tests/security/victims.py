"""A listener or a client in a process of its own, so that its memory and processor time can be measured."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

sys.path.append(str(Path(__file__).parents[1] / "fakes"))

from line_process import LineProcess

if TYPE_CHECKING:
    from kv_handshake.security import ClientSecurity

MEBIBYTE = 1024 * 1024
_TICKS = os.sysconf("SC_CLK_TCK")


class Victim(LineProcess):
    """A process of this module and the commands that it understands."""

    def __init__(self, role: str, **options: object) -> None:
        super().__init__([sys.executable, __file__, role, json.dumps(options)])
        self.port = int(self.answer()["port"])

    def call(self, command: str, **arguments: object) -> Any:
        """Send a command and return its answer."""
        return self.ask(command=command, **arguments)

    def resident_mb(self) -> float:
        """Return the memory that the process has now, in MB."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / MEBIBYTE

    def cpu_s(self) -> float:
        """Return the processor time that the process has taken."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self.end()


class Honest:
    """An honest client of a listener under attack: each of its fetches must be served."""

    def __init__(self, port: int, security: ClientSecurity | None = None) -> None:
        from kv_handshake import Client, LocalOffer, Timing

        timing = Timing(deadline_s=30, attempt_s=20)
        self._client = Client(LocalOffer(policy="off"), timing=timing, security=security)
        self._port = port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @property
    def attempts(self) -> int:
        """The connections that it has tried."""
        return self._client.statistics()["attempts"]

    def fetch(self, times: int = 1) -> list[float]:
        """Fetch so many times; return the seconds of each."""
        seconds: list[float] = []
        for _ in range(times):
            outcome = self._client.fetch(host="127.0.0.1", port=self._port, ranks=[(0, 0)], dialect=14)
            assert outcome.is_ok, outcome
            seconds.append(outcome.elapsed_s)
        return seconds


class PeakMeter:
    """The largest memory of a process while it is attacked."""

    def __init__(self, victim: Victim) -> None:
        self._victim = victim
        self._stop = threading.Event()
        self.before_mb = self.peak_mb = victim.resident_mb()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self.peak_mb = max(self.peak_mb, self._victim.resident_mb())

    @property
    def growth_mb(self) -> float:
        """The largest growth so far."""
        return max(self.peak_mb, self._victim.resident_mb()) - self.before_mb


def _say(value: object) -> None:
    print(json.dumps(value), flush=True)


def _serve(options: dict[str, Any]) -> None:
    import resource

    from envelopes import rewritten

    from kv_handshake import Listener
    from kv_handshake.testing import sample_envelopes

    if files := options.get("files"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if idle_s := options.get("idle_s"):
        from kv_handshake.sockets import watch

        watch.IDLE_S = idle_s
    payload = sample_envelopes([(0, 0)])[0, 0]
    if blob_bytes := options.get("blob_bytes"):  # as of an engine with many regions and rails
        payload = rewritten(payload, agent_metadata=bytes(blob_bytes))
    listener = Listener("127.0.0.1", 0, payloads={(0, 0): payload})
    listener.start()
    _say({"port": listener.port})
    for line in sys.stdin:
        assert json.loads(line)["command"] == "statistics"
        _say({**listener.statistics(), "alive": listener.is_alive})


def _ask(options: dict[str, Any]) -> None:
    import gc

    from kv_handshake import Client, LocalOffer, Timing

    policy = options.get("policy", "off")
    client = Client(
        LocalOffer(policy=policy, factors=options.get("factors", {"model": "m"})),
        timing=Timing(deadline_s=options.get("deadline_s", 30)),
    )
    _say({"port": 0})
    for line in sys.stdin:
        asked = json.loads(line)
        began_s = time.monotonic()
        codes: list[str] = []
        meter = _StallMeter()
        for number in range(asked.get("times", 1)):
            # Another engine each time, as forged tickets have it, so that no remembered failure answers.
            engine = f"{asked.get('engine', '')}{number if asked.get('times') else ''}"
            outcome = client.fetch(host="127.0.0.1", port=asked["port"], ranks=[(0, 0)], engine_id=engine, dialect=14)
            codes.append(outcome.code)
        seconds, stall_s = time.monotonic() - began_s, meter.stop()
        gc.collect()
        _say({"codes": sorted(set(codes)), "seconds": seconds, "stall_s": stall_s, **client.statistics()})


class _StallMeter:
    """The longest time for which a thread of the process got no turn while the process computed.

    A process without a core, on a machine that stands still, stalls no thread: no more is counted than its processor time.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._worst_s = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        last_s, last_work_s = time.monotonic(), time.process_time()
        while not self._stop.is_set():
            time.sleep(0.002)
            now_s, work_s = time.monotonic(), time.process_time()
            self._worst_s = max(self._worst_s, min(now_s - last_s, work_s - last_work_s))
            last_s, last_work_s = now_s, work_s

    def stop(self) -> float:
        self._stop.set()
        self._thread.join()
        return self._worst_s


def main() -> None:
    """Run as a listener or as a client until standard input ends."""
    {"listener": _serve, "client": _ask}[sys.argv[1]](json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
