"""Findings of the pre-flight check: every code with its level and advice, and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import typer

from vllm_adapter.observe.cause_log import plain_text

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ADVICE", "NOTES", "Findings"]

_PORT = "see that this is its VLLM_NIXL_SIDE_CHANNEL_PORT plus its data-parallel index, and not its HTTP port"
_KEYS = (
    "compare side_channel_key, side_channel_server_key and side_channel_clients of both engines, and give --prefill-config and "
    "--decode-config if they have keys"
)
_CROWD = "look in its log for connections that it closes because there are too many"

ADVICE: Mapping[str, str] = {
    "connection-refused": "nothing listens there: is the engine up, and is this its VLLM_NIXL_SIDE_CHANNEL_PORT (not its HTTP "
    "port), plus its data-parallel index?",
    "timed-out": "a firewall or network policy drops the connection, or something else than a side channel listens there",
    "name-unresolved": "use an address, or a name that both machines resolve",
    "not-ready": "the engine has not registered its cache yet: wait until /health answers",
    # A web server, wrong keys and too many connections end the opening of a connection alike.
    "authentication-refused": f"first, {_PORT}; second, {_KEYS}; third, {_CROWD}",
    "authentication-refused with keys": f"first, {_KEYS}; second, {_PORT}; third, {_CROWD}",
    "invalid-key-file": "check the files that the configuration names",
    "insecure-key-file": "chmod 600 the secret file",
    "rank-missing": "a worker that died or never registered its cache: look into the engine's log, and restart it",
    "size-out-of-range": "another program answers there, or the engine's --tensor-parallel-size is wrong",
    "page-bytes-differ": "give the engine's --tensor-parallel-size",
    "size-not-proven": "if you are sure of the number, add --trust-prefill-tp",
    "same-engine": "name two engines; two that really share an id need engine_id in one --kv-transfer-config",
    "factors-differ": "start both engines with the same value",
    "factors-ignored": "enforce_handshake_compat is off, so the engines will not refuse each other; the text will be wrong",
    "hash-mismatch": 'vLLM\'s exact rule refuses that; "compatibility_policy": "negotiated" on the decode engine accepts it',
    "no-probe-pages": "kv-nixl serve there and kv-nixl doctor --peer here measure between the two machines",
    "not-measured": "kv-nixl doctor says what is missing; run this where the decode engine's packages are installed",
    "measured-elsewhere": "run this on the decode engine's machine for its speed and transport",
    "bytes-differ": "do not hand over between these; file a bug with the output of kv-nixl doctor of both machines",
    "read-failed": "kv-nixl doctor on both machines; a firewall may block UCX's ports, and UCX_NET_DEVICES may name a NIC that "
    "does not reach the other. --no-read leaves this out",
    "tcp-fallback": "kv-nixl doctor says which transports work and why others do not; without RDMA, --allow-tcp accepts this",
    "tcp-only": "unset UCX_TLS; without RDMA, --allow-tcp accepts this. kv-nixl doctor says which transports work",
    "terms-not-known": "give --prefill-config and --decode-config, or run this beside the engines",
    "lease-shorter-than-heartbeat": "give both engines the same kv_lease_duration; heartbeats come six times in it",
    "seal-missing": "give the prefill engine the fleet's secret (ticket_secret_files)",
    "seal-not-known": "give both the same secret; in a rotation, first let every engine verify the new one",
}
"""The next step, by code; other codes have none."""
NOTES = frozenset({
    "size-not-proven", "may-differ", "no-fences", "no-probe-pages", "not-measured", "measured-elsewhere", "plan-not-known",
    "terms-not-known", "one-heartbeat-to-spare", "seals-not-verified", "unsealed-tickets",
})  # fmt: skip
"""Codes that an operator should know, or that say what was not checked; any other code is a no-go."""
_COLOURS = {"ok": "green", "note": "yellow", "no-go": "red"}


@final
class Findings:
    """All findings of a check.

    Attributes:
        made: The findings in order: `level` ("ok", "note" or "no-go"), `topic`, `code`, `message` and `advice`; code and advice
            are empty if all is well.
    """

    def __init__(self) -> None:
        self._notes = set(NOTES)
        self.made: list[dict[str, str]] = []

    def allow(self, *codes: str) -> None:
        """Take these reasons against a hand-over as notes: the operator accepts them."""
        self._notes.update(codes)

    def ok(self, topic: str, message: str) -> None:
        """Add a result that is as it should be."""
        self.made.append({"level": "ok", "topic": topic, "code": "", "message": message, "advice": ""})

    def add(self, topic: str, code: str, message: str, advice: str = "") -> None:
        """Add a reason against a hand-over, or a note, see `NOTES`; without `advice` the code's own is given."""
        level, advice = "note" if code in self._notes else "no-go", advice or ADVICE.get(code, "")
        self.made.append({"level": level, "topic": topic, "code": code, "message": message, "advice": advice})

    @property
    def is_go(self) -> bool:
        """Whether nothing forbids a hand-over."""
        return all(each["level"] != "no-go" for each in self.made)

    def as_text(self) -> str:
        """Return a line per finding, its advice under it, and the verdict; `typer.echo` shows colours on a terminal alone."""
        lines: list[str] = []
        for each in self.made:
            code = f" ({each['code']})" if each["code"] else ""
            level = typer.style(f"{each['level']:5}", fg=_COLOURS[each["level"]])
            lines.append(f"{level}  {each['topic']:9}  {plain_text(each['message'])}{code}")
            if each["advice"]:
                lines.append(f"{'':18}-> {plain_text(each['advice'])}")
        reasons = sum(each["level"] == "no-go" for each in self.made)
        return "\n".join([*lines, f"NO GO: {reasons} reason{'s' if reasons > 1 else ''}" if reasons else "GO"])
