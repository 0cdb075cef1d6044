"""Answers of the machines to the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BYSTANDER", "NOT_KEPT", "Admission", "FinishDecision", "FinishReason", "Role", "not_handed_over"]

Role = Literal["none", "producer", "consumer"]
FinishReason = Literal["length", "stop", "abort", "error"]


@final
class Admission(NamedTuple):
    """Decision on a request that has just arrived.

    Attributes:
        role: "producer": its blocks will be handed over. "consumer": its prompt will be read. "none": it is the
            engine's own business; the calls for it are accepted and change nothing. A prefill that also reads a
            readback ticket is a "producer".
        rejected_code: Code of the reason why its ticket was refused; empty otherwise. Its prompt is then computed here, except
            after `ticket-media-missing`, see `SchedulerState.must_fail`.
        rejected_message: The same as a sentence.
        truncate_tokens: Trailing prompt tokens to drop, once, before the prefix lookup; the consumer computes them.
        is_early: Whether its prompt may be read while it is computed. A producer's chunks must be told then; a consumer has no
            ticket yet and asks for one.
    """

    role: Role
    rejected_code: str = ""
    rejected_message: str = ""
    truncate_tokens: int = 0
    is_early: bool = False


@final
class FinishDecision(NamedTuple):
    """Decision on a finished request's blocks.

    Attributes:
        keep_blocks: Whether the engine keeps them until the workers report the request as sent.
        params: `kv_transfer_params` of the response, or None for no hand-over.
        withheld_code: Code of the reason why a prompt that ended well is not handed over: `withheld` (the caller asked for
            it), `cache-reset`, `no-blocks`, `draining`, `lease-quota`, `no-fence-slot` or `state-too-long`; empty otherwise.
    """

    keep_blocks: bool
    params: Mapping[str, object] | None
    withheld_code: str = ""


BYSTANDER: Final = Admission("none")
NOT_KEPT: Final = FinishDecision(keep_blocks=False, params=None)


def not_handed_over(code: str, *, keep_blocks: bool) -> FinishDecision:
    """Return the decision on a prompt that gets no ticket; its blocks stay while a reader of its stream may be at them."""
    if not code and not keep_blocks:
        return NOT_KEPT
    return FinishDecision(keep_blocks=keep_blocks, params=None, withheld_code=code)
