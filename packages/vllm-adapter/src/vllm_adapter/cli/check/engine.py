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

from kv_handshake.inspect import compare, probe
from kv_handshake.security import ClientSecurity
from kv_topology import CostModel, Planner, reshard
from vllm_adapter.cache.documents import PeerSizes
from vllm_adapter.cache.vllm_peer import PeerGeometry
from vllm_adapter.cli.check.findings import ADVICE
from vllm_adapter.cli.values import parse_json
from vllm_adapter.config.keys import PERMUTE_GB_S
from vllm_adapter.errors import AdapterError, code_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_handshake.inspect import Comparison, Recording
    from vllm_adapter.cache.documents import GeometryDocument
    from vllm_adapter.cli.check.findings import Findings, Topic
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
        clock_offset_s: Its clock minus ours, in seconds; None if it does not announce its clock.
        recording: The frames as received.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        is_ours: Whether it sends geometry, as this connector does and vLLM's own does not.
        has_all_ranks: Whether every rank answered.
    """

    channel: Channel
    peers: Mapping[Rank, AgentMetadata]
    clock_offset_s: float | None
    recording: Recording
    tp: int = 1
    pp: int = 1
    is_ours: bool = True
    has_all_ranks: bool = True

    @property
    def first(self) -> AgentMetadata:
        """Metadata of one rank, for what is the same on all."""
        return next(iter(self.peers.values()))

    @property
    def engine_id(self) -> str:
        """The engine's name."""
        return self.first.engine_id

    def document(self, rank: Rank) -> GeometryDocument:
        """Return the geometry document that a rank sent, empty if there is none that can be read."""
        return cast("GeometryDocument", _document(self.peers[rank].geometry))

    def differences_to(self, producer: Engine) -> Comparison:
        """Compare this engine, as the consumer, with a producer."""
        return compare(self.recording, producer.recording)

    def planner(self, rank: Rank, gigabytes_per_s: float | None = None) -> Planner:
        """Return a planner as this rank has it with `receive_conversion` "auto"; without a speed, that of shared memory."""
        permute = PERMUTE_GB_S[PeerGeometry.memory_kind(self.peers[rank])]
        cost = CostModel(permute_gb_s=permute)
        return Planner(staging="auto", cost=replace(cost, bandwidth_gb_s=gigabytes_per_s or cost.bandwidth_gb_s))

    def geometry(self, rank: Rank) -> tuple[GeometryDocument, PeerGeometry]:
        """Return a rank's document, and what derives peers' documents from it."""
        local = self.document(rank)
        dealt = tuple(group["kind"] != "state" for group in local["groups"])
        return local, PeerGeometry(reshard, dealt)


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
        _add_silence(findings, channel, error)
        return None
    is_ours = engine.first.geometry is not None
    document = _document(engine.first.geometry)
    pp = _size(document.get("pp"))
    tp = _size(document.get("tp")) if is_ours else max(1, tp)
    kind = "this connector" if is_ours else "vLLM's own connector, or one like it: it sends a hash and no factors"
    findings.ok("reach", f"{channel}: engine {engine.engine_id}, tp {tp}, pp {pp}; {kind}")
    engine = replace(engine, tp=tp, pp=pp, is_ours=is_ours, has_all_ranks=tp == pp == 1)
    return _with_all_ranks(engine, findings) if is_ours else engine


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
            reason = f"--prefill-tp {prefill.tp} cannot be, so no rank but the first was asked for: {error}"
            findings.add("ranks", code_of(error), f"{prefill.channel}: {reason}", ADVICE["page-bytes-differ"])
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
        local, geometry = decode.geometry(min(decode.peers))
        _require_even(local, tp)
        dcp = max([group["context"][0] for group in local["groups"]], default=1)
        geometry.document(local, prefill.first, (0, 0), PeerSizes(tp, prefill.pp, dcp))
    except Exception as error:  # noqa: BLE001  (whatever forbids the size is the answer)
        return error
    return None


def _require_even(local: GeometryDocument, tp: int) -> None:
    """Refuse a size that vLLM refuses itself: one that neither divides the number of heads nor is a multiple of it."""
    axes = [axis for fields in local["layouts"] for field in fields for axis in field["axes"]]
    counts = {size for name, size, *_, split in axes if name == "head" and split == "tp"}
    if uneven := sorted(count for count in counts if count % tp and tp % count):
        raise AdapterError(
            f"{uneven[0]} heads cannot be shared by {tp} ranks of vLLM",
            code="size-out-of-range",
            fault="peer",
            context={"heads": uneven[0], "tp": tp},
        )


def _probe(channel: Channel, ranks: Sequence[Rank]) -> Engine:
    security = ClientSecurity.read(*channel.key_files) if channel.key_files is not None else None
    seen = probe(
        channel.host,
        channel.port,
        ranks=ranks,
        dialect=channel.dialect,
        timeout_s=channel.timeout_s,
        security=security,
    )
    return Engine(channel, seen.peers, seen.clock_offset_s, seen.recording)


def _add_silence(findings: Findings, channel: Channel, error: Exception) -> None:
    code, has_keys = code_of(error), channel.key_files is not None
    is_locked = code == "authentication-refused" and has_keys
    topic: Topic = "keys" if code in _KEY_CODES or is_locked else "reach"
    advice = ADVICE["authentication-refused with keys"] if is_locked else ""
    findings.add(topic, code, f"{channel}: {error}", advice)


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
        missing = [(rank, reason) for rank in ranks if (reason := _failure(engine.channel, rank))]
        for (stage, rank), reason in missing:
            message = f"{engine.channel}: rank {stage}.{rank} does not answer: {reason}"
            findings.add("ranks", "rank-missing", message)
        return replace(engine, has_all_ranks=not missing)
    findings.ok("ranks", f"{engine.channel}: all {count} ranks answer")
    return replace(
        engine, peers=probed.peers, clock_offset_s=probed.clock_offset_s, recording=probed.recording, has_all_ranks=True
    )


def _failure(channel: Channel, rank: Rank) -> str:
    """Return why a rank does not answer; empty if it does."""
    try:
        _probe(channel, [rank])
    except Exception as error:  # noqa: BLE001  (it is the finding)
        return str(error)
    return ""


def _size(pair: object) -> int:
    size = cast("list[object]", pair)[0] if isinstance(pair, list) and pair else 1
    return min(size, _MOST_SIZE) if isinstance(size, int) and size > 0 else 1


def _document(raw: bytes | None) -> dict[str, object]:
    try:
        document = parse_json(raw, "the geometry document") if raw is not None else None
    except AdapterError:
        return {}
    return cast("dict[str, object]", document) if isinstance(document, dict) else {}
