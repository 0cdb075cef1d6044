"""Plain values of the host's requests and steps, for the scheduler side."""

from __future__ import annotations

import hashlib
import time
from functools import cache
from typing import TYPE_CHECKING, Any, cast, final

import torch

from vllm_adapter.host.vllm import END_REASONS, drop_prompt_tail, end_with_error
from vllm_adapter.host.weights import LoraAdapters
from vllm_adapter.scheduler.chunks import ScheduledTokens, held_tokens, written_blocks
from vllm_adapter.scheduler.followed import Arrival, Ending
from vllm_adapter.wiring import prompt_digest

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["RefusedIdentity", "RequestIdentity", "arrival_of", "ending_of", "scheduled_tokens"]

_NO_CONTENT_IDS = "ticket-media-unidentified"
_adapters = LoraAdapters()


@final
class RequestIdentity:
    """Computes the digest of a host request's prompt, and of the tokens after it.

    Args:
        request: The host's request, read when a digest is computed.
        has_content_ids: Whether the engine identifies images by their content; otherwise by their request.
    """

    def __init__(self, request: Request, *, has_content_ids: bool) -> None:
        self._request = request
        self.refusal = "" if has_content_ids or not request.mm_features else _NO_CONTENT_IDS

    def digest(self, tokens: int) -> str | None:
        """Return the digest of the first `tokens` tokens, None if the request has fewer or cannot be identified."""
        if self.refusal or tokens > self._request.num_tokens:
            return None
        if not self._request.mm_features:
            return self._digest(tokens, ())
        items = [
            (str(getattr(item, "mm_hash", None) or item.identifier), item.mm_position.offset, item.mm_position.length)
            for item in self._items(tokens)
        ]
        return self._digest(tokens, sorted(items, key=lambda item: item[1:]))

    def media(self, tokens: int) -> tuple[int, str] | None:
        """Return how many media items begin among the first `tokens` tokens, and the digest without them; None for none.

        Where the prompt is to be read, an item that came as embeddings does not count: they may be placeholders, as on decode
        engines that get no images. Elsewhere the prompt is computed with them.
        """
        items = self._items(tokens)
        if not items or tokens > self._request.num_tokens:
            return None
        reads = _is_read(self._request.kv_transfer_params)
        # The name is exact, because some models call a sound itself `input_audio_embeds`.
        counted = [item for item in items if not (reads and f"{item.modality}_embeds" in (item.data or ()))]
        return len(counted), self._digest(tokens, [])

    def _items(self, tokens: int) -> list[Any]:
        return [item for item in self._request.mm_features if item.mm_position.offset < tokens]

    def _digest(self, tokens: int, media: Sequence[tuple[str, int, int]]) -> str:
        request = self._request
        lora = request.lora_request
        return prompt_digest(
            request.all_token_ids[:tokens],
            lora=_adapters.identity(lora) if lora is not None else "",
            media=media,
            salt=request.cache_salt or "",
            embeds=_embeds(request.prompt_embeds[:tokens]) if request.prompt_embeds is not None else "",
        )


def _embeds(embeds: torch.Tensor) -> str:
    data = embeds.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(f"{embeds.dtype}/{tuple(embeds.shape[1:])}/".encode() + data.tobytes()).hexdigest()


@final
class RefusedIdentity:
    """Placeholder for the prompt of a request that vLLM's frontend refused before the engine saw it.

    vLLM sends the request's ticket with a stand-in prompt and aborts it at once, so that the producer can be notified; nothing is
    read. The digest is therefore taken from the ticket. Source: `AsyncLLM.notify_kv_transfer_request_rejected`.

    Args:
        params: The ticket as received.
    """

    refusal = ""

    def __init__(self, params: object) -> None:
        named = _fields(params).get("kv_prompt")
        self._digest = named if isinstance(named, str) else None

    def digest(self, tokens: int) -> str | None:
        """Return the digest in the ticket; None if it has none."""
        del tokens
        return self._digest

    def media(self, tokens: int) -> None:
        """Return None."""


def _fields(params: object) -> dict[str, object]:
    return cast("dict[str, object]", params) if isinstance(params, dict) else {}


def _is_read(params: object) -> bool:
    """Return whether params ask to read the prompt, and not to compute it for another engine."""
    fields = _fields(params)
    return fields.get("do_remote_prefill") is True and not fields.get("do_remote_decode")


def arrival_of(request: Request, *, has_content_ids: bool) -> Arrival:
    """Describe a request that has just arrived."""
    params: object = request.kv_transfer_params
    # Only vLLM itself sets the flag (0.32 and later); no client can.
    is_refused = bool(getattr(request, "abort_immediately", False))
    identity = RefusedIdentity(params) if is_refused else RequestIdentity(request, has_content_ids=has_content_ids)
    if is_refused and "kv_stream" in _fields(params) and _fields(params).get("do_remote_prefill") is True:
        # An early ticket names no request that could be notified of its end. vLLM also sends the stand-in of a refused request
        # after each request whose client has left, and with such a ticket it would be taken for a second reader.
        params = None
    # When the host's frontend began with it, by this host's wall clock, as is `time.time()`; older hosts do not report it.
    began_s: object = getattr(request, "arrival_time", None)
    return Arrival(
        request.request_id,
        params,
        request.num_prompt_tokens,
        identity,
        request.trace_headers,
        lambda tokens: drop_prompt_tail(request, tokens),
        max(0.0, time.time() - began_s) if isinstance(began_s, float) else None,
        lambda: request.num_output_tokens,
        request.max_tokens,
        bool(getattr(request, "resumable", False)),
        # For example a prompt whose logprobs the client wants. vLLM 0.30 dies of one that was read.
        request.get_skip_reading_prefix_cache(),
        lambda: end_with_error(request),
        lambda: request.block_hashes,
    )


def ending_of(request: Request, *, has_content_ids: bool) -> Ending:
    """Describe a request that has ended."""
    in_flight: Any = getattr(request, "num_in_flight_tokens", 0)  # hosts before 0.32 lack this count
    return Ending(
        request.request_id,
        END_REASONS.get(request.status.name, "error"),
        request.num_computed_tokens,
        int(in_flight),
        request.num_tokens,
        identity=RequestIdentity(request, has_content_ids=has_content_ids),
    )


def scheduled_tokens(
    output: SchedulerOutput, group_ids: tuple[int, ...], span_tokens: tuple[int, ...], follows: Container[str]
) -> Iterator[ScheduledTokens]:
    """Yield the tokens that a step computes, with their blocks in the transferable groups, for each request in `follows`.

    Args:
        output: The step.
        group_ids: Numbers of the transferable groups among all of the scheduler's.
        span_tokens: Tokens that a block of each of these stands for; 0 for a group of states.
        follows: The requests to yield.
    """
    new, running = output.scheduled_new_reqs, output.scheduled_cached_reqs
    steps = [
        *((each.req_id, each.block_ids, each.num_computed_tokens, True) for each in new),
        *(
            (request_id, blocks, computed, request_id in running.resumed_req_ids)
            for request_id, blocks, computed in zip(
                running.req_ids, running.new_block_ids, running.num_computed_tokens, strict=True
            )
        ),
    ]
    # Once a prompt that will be streamed has a hit, and only then, the block tables of all requests of the step are read.
    written = cache(
        lambda: written_blocks(span_tokens, ((step[2], _table(output, step[0], group_ids)) for step in steps))
    )
    for request_id, added, computed, is_fresh in steps:
        if request_id in follows:
            blocks = [[] if added is None else list(added[group_id]) for group_id in group_ids]
            held = held_tokens(span_tokens, blocks, computed, written) if is_fresh else 0
            new_tokens = output.num_scheduled_tokens.get(request_id, 0)
            yield ScheduledTokens(request_id, blocks, is_fresh, computed, new_tokens, held)


def _table(output: SchedulerOutput, request_id: str, group_ids: tuple[int, ...]) -> list[list[int]] | None:
    """Return a request's block table in the transferable groups; None where it does not show what the step writes.

    That is the case before 0.32, and in a step that loads blocks for other connectors: they count as computed before they arrive.
    """
    state: Any = getattr(output, "kv_connector_block_state", None)
    if state is None or getattr(output, "has_sync_kv_loads", True):
        return None
    table: Any = state.get_block_ids(request_id)
    return [table[group_id] for group_id in group_ids] if table is not None else None
