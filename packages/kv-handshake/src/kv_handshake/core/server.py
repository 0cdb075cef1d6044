"""The server's half of the protocol, without any input or output.

`ServerCore.respond` is total: every byte string gets an answer or a coded refusal, in bounded time and size, and
nothing is raised. What is served can be replaced at any moment from any thread: the core swaps one reference to an
immutable table.
"""

from __future__ import annotations

import threading
from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING, final

from kv_handshake.errors import WireError
from kv_handshake.wire.dialects import dialect_of
from kv_handshake.wire.queries import Rank, check_rank, encode_query, parse_query
from kv_handshake.wire.replies import encode_clock, encode_refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ServerCore"]

_TWO_FIELDS = dialect_of(2)
_THREE_FIELDS = dialect_of(5)


@final
class ServerCore:
    """Answers queries from a replaceable table of envelopes.

    Args:
        payloads: Envelope by (pp rank, tp rank); empty while there is nothing to serve yet.
    """

    def __init__(self, payloads: Mapping[Rank, bytes] | None = None) -> None:
        self._counts: Counter[str] = Counter()
        self._replace_lock = threading.Lock()
        self._table: Mapping[bytes, tuple[bytes, bool]] = MappingProxyType({})
        self._payloads: Mapping[Rank, bytes] = MappingProxyType({})
        self._stages = 1
        self.replace(payloads or {})

    def __repr__(self) -> str:
        return f"ServerCore(ranks={len(self._payloads)}, answered={self._counts['answered']})"

    def replace(self, payloads: Mapping[Rank, bytes]) -> None:
        """Serve these envelopes from now on.

        Raises:
            ConfigurationError: ``invalid-argument`` for a rank out of range.
        """
        for rank in payloads:
            check_rank(rank)
        with self._replace_lock:
            # The queries that clients really send, ready to look up: one dictionary access instead of a decode.
            table: dict[bytes, tuple[bytes, bool]] = {}
            for rank, payload in payloads.items():
                table[encode_query(rank, _THREE_FIELDS)] = (payload, True)
                if rank[0] == 0:
                    table[encode_query(rank, _TWO_FIELDS)] = (payload, False)
            self._payloads = MappingProxyType(dict(payloads))
            self._stages = 1 + max((pp for pp, _ in payloads), default=0)
            self._table = MappingProxyType(table)

    @property
    def stages(self) -> int:
        """Pipeline stages of the engine that is served."""
        return self._stages

    def respond(self, query: bytes, *, clock_s: float, reads_one_stage: bool = False) -> tuple[bytes, ...]:
        """Return the frames of the reply: the payload, and the clock if the query's dialect has one.

        Args:
            query: Any bytes.
            clock_s: The engine's monotonic clock, the one that its expiry times are stamped with.
            reads_one_stage: Whether the asker takes every rank for one that holds all layers, as vLLM's own connector does.
        """
        is_refused = reads_one_stage and self._stages > 1
        known = None if is_refused else self._table.get(query)
        if known is not None:
            self._counts["answered"] += 1
            payload, wants_clock = known
            return (payload, encode_clock(clock_s)) if wants_clock else (payload,)
        return self._respond_slowly(query, clock_s, is_refused=is_refused)

    def refuse(self, code: str, message: str = "", *, retry_after_s: float = 0.0) -> tuple[bytes, ...]:
        """Return a refusal without a clock frame, counted."""
        self._counts[f"refused.{code}"] += 1
        return (encode_refusal(code, message, retry_after_s=retry_after_s),)

    def defer(self, query: bytes, *, wait_s: float, clock_s: float) -> tuple[bytes, ...]:
        """Return the refusal of a query that came too soon, in as many frames as its asker expects."""
        _, wants_clock = self._table.get(query, (b"", False))
        clock = (encode_clock(clock_s),) if wants_clock else ()
        return (*self.refuse("rate-limited", retry_after_s=wait_s), *clock)

    def statistics(self) -> Mapping[str, int]:
        """Return the counts so far: ``answered``, and ``refused.<code>`` per code."""
        return dict(self._counts)

    def _respond_slowly(self, query: bytes, clock_s: float, *, is_refused: bool) -> tuple[bytes, ...]:
        """Answer queries that are not in the table: unusual encodings of valid ones, and those that are refused."""
        try:
            parsed = parse_query(query)
        except WireError as error:
            return self.refuse(error.code, str(error))
        clock = (encode_clock(clock_s),) if parsed.wants_clock else ()
        if is_refused:
            return (
                *self.refuse(
                    "pipeline-stages",
                    f"this engine has {self._stages} pipeline stages, and vLLM's own connector reads from engines with one: "
                    "read its tickets with the connector of vllm_adapter, or set its pipeline_parallel_size to 1",
                ),
                *clock,
            )
        payload = self._payloads.get(parsed.rank)
        if payload is not None:
            self._counts["answered"] += 1
            return (payload, *clock)
        if not self._payloads:
            return (*self.refuse("not-ready", retry_after_s=1.0), *clock)
        served = f"{len(self._payloads)} ranks are served, pp up to {max(pp for pp, _ in self._payloads)}"
        pp, tp = parsed.rank
        return (*self.refuse("unknown-rank", f"no metadata for pp rank {pp}, tp rank {tp}: {served}"), *clock)
