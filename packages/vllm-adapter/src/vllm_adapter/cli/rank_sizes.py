"""Whether an engine of vLLM's own connector has as many ranks as the operator says, by what its first rank sent.

A listener of vLLM itself ends on a question for a rank that it does not serve, so a mistyped number would end the engine that it
was meant to look at. Rank (0, 0), which every engine has, tells the length of its pages, and that follows from the size.

Worked example. The decode engine holds 8 heads of 128 bytes and 16 tokens in pages of 16 384 bytes. A first rank whose pages are
of 8 192 bytes is one of two: 2 is proven, and 4 is refused, which would need pages of 4 096 bytes. With one head, which every
rank holds, the pages are the same at any size: 2 may as well be 1, and only the operator can tell. vLLM itself takes no size that
cuts heads unevenly, so with 8 heads 3 and 5 are not among those that it might be instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_adapter.cache.documents import PeerSizes, with_names
from vllm_adapter.cache.vllm_peer import PeerGeometry
from vllm_adapter.errors import AdapterError, code_of
from vllm_adapter.wiring import reshard

if TYPE_CHECKING:
    from vllm_adapter.cache.documents import GeometryDocument
    from vllm_adapter.cli.findings import Findings
    from vllm_adapter.cli.looking import Seen

__all__ = ["may_ask_further"]

_FIRST = (0, 0)


def may_ask_further(prefill: Seen, decode: Seen | None, findings: Findings, *, is_trusted: bool) -> bool:
    """Return whether an engine of vLLM's own connector can be asked for further ranks; if not, the findings say why.

    Args:
        prefill: The engine, by its first rank, with the size that the operator gave.
        decode: The engine that reads from it, whose geometry is compared.
        findings: Where the reason goes.
        is_trusted: Whether the operator vouches for a size that nothing proves; one that is disproved is never asked for.
    """
    if prefill.is_ours or prefill.tp == 1:
        return False
    if decode is None or not decode.is_ours:
        return is_trusted or _not_proven(prefill, findings, "the decode engine sends no geometry to compare with")
    if error := _contradiction(prefill, decode, prefill.tp):
        findings.refuse(
            "ranks",
            code_of(error),
            f"{prefill.place}: --prefill-tp {prefill.tp} cannot be, so no rank but the first was asked for: {error}",
            "give the engine's --tensor-parallel-size",
        )
        return False
    others = [tp for tp in range(1, prefill.tp) if _contradiction(prefill, decode, tp) is None]
    if not others:
        return True
    return is_trusted or _not_proven(
        prefill, findings, f"its first rank would be the same with {', '.join(map(str, others))}"
    )


def _not_proven(prefill: Seen, findings: Findings, why: str) -> bool:
    findings.note(
        "ranks",
        "size-not-proven",
        f"{prefill.place}: only the first of {prefill.tp} ranks was asked for, since a listener of vLLM's own ends on a "
        f"question for one that it does not have, and nothing proves that it has so many: {why}",
        "if you are sure of the number, add --trust-prefill-tp",
    )
    return False


def _contradiction(prefill: Seen, decode: Seen, tp: int) -> Exception | None:
    """Return why the first rank cannot be one of so many, None if it can."""
    rank = min(decode.probed.peers)
    try:
        local = with_names(decode.document(rank))
        _require_even(local, tp)
        dcp = max([group["context"][0] for group in local["groups"]], default=1)
        geometry = PeerGeometry(reshard, tuple(group["kind"] != "state" for group in local["groups"]))
        geometry.document(local, prefill.first, _FIRST, PeerSizes(tp, prefill.pp, dcp))
    except Exception as error:  # noqa: BLE001  (whatever forbids the size is the answer)
        return error
    return None


def _require_even(local: GeometryDocument, tp: int) -> None:
    """Refuse a size that vLLM refuses itself: one that neither divides the number of heads nor is a multiple of it."""
    axes = [axis for fields in local["layouts"] for field in fields for axis in field["axes"]]
    counts = {axis.size for axis in axes if axis.name == "head" and axis.split == "tp"}
    if uneven := sorted(count for count in counts if count % tp and tp % count):
        raise AdapterError(
            f"{uneven[0]} heads cannot be shared by {tp} ranks of vLLM",
            code="size-out-of-range",
            fault="peer",
            context={"heads": uneven[0], "tp": tp},
        )
