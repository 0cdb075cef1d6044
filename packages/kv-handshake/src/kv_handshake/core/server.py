"""The server's half of the protocol, without any input or output.

`ServerCore.respond` is total: every byte string gets an answer or a coded refusal, in bounded time and size, and
nothing is raised. What is served can be replaced at any moment from any thread: the core swaps one reference to an
immutable table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

from kv_handshake.errors import WireError, require
from kv_handshake.wire.queries import Rank, check_rank, parse_query
from kv_handshake.wire.replies import encode_clock, encode_refusal

__all__ = ["Incoming", "Sender", "ServerCore"]


@final
@dataclass(slots=True)
class Sender:
    """A connection as the listener's thread knows it.

    Attributes:
        address: The peer's IP address.
        descriptor: The transport's descriptor of the connection.
        is_req: Whether its socket is a REQ, as that of vLLM's own connector.
        queries: Messages that have come from it.
    """

    address: str
    descriptor: int
    is_req: bool = False
    queries: int = 0


class Incoming(NamedTuple):
    """A message from a peer.

    Attributes:
        envelope: Frames that lead back to the sender: its identity, and the empty delimiter if it sent one.
        query: The query, or None if the message is not shaped like one.
        sender: The connection that it came from.
        surplus: Frames beyond those of a query.
    """

    envelope: tuple[bytes, ...]
    query: bytes | None
    sender: Sender
    surplus: int = 0


@final
class ServerCore:
    """Answers queries from a replaceable table of envelopes: any bytes get an answer or a coded refusal.

    Args:
        payloads: Envelope by (pp rank, tp rank); empty while there is nothing to serve yet.
        splits_blocks: Whether context ranks hold parts of blocks in turn, instead of whole ones.

    Attributes:
        stages: Pipeline stages of the engine that is served.
        counts: ``answered``, and ``refused.<code>`` per code.

    Raises:
        ConfigurationError: ``invalid-argument`` for a rank out of range.
    """

    def __init__(self, payloads: Mapping[Rank, bytes] | None = None, *, splits_blocks: bool = False) -> None:
        self._splits_blocks = splits_blocks
        self.counts: Counter[str] = Counter()
        self.replace({} if payloads is None else payloads)

    def replace(self, payloads: Mapping[Rank, bytes]) -> None:
        """Serve these envelopes from now on.

        Raises:
            ConfigurationError: ``invalid-argument`` for a rank out of range.
        """
        require(Mapping, payloads=payloads)
        for rank, payload in payloads.items():
            check_rank(rank)
            require(bytes, payload=payload)
        self._payloads = dict(payloads)
        self.stages = 1 + max((pp for pp, _ in payloads), default=0)

    @property
    def unreadable(self) -> tuple[str, str] | None:
        """Code and cause by which vLLM's own connector cannot read from this engine; None if it can."""
        if self.stages > 1:
            code = "pipeline-stages"
            cause = (
                f"this engine has {self.stages} pipeline stages, and vLLM's own connector reads from engines with one"
            )
            remedy = "pipeline_parallel_size to 1"
        elif self._splits_blocks:
            code = "context-turns"
            cause = "context ranks here hold parts of blocks, and vLLM's own connector takes every block for consecutive tokens"
            remedy = "cp_kv_cache_interleave_size to its block size"
        else:
            return None
        return code, f"{cause}: read its tickets with the connector of vllm_adapter, or set its {remedy}"

    def respond(
        self, query: bytes, *, clock_s: float, reads_one_stage: bool = False, wait_s: float = 0.0
    ) -> tuple[bytes, ...]:
        """Return the frames of the reply: the payload, and the clock if the query's dialect has one.

        Args:
            query: Any bytes.
            clock_s: The engine's monotonic clock, the one that its expiry times are stamped with.
            reads_one_stage: Whether the asker takes every rank for one that holds all layers, and whole blocks, as vLLM's own
                connector does.
            wait_s: Above 0 for a query that came too soon: after so many seconds it would be answered.
        """
        require(bytes, query=query)
        try:
            parsed = parse_query(query)
        except WireError as error:
            code, text = ("rate-limited", "") if wait_s else (error.code, error.message)
            return self.refuse(code, text, retry_after_s=wait_s)
        clock = (encode_clock(clock_s),) if parsed.wants_clock else ()
        payloads = self._payloads
        if wait_s:
            return (*self.refuse("rate-limited", retry_after_s=wait_s), *clock)
        if reads_one_stage and (unreadable := self.unreadable):
            return (*self.refuse(*unreadable), *clock)
        payload = payloads.get(parsed.rank)
        if payload is not None:
            self.counts["answered"] += 1
            return (payload, *clock)
        if not payloads:
            return (*self.refuse("not-ready", retry_after_s=1.0), *clock)
        served = f"{len(payloads)} ranks are served, pp up to {max(pp for pp, _ in payloads)}"
        pp, tp = parsed.rank
        return (*self.refuse("unknown-rank", f"no metadata for pp rank {pp}, tp rank {tp}: {served}"), *clock)

    def refuse(self, code: str, message: str = "", *, retry_after_s: float = 0.0) -> tuple[bytes, ...]:
        """Return a refusal without a clock frame, counted."""
        self.counts[f"refused.{code}"] += 1
        return (encode_refusal(code, message, retry_after_s=retry_after_s),)
