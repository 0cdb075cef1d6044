"""One engine of a check, asked over its side channel: whether it answers, with which ranks, and what they send.

A listener of vLLM itself ends on a question for a rank that it does not serve, so a mistyped number would end the engine that it
was meant to check. Rank (0, 0), which every engine has, sends the length of its pages, and that follows from the size.

Worked example. The decode engine holds 8 heads of 128 bytes and 16 tokens in pages of 16 384 bytes. A first rank whose pages are
of 8 192 bytes is one of two: 2 is proven, and 4 is refused, which would need pages of 4 096 bytes. With one head, which every
rank holds, the pages are the same at any size: 2 may as well be 1, and only the operator can tell. vLLM itself takes no size that
cuts heads unevenly, so with 8 heads 3 and 5 are not among those that it might be instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast, final

from kv_handshake.inspect import probe
from kv_handshake.security import ClientSecurity
from kv_scheduler_state import PeerAddress
from kv_topology import CostModel, Planner, reshard
from vllm_adapter.cache.vllm_peer import PeerPlanner, peer_memory_kind
from vllm_adapter.cli.values import parse_json
from vllm_adapter.codes import advice_on
from vllm_adapter.config.keys import PERMUTE_GB_S
from vllm_adapter.errors import AdapterError, code_of, message_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_handshake.inspect import Recording
    from vllm_adapter.cache.documents import GeometryDocument, GroupDocument
    from vllm_adapter.cli.check.findings import Findings
    from vllm_adapter.ports import AgentMetadata

__all__ = ["Channel", "Engine", "ask_engine", "ask_further_ranks"]

Rank = tuple[int, int]

_MOST_RANKS = 256
_MOST_SIZE = 1 << 20
"""Sizes that an engine claims are counted up to this; it has no more ranks than are asked anyway."""
_KEY_CODES = frozenset({"invalid-key-file", "insecure-key-file"})


@final
@dataclass(frozen=True, slots=True)
class Channel:
    """An engine's side channel, and how it is asked.

    Attributes:
        role: The engine's role in the check, `prefill` or `decode`.
        host: Address.
        port: Port.
        dialect: Connector version of the engine.
        timeout_s: Longest wait per reply.
        key_files: Our secret certificate and the engine's public one, None for a plain side channel.
    """

    role: str
    host: str
    port: int
    dialect: int
    timeout_s: float
    key_files: tuple[str, str] | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.role} {host}:{self.port}"


@final
@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that answered.

    Attributes:
        channel: Where.
        peers: Metadata by (pp, tp) rank: of all ranks, or of the first one where others are missing.
        recording: The frames as received.
        clock_offset_s: Its clock minus ours, in seconds; None if it does not announce its clock.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
    """

    channel: Channel
    peers: Mapping[Rank, AgentMetadata]
    recording: Recording
    clock_offset_s: float | None
    tp: int = 1
    pp: int = 1

    @property
    def first(self) -> AgentMetadata:
        """Metadata of one rank, for what is the same on all."""
        return next(iter(self.peers.values()))

    @property
    def is_ours(self) -> bool:
        """Whether it sends geometry, as this connector does and vLLM's own does not."""
        return self.first.geometry is not None

    @property
    def has_all_ranks(self) -> bool:
        """Whether every rank answered."""
        return len(self.peers) == self.tp * self.pp

    def document(self, rank: Rank) -> GeometryDocument:
        """Return the geometry document that a rank sent, empty if it sent none that can be read."""
        try:
            document = parse_json(self.peers[rank].geometry or b"", "the geometry document")
        except AdapterError:
            document = None
        return cast("GeometryDocument", document if isinstance(document, dict) else {})

    def planner(self, rank: Rank, gigabytes_per_s: float | None = None) -> PeerPlanner:
        """Return a planner as this rank has it with `receive_conversion` "auto"; without a speed, that of shared memory."""
        local, kind = self.document(rank), peer_memory_kind(self.peers[rank])
        dealt = tuple(group["kind"] != "state" for group in local["groups"])
        cost = CostModel(permute_gb_s=PERMUTE_GB_S[kind])
        planner = Planner(staging="auto", cost=replace(cost, bandwidth_gb_s=gigabytes_per_s or cost.bandwidth_gb_s))
        stages = [self.document((stage, rank[1])) for stage in range(self.pp)] if self.has_all_ranks else []
        release = str(self.first.factors.get("vllm_version", ""))
        # Metadata tell drafts of a model alone.
        has_drafts = bool(self.first.factors.get("speculative_config")) and not all(dealt)
        cache_dtype = self.first.factors.get("cache_dtype")
        return PeerPlanner(local, dealt, reshard, planner, kind, stages, release, has_drafts, cache_dtype)

    def address(self, tp: int, groups: Sequence[GroupDocument]) -> PeerAddress:
        """Return how a ticket would name it, had it so many tensor-parallel ranks and these cache groups."""
        dcp = max([group["context"][0] for group in groups], default=1)
        return PeerAddress(self.first.engine_id, self.channel.host, self.channel.port, tp, self.pp, dcp)


def ask_engine(channel: Channel, findings: Findings, *, tp: int = 0) -> Engine | None:
    """Ask an engine for all its ranks; None if it did not answer, and the findings say why.

    One rank is asked first. The others are asked only where the engine says itself that it has them: vLLM's own listener ends on
    a question for a rank that it does not serve. Of such an engine `ask_further_ranks` asks the others.

    Args:
        channel: Its side channel.
        findings: Where the results go.
        tp: Its tensor-parallel size, as the operator says; 0 for what it says itself.
    """
    try:
        engine = _probe(channel, [(0, 0)])
    except Exception as error:  # noqa: BLE001  (whatever keeps the engine from answering is the finding)
        code = code_of(error)
        is_http = "is_http" in getattr(error, "context", ())
        is_locked = code == "authentication-refused" and channel.key_files is not None and not is_http
        topic = "keys" if is_locked or code in _KEY_CODES else "reach"
        findings.add(topic, code, f"{channel}: {message_of(error)}", "" if is_http else None)
        return None
    kind = "this connector"
    if engine.is_ours:
        document = engine.document((0, 0))
        engine = replace(engine, tp=_size(document.get("tp")), pp=_size(document.get("pp")))
    else:
        engine = replace(engine, tp=max(1, tp))
        kind = "vLLM's own connector, or one like it: it sends a hash and no factors"
    findings.ok("reach", f"{channel}: engine {engine.first.engine_id}, tp {engine.tp}, pp {engine.pp}; {kind}")
    return _with_all_ranks(engine, findings) if engine.is_ours else engine


def _probe(channel: Channel, ranks: Sequence[Rank]) -> Engine:
    security = ClientSecurity.read(*channel.key_files) if channel.key_files is not None else None
    host, port, dialect, timeout_s = channel.host, channel.port, channel.dialect, channel.timeout_s
    seen = probe(host, port, ranks=ranks, dialect=dialect, timeout_s=timeout_s, security=security)
    return Engine(channel, seen.peers, seen.recording, seen.clock_offset_s)


def _size(pair: object) -> int:
    size = cast("list[object]", pair)[0] if isinstance(pair, list) and pair else 1
    return min(size, _MOST_SIZE) if isinstance(size, int) and size > 0 else 1


def ask_further_ranks(prefill: Engine, decode: Engine | None, findings: Findings, *, is_trusted: bool) -> Engine:
    """Return an engine of vLLM's own connector with its ranks after the first, if they may be asked for; else findings say why.

    Args:
        prefill: The engine, by its first rank, with the size that the operator gave.
        decode: The engine that reads from it, whose geometry is compared.
        findings: Where the reason goes.
        is_trusted: Whether the operator vouches for a size that nothing proves; one that is disproved is never asked for.
    """
    if prefill.is_ours or prefill.tp == 1:
        return prefill
    reason = "the decode engine sends no geometry to compare with"
    if decode is not None and decode.is_ours:
        if error := _contradiction(prefill, decode, prefill.tp):
            reason = f"--prefill-tp {prefill.tp} cannot be, so no rank but the first was asked for: {message_of(error)}"
            findings.add("ranks", code_of(error), f"{prefill.channel}: {reason}", advice_on("page-bytes-differ"))
            return prefill
        others = [str(tp) for tp in range(1, prefill.tp) if _contradiction(prefill, decode, tp) is None]
        is_trusted = is_trusted or not others
        reason = f"its first rank would be the same with {', '.join(others)}"
    if is_trusted:
        return _with_all_ranks(prefill, findings)
    findings.add(
        "ranks",
        "size-not-proven",
        f"{prefill.channel}: only the first of {prefill.tp} ranks was asked for, since a listener of vLLM's own ends on a "
        f"question for one that it does not have, and nothing proves that it has so many: {reason}",
    )
    return prefill


def _contradiction(prefill: Engine, decode: Engine, tp: int) -> Exception | None:
    """Return why the first rank cannot be one of so many, None if it can."""
    try:
        planner = decode.planner(min(decode.peers))
        local = planner.document
        # vLLM itself refuses a size that neither divides the number of heads nor is a multiple of it.
        axes = [axis for fields in local["layouts"] for field in fields for axis in field["axes"]]
        counts = {size for name, size, *_, split in axes if name == "head" and split == "tp"}
        if uneven := sorted(count for count in counts if count % tp and tp % count):
            return AdapterError(
                f"{uneven[0]} heads cannot be shared by {tp} ranks of vLLM", code="size-out-of-range", fault="peer"
            )
        planner.peer_document(prefill.first, (0, 0), prefill.address(tp, local["groups"]))
    except Exception as error:  # noqa: BLE001  (whatever forbids the size is the answer)
        return error
    return None


def _with_all_ranks(engine: Engine, findings: Findings) -> Engine:
    """Ask for all ranks at once; if that fails, for each alone, to name those that are missing."""
    count = engine.pp * engine.tp
    if count == 1:
        return engine
    if count > _MOST_RANKS:
        claim = f"it says that it has {count} ranks, more than the {_MOST_RANKS} that are asked"
        findings.add("ranks", "size-out-of-range", f"{engine.channel}: {claim}")
        return engine
    ranks = [(stage, rank) for stage in range(engine.pp) for rank in range(engine.tp)]
    try:
        probed = _probe(engine.channel, ranks)
    except Exception:  # noqa: BLE001  (each is asked alone, so that the missing ones can be named)
        for rank in ranks:
            try:
                _probe(engine.channel, [rank])
            except Exception as error:  # noqa: BLE001  (it is the finding)
                message = f"{engine.channel}: rank {rank[0]}.{rank[1]} does not answer: {error}"
                findings.add("ranks", "rank-missing", message)
        return engine
    findings.ok("ranks", f"{engine.channel}: all {count} ranks answer")
    return replace(probed, tp=engine.tp, pp=engine.pp)
