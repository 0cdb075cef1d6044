"""For tests of code that uses this package: a network in memory, checks for other implementations, and hostile bytes.

The fakes move the real bytes through the real protocol cores; only sockets, threads and time are missing. Nothing here
needs a test framework: a check is a callable that raises `AssertionError` with a reason.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol, final

import msgspec

from kv_handshake._ask_frames import encode_ask, encode_cancel
from kv_handshake._codec import Codec
from kv_handshake._dialect import NEWEST_DIALECT, OLDEST_DIALECT, dialect_of
from kv_handshake._endpoint import endpoint_of
from kv_handshake._errors import TransportError
from kv_handshake._first_rank import FirstRankRequest
from kv_handshake._outcome import outcome_of
from kv_handshake._policy import LocalOffer
from kv_handshake._queries import encode_query
from kv_handshake._reading import decode_clock, decode_envelope
from kv_handshake._server import ServerCore
from kv_handshake._task import HandshakeRequest, Question, Task
from kv_handshake._timing import Timing
from kv_handshake._vectors import load_vectors

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kv_handshake._messages import AgentMetadata
    from kv_handshake._outcome import HandshakeSession, Outcome
    from kv_handshake._queries import Rank

__all__ = [
    "FakeClient",
    "FakeListener",
    "FakeNetwork",
    "check_client",
    "check_listener",
    "hostile_queries",
    "load_vectors",
    "mutate",
    "sample_envelopes",
    "sample_metadata",
]

_FACTORS: Mapping[str, object] = {"model": "sample", "dtype": "torch.bfloat16", "num_kv_heads": 8}


def sample_metadata(engine_id: str = "engine-a", *, regions: int = 2) -> dict[str, object]:
    """Return valid agent metadata by name, with the extension keys, for every dialect."""
    return {
        "engine_id": engine_id,
        "agent_metadata": bytes(range(256)),
        "kv_caches_base_addr": [0x7F00_0000_0000 + (index << 28) for index in range(regions)],
        "device_id": 0,
        "num_blocks": 4096,
        "block_lens": [65_536] * regions,
        "block_strides": [65_536] * regions,
        "kv_cache_layout": "HND",
        "block_size": 16,
        "ssm_sizes": (0, 0),
        "attn_backend_name": "FLASH_ATTN",
        "physical_blocks_per_logical_kv_block": 1,
        "region_num_blocks": [4096] * regions,
        "region_group_ids": [0] * regions,
        "region_names": [f"model.layers.{index}.self_attn.attn" for index in range(regions)],
        "region_mem_types": ["VRAM"] * regions,
        "generation": 1,
        "fence": (0x7E00_0000_0000, 0, 1024),
        "geometry": b"geometry",
    }


def sample_envelopes(
    ranks: Sequence[Rank] = ((0, 0),), *, dialect: int = 14, regions: int = 2, factors: Mapping[str, object] = _FACTORS
) -> dict[Rank, bytes]:
    """Return valid envelopes of engine ``engine-a`` by rank; device ids are the tp ranks, and addresses differ."""
    codec = Codec()
    envelopes: dict[Rank, bytes] = {}
    for rank in ranks:
        metadata = sample_metadata(regions=regions)
        first = 0x7F00_0000_0000 + (rank[1] << 36)
        metadata["kv_caches_base_addr"] = [first + (index << 28) for index in range(regions)]
        metadata["device_id"] = rank[1]
        envelopes[rank] = codec.encode_envelope(metadata, factors, dialect=dialect, rank=rank)
    return envelopes


# Fakes ---------------------------------------------------------------------------------------------------------------


@final
class FakeNetwork:
    """Listeners by address, clients with requests under way, and a clock that only moves when told."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._cores: dict[tuple[str, int], ServerCore] = {}
        self._queue: deque[Task[HandshakeSession]] = deque()
        self._next_port = 5600

    def take_port(self, host: str, port: int, core: ServerCore) -> int:
        """Let a core listen; return its port."""
        if not port:
            port, self._next_port = self._next_port, self._next_port + 1
        if (host, port) in self._cores:
            raise TransportError("bind-failed", f"{host} port {port} is taken", host=host, port=port)
        self._cores[host, port] = core
        return port

    def release_port(self, host: str, port: int) -> None:
        """Free an address."""
        self._cores.pop((host, port), None)

    def submit(self, task: Task[HandshakeSession]) -> None:
        """Queue a request."""
        self._queue.append(task)

    def run(self) -> int:
        """Perform all queued handshakes, in order; return how many ended."""
        count = 0
        while self._queue:
            task = self._queue.popleft()
            self._perform(task)
            task.on_end(task)
            count += 1
        return count

    def _perform(self, task: Task[HandshakeSession]) -> None:
        task.begin_attempt(self.now_s)
        session, endpoint = task.session, task.request.endpoint
        core = self._cores.get((endpoint.host, endpoint.port))
        if core is None:
            session.fail(task.connection_error("connection-refused", self.now_s))
        while core is not None and not session.is_over:
            session.receive_message(
                core.respond(session.next_query(now_s=self.now_s), clock_s=self.now_s), now_s=self.now_s
            )


@final
class FakeListener:
    """A listener on a fake network, with the real one's methods."""

    def __init__(
        self, network: FakeNetwork, host: str = "127.0.0.1", port: int = 0, payloads: Mapping[Rank, bytes] | None = None
    ) -> None:
        self._network = network
        self._host = host
        self._port = port
        self._core = ServerCore(payloads)

    @property
    def port(self) -> int:
        """The port, once started."""
        return self._port

    def start(self) -> None:
        """Listen."""
        self._port = self._network.take_port(self._host, self._port, self._core)

    def replace(self, payloads: Mapping[Rank, bytes]) -> None:
        """Serve other envelopes."""
        self._core.replace(payloads)

    def statistics(self) -> Mapping[str, int]:
        """Return the core's counts."""
        return self._core.statistics()

    def close(self) -> None:
        """Stop listening."""
        self._network.release_port(self._host, self._port)


@final
class FakeClient:
    """A client on a fake network; requests are performed by `FakeNetwork.run`, and their callbacks run there."""

    def __init__(self, network: FakeNetwork, offer: LocalOffer | None = None) -> None:
        self._network = network
        self._offer = offer or LocalOffer(factors=_FACTORS)
        self._counts = {"succeeded": 0, "failed": 0}

    def request(
        self,
        *,
        host: str,
        port: int,
        ranks: Sequence[Rank],
        engine_id: str,
        dialect: int,
        on_done: Callable[[Outcome], None],
        generation: int | None = None,
        check_first: Callable[[AgentMetadata], None] | None = None,
    ) -> None:
        """Queue a handshake."""
        question = Question(endpoint_of(host, port), tuple(ranks), engine_id, dialect, generation)

        def ended(task: Task[HandshakeSession]) -> None:
            outcome = outcome_of(task, self._network.now_s)
            self._counts["succeeded" if outcome.is_ok else "failed"] += 1
            on_done(outcome)

        whole = HandshakeRequest(question, self._offer)
        request = whole if check_first is None else FirstRankRequest(whole, check_first)
        self._network.submit(Task(request, ended, timing=Timing(), now_s=self._network.now_s))

    def statistics(self) -> Mapping[str, int]:
        """Return how many handshakes succeeded and failed."""
        return dict(self._counts)

    def close(self) -> None:
        """Do nothing: a fake holds no resource."""


# Checks --------------------------------------------------------------------------------------------------------------


class _ListenerPort(Protocol):
    """The methods of a served listener that `check_listener` uses."""

    def replace(self, payloads: Mapping[Rank, bytes], /) -> None:
        """Serve other envelopes."""
        ...

    def statistics(self) -> Mapping[str, int]:
        """Return the counts."""
        ...


def check_listener(listener: _ListenerPort, ask: Callable[[bytes], Sequence[bytes]]) -> None:
    """Check that a running listener answers valid queries and survives and refuses bad ones.

    Args:
        listener: The listener; its envelopes are replaced.
        ask: Sends one query to it, as a DEALER, and returns the frames of the reply.
    """
    ranks = [(0, 0), (0, 1), (1, 0)]
    envelopes = sample_envelopes(ranks)
    listener.replace(envelopes)
    for rank in ranks:
        for version in range(OLDEST_DIALECT, NEWEST_DIALECT + 1):
            dialect = dialect_of(version)
            if dialect.query_fields == 2 and rank[0]:
                continue
            frames = list(ask(encode_query(rank, dialect)))
            _expect(frames[0] == envelopes[rank], f"rank {rank} in version {version} got other bytes")
            _expect(len(frames) == 1 + dialect.has_clock_frame, f"version {version} got {len(frames)} frames")
            if dialect.has_clock_frame:
                decode_clock(frames[1])
    for query, code in (
        (encode_query((0, 9), dialect_of(14)), "unknown-rank"),
        (b"", "malformed-query"),
        (b"\xc1" * 40, "malformed-query"),
        (msgspec.msgpack.encode([b"get_meta_msg"]), "wrong-arity"),
        (msgspec.msgpack.encode([b"other", 1]), "unknown-command"),
        (b"x" * 1000, "oversized-query"),
    ):
        refusal = decode_envelope(ask(query)[0]).refusal
        _expect(refusal is not None and refusal.code == code, f"{query[:40]!r} was not refused as {code}: {refusal}")
    listener.replace({})
    refusal = decode_envelope(ask(encode_query((0, 0), dialect_of(14)))[0]).refusal
    _expect(refusal is not None and refusal.code == "not-ready", f"nothing to serve, but the answer is {refusal}")
    listener.replace(envelopes)
    _expect(ask(encode_query((0, 1), dialect_of(14)))[0] == envelopes[0, 1], "no good answer after the bad queries")
    _expect(listener.statistics()["answered"] > 0, "good answers are not counted")


def check_client(fetch: Callable[[Sequence[Rank], str, int], Outcome], listener: _ListenerPort) -> None:
    """Check that a client tells good peers from bad ones.

    Args:
        fetch: Performs a handshake with the listener for (ranks, engine id, dialect) with the sample factors.
        listener: The listener that it talks to; its envelopes are replaced.
    """
    ranks = [(0, 0), (0, 1)]
    for version in range(OLDEST_DIALECT, NEWEST_DIALECT + 1):
        listener.replace(sample_envelopes(ranks, dialect=version))
        outcome = fetch(ranks, "engine-a", version)
        _expect(outcome.is_ok, f"version {version}: {outcome.code}: {outcome.message}")
        _expect([outcome.peers[rank].device_id for rank in ranks] == [0, 1], f"version {version}: ranks are confused")
    _expect(fetch(ranks, "engine-b", 14).code == "engine-mismatch", "another engine was accepted")
    _expect(fetch([(0, 5)], "engine-a", 14).code == "refused", "a rank that is not served was accepted")
    other = {**_FACTORS, "dtype": "torch.float16"}
    listener.replace(sample_envelopes(ranks, factors=other))
    outcome = fetch(ranks, "engine-a", 14)
    _expect(outcome.code == "hash-mismatch", f"another dtype was {outcome.code or 'accepted'}")
    _expect("dtype" in outcome.message, f"the differing factor is not named: {outcome.message}")


def _expect(is_true: bool, otherwise: str) -> None:
    if not is_true:
        raise AssertionError(otherwise)


# Hostile bytes -------------------------------------------------------------------------------------------------------


def mutate(rng: random.Random, frame: bytes) -> bytes:
    """Return a frame with one thing wrong: a bit, a byte, its end, a repeated or a missing part, or a bad length."""
    data = bytearray(frame)
    kind = rng.randrange(7)
    spot = rng.randrange(len(data)) if data else 0
    if not data or kind == 0:
        return rng.randbytes(rng.randrange(64))
    if kind == 1:
        data[spot] ^= 1 << rng.randrange(8)
    elif kind == 2:
        data[spot] = rng.choice((0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC6, 0xD4, 0xDD, 0xDF, 0xFF))
    elif kind == 3:
        del data[spot:]
    elif kind == 4:
        data[spot:spot] = data[spot : spot + rng.randrange(16)]
    elif kind == 5:
        del data[spot : spot + 1 + rng.randrange(4)]
    else:
        data[spot:spot] = rng.choice(
            (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 80)
        )
    return bytes(data)


def hostile_queries(rng: random.Random) -> Iterator[bytes]:
    """Yield endless queries that are wrong in one way or another; now and then one of them is valid all the same."""
    good = [encode_query((0, tp), dialect_of(version)) for version in (2, 14) for tp in (0, 1, 200, 60_000)]
    good += [encode_ask(1, b""), encode_ask(70_000, b"question"), encode_cancel(70_000)]
    wild: list[object] = [None, True, -1, 0.5, "0", b"0", 2**63, [], {}, [[0]], {"a": 1}, b"get_meta_msg"]
    while True:
        kind = rng.randrange(4)
        if kind == 0:
            yield rng.randbytes(rng.randrange(300))
        elif kind == 1:
            fields = [rng.choice((b"get_meta_msg", b"get_advertisement", b"ask", "get_meta_msg", rng.choice(wild)))]
            yield msgspec.msgpack.encode(fields + [rng.choice(wild) for _ in range(rng.randrange(5))])
        else:
            frame = rng.choice(good)
            for _ in range(rng.randrange(1, 4)):
                frame = mutate(rng, frame)
            yield frame
