"""A look at one engine over its side channel: is it there, do all its ranks answer, and with what."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast, final

from vllm_adapter.cli.json_values import parse_json
from vllm_adapter.errors import AdapterError, code_of
from vllm_adapter.wiring import probe_engine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_adapter.cli.findings import Findings, Topic
    from vllm_adapter.ports import AgentMetadata
    from vllm_adapter.wiring import ProbedEngine

__all__ = ["Place", "Seen", "Way", "look", "look_further"]

Rank = tuple[int, int]

_MOST_RANKS = 256
_MOST_SIZE = 1 << 20
"""Sizes that an engine claims are counted up to this; it has no more ranks than are asked anyway."""
_ADVICE: Mapping[str, str] = {
    "connection-refused": "nothing listens there: is the engine up, and is this its VLLM_NIXL_SIDE_CHANNEL_PORT (not its HTTP "
    "port), plus its data-parallel index?",
    "timed-out": "a firewall or network policy drops the connection, or something else than a side channel listens there",
    "name-unresolved": "use an address, or a name that both machines resolve",
    "not-ready": "the engine has not registered its cache yet: wait until /health answers",
    "invalid-key-file": "check the files that the configuration names",
    "insecure-key-file": "chmod 600 the secret file",
}
_KEY_CODES = frozenset({"invalid-key-file", "insecure-key-file"})
_PORT_ADVICE = "see that this is its VLLM_NIXL_SIDE_CHANNEL_PORT plus its data-parallel index, and not its HTTP port"
_KEYS_ADVICE = (
    "compare side_channel_key, side_channel_server_key and side_channel_clients of both engines, and give --prefill-config and "
    "--decode-config if they have keys"
)
_CROWD_ADVICE = "look in its log for connections that it closes because there are too many"


@final
@dataclass(frozen=True, slots=True)
class Place:
    """An engine's role in the check, and its side channel."""

    role: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.role} {host}:{self.port}"


@final
@dataclass(frozen=True, slots=True)
class Way:
    """How an engine is asked.

    Attributes:
        dialect: Its connector version.
        timeout_s: Longest wait per reply.
        key_files: Certificates for an encrypted side channel, None for a plain one.
        tp: Its tensor-parallel size, as the operator says; 0 for what it says itself.
    """

    dialect: int
    timeout_s: float
    key_files: tuple[str, str] | None = None
    tp: int = 0


@final
@dataclass(frozen=True, slots=True)
class Seen:
    """An engine that answered.

    Attributes:
        place: Where.
        probed: All its answers, or that of its first rank where others are missing.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        is_ours: Whether it sends geometry, as this connector does and vLLM's own does not.
        has_all_ranks: Whether every rank answered.
    """

    place: Place
    probed: ProbedEngine
    tp: int
    pp: int
    is_ours: bool
    has_all_ranks: bool

    @property
    def first(self) -> AgentMetadata:
        """Metadata of one rank, for what is the same on all."""
        return next(iter(self.probed.peers.values()))

    @property
    def engine_id(self) -> str:
        """The engine's name."""
        return self.first.engine_id

    def document(self, rank: Rank) -> dict[str, object]:
        """Return the geometry document that a rank sent, empty if there is none that can be read."""
        raw = self.probed.peers[rank].geometry
        return _document(raw) if raw is not None else {}


def look(place: Place, way: Way, findings: Findings) -> Seen | None:
    """Ask an engine for all its ranks; None if it did not answer, and the findings say why.

    One rank is asked first. The others are asked only where the engine says itself that it has them: vLLM's own listener ends on
    a question for a rank that it does not serve. Of such an engine `look_further` asks the others.
    """
    try:
        first = _probe(place, way, [(0, 0)])
    except Exception as error:  # noqa: BLE001  (whatever keeps the engine from answering is the finding)
        _refuse(findings, place, error, has_keys=way.key_files is not None)
        return None
    metadata = next(iter(first.peers.values()))
    tp, pp = _sizes(metadata)
    is_ours = metadata.geometry is not None
    tp = tp if is_ours else max(1, way.tp)
    kind = "this connector" if is_ours else "vLLM's own connector, or one like it: it sends a hash and no factors"
    findings.ok("reach", f"{place}: engine {metadata.engine_id}, tp {tp}, pp {pp}; {kind}")
    if not is_ours:
        return Seen(place, first, tp, pp, is_ours, has_all_ranks=tp == 1)
    probed, has_all = _others(place, way, first, (pp, tp), findings)
    return Seen(place, probed, tp, pp, is_ours, has_all)


def look_further(seen: Seen, way: Way, findings: Findings) -> Seen:
    """Ask an engine of vLLM's own connector for the ranks after its first, of which somebody is sure that it has them."""
    probed, has_all = _others(seen.place, way, seen.probed, (1, seen.tp), findings)
    return replace(seen, probed=probed, has_all_ranks=has_all)


def _probe(place: Place, way: Way, ranks: Sequence[Rank]) -> ProbedEngine:
    return probe_engine(
        place.host, place.port, ranks, dialect=way.dialect, timeout_s=way.timeout_s, key_files=way.key_files
    )


def _refuse(findings: Findings, place: Place, error: Exception, *, has_keys: bool) -> None:
    code = code_of(error)
    if code == "authentication-refused":
        topic: Topic = "keys" if has_keys else "reach"
        findings.refuse(topic, "authentication-refused", f"{place}: {error}", _opening_advice(has_keys=has_keys))
        return
    findings.refuse("keys" if code in _KEY_CODES else "reach", code, f"{place}: {error}", _ADVICE.get(code, ""))


def _opening_advice(*, has_keys: bool) -> str:
    """Return what to look at when a connection cannot be opened; a web server, wrong keys and a crowd look the same from here."""
    first, second = (_KEYS_ADVICE, _PORT_ADVICE) if has_keys else (_PORT_ADVICE, _KEYS_ADVICE)
    return f"first, {first}; second, {second}; third, {_CROWD_ADVICE}"


def _others(
    place: Place, way: Way, first: ProbedEngine, sizes: tuple[int, int], findings: Findings
) -> tuple[ProbedEngine, bool]:
    """Ask for all ranks of (stages, shards) at once; if that fails, for each alone, to name those that are missing."""
    pp, tp = sizes
    if pp * tp == 1:
        return first, True
    if pp * tp > _MOST_RANKS:
        findings.refuse(
            "ranks",
            "size-out-of-range",
            f"{place}: it says that it has {pp * tp} ranks, more than the {_MOST_RANKS} that are asked",
            "another program answers there, or the engine's --tensor-parallel-size is wrong",
        )
        return first, False
    ranks = [(stage, rank) for stage in range(pp) for rank in range(tp)]
    try:
        probed = _probe(place, way, ranks)
    except Exception:  # noqa: BLE001  (each is asked alone, so that the missing ones can be named)
        missing = [(rank, reason) for rank in ranks if (reason := _missing(place, way, rank))]
        for (stage, rank), reason in missing:
            findings.refuse(
                "ranks",
                "rank-missing",
                f"{place}: rank {stage}.{rank} does not answer: {reason}",
                "a worker that died or never registered its cache: look into the engine's log, and restart it",
            )
        return first, not missing
    findings.ok("ranks", f"{place}: all {len(ranks)} ranks answer")
    return probed, True


def _missing(place: Place, way: Way, rank: Rank) -> str:
    try:
        _probe(place, way, [rank])
    except Exception as error:  # noqa: BLE001  (it is the finding)
        return str(error)
    return ""


def _sizes(metadata: AgentMetadata) -> tuple[int, int]:
    """Return (tp, pp) as the geometry document of our own peers says; 1 and 1 without one."""
    document = _document(metadata.geometry) if metadata.geometry is not None else {}
    return _size(document.get("tp")), _size(document.get("pp"))


def _size(pair: object) -> int:
    size = cast("list[object]", pair)[0] if isinstance(pair, list) and pair else 1
    return min(size, _MOST_SIZE) if isinstance(size, int) and size > 0 else 1


def _document(raw: bytes) -> dict[str, object]:
    try:
        document = parse_json(raw, "the geometry document")
    except AdapterError:
        return {}
    return cast("dict[str, object]", document) if isinstance(document, dict) else {}
