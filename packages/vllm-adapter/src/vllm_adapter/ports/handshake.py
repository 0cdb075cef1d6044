"""Protocols of kv-handshake as the adapter uses it: every byte that crosses between engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from vllm_adapter.ports.streams import AskClient, AskListener

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


__all__ = ["PeerMetadata", "HandshakeOutcome", "HandshakeClient", "HandshakeListener", "NotificationView", "WireCodec"]


class PeerMetadata(Protocol):
    """Validated metadata of a peer rank from the side channel."""

    @property
    def engine_id(self) -> str: ...
    @property
    def agent_metadata(self) -> bytes:
        """NIXL's own blob for this rank's agent."""
        ...

    @property
    def kv_caches_base_addr(self) -> Sequence[int]: ...
    @property
    def device_id(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_lens(self) -> Sequence[int]: ...
    @property
    def block_strides(self) -> Sequence[int] | None: ...
    @property
    def kv_cache_layout(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def ssm_sizes(self) -> Sequence[int]: ...
    @property
    def physical_blocks_per_logical_kv_block(self) -> int: ...
    @property
    def region_names(self) -> Sequence[str] | None: ...
    @property
    def region_group_ids(self) -> Sequence[int] | None: ...
    @property
    def region_num_blocks(self) -> Sequence[int] | None: ...
    @property
    def region_mem_types(self) -> Sequence[str] | None: ...

    # Extension keys that only our own peers send; None or empty from vLLM's connector.
    @property
    def capabilities(self) -> Sequence[str]:
        """Names that the peer announces, such as ``nonce``; empty from vLLM's connector and from our own 0.1."""
        ...

    @property
    def generation(self) -> int | None:
        """Number of the peer's registration, below 2**53; a new one for every registration."""
        ...

    @property
    def factors(self) -> Mapping[str, object]:
        """The inputs of the compatibility hash, so that a mismatch can be named."""
        ...

    @property
    def fence(self) -> tuple[int, int, int] | None:
        """(address, device, word count) of the peer rank's fence array."""
        ...

    @property
    def streams(self) -> tuple[int, int, int, int] | None:
        """(address, device, slots, capacity) of the peer rank's stream memory."""
        ...

    @property
    def geometry(self) -> bytes | None:
        """Geometry document of the rank (kv-topology's format), opaque here."""
        ...


class HandshakeOutcome(Protocol):
    """End of one handshake with one engine: the metadata of all requested ranks, or a reason."""

    @property
    def is_ok(self) -> bool: ...
    @property
    def peers(self) -> Mapping[tuple[int, int], PeerMetadata]:
        """Metadata by (pp rank, tp rank); empty unless ok."""
        ...

    @property
    def code(self) -> str:
        """Stable reason, empty when ok."""
        ...

    @property
    def message(self) -> str: ...
    @property
    def elapsed_s(self) -> float: ...


class HandshakeClient(AskClient, Protocol):
    """Talks to many peers at once from its own thread."""

    def request(
        self,
        *,
        host: str,
        port: int,
        ranks: Sequence[tuple[int, int]],
        engine_id: str,
        dialect: int,
        on_done: Callable[[HandshakeOutcome], None],
        generation: int | None = None,
        check_first: Callable[[PeerMetadata], None] | None = None,
    ) -> None:
        """Start a handshake and return at once; `on_done` runs on the client's thread exactly once.

        A peer of another registration generation than `generation` is refused; None accepts any. A closed port ends the handshake
        at once (``connection-refused``). While the client remembers a failure of the same question, the request ends at once with
        ``recently-failed``, and the client asks the peer again in the background.

        With `check_first`, every attempt, even one in the background, asks for rank (0, 0) alone and calls `check_first` with
        that rank's metadata on the client's thread; it asks for the other ranks after the call has returned. An exception from
        the call ends the handshake with ``first-rank-refused``.
        """
        ...

    def close(self) -> None: ...


class HandshakeListener(AskListener, Protocol):
    """Serves this engine's metadata, supervised."""

    @property
    def port(self) -> int: ...
    def start(self) -> None:
        """Bind and serve; a bind failure is raised at once."""
        ...

    def replace(self, payloads: Mapping[tuple[int, int], bytes]) -> None:
        """Serve these envelopes by (pp rank, tp rank) from now on."""
        ...

    def close(self) -> None: ...


class NotificationView(Protocol):
    """A parsed notification of a peer."""

    @property
    def kind(self) -> Literal["read-complete", "heartbeat", "unknown"]: ...
    @property
    def request_ids(self) -> Sequence[str]:
        """Requests on the receiver's side; of an unknown notification only a push registration has one: the sender's own id."""
        ...

    @property
    def nonces(self) -> Sequence[str]:
        """Nonce of the grant for each request id, parallel to `request_ids`; "" in vLLM's own form."""
        ...

    @property
    def reader_count(self) -> int:
        """Number of this consumer's ranks that will report this request to this producer rank (0 for a heartbeat)."""
        ...

    @property
    def consumer(self) -> str:
        """Engine id of the consumer that read; "" in vLLM's own form."""
        ...

    @property
    def surplus(self) -> int:
        """Number of a heartbeat's entries that exceeded the limit and were not read."""
        ...


class WireCodec(Protocol):
    """Bytes that the adapter sends or receives outside the side channel's own loop."""

    def encode_envelope(
        self,
        metadata: Mapping[str, object],
        factors: Mapping[str, object],
        *,
        dialect: int,
        rank: tuple[int, int] | None = None,
    ) -> bytes:
        """Return one rank's envelope for the listener; `metadata` by `PeerMetadata` names."""
        ...

    @property
    def reserved_prefixes(self) -> tuple[str, ...]:
        """Request ids that begin with one of these cannot be notified."""
        ...

    def read_complete(self, request_id: str, reader_count: int, *, nonce: str = "", consumer: str = "") -> bytes:
        """Notification that a read is complete: vLLM's form without a nonce, our own with one.

        Raises a coded error for a request id, nonce or consumer that no peer could read back.
        """
        ...

    def heartbeats(self, readers: Sequence[tuple[str, str]]) -> Sequence[bytes]:
        """Notifications that renew leases, for (request id, nonce) pairs; nonce "" selects vLLM's form.

        Raises a coded error for an id or a nonce that no peer could read back.
        """
        ...

    def parse_notification(self, payload: bytes) -> NotificationView:
        """Read a notification of either form; never raises."""
        ...
