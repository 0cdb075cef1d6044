"""Warnings about configurations of streaming that are valid and yet stream less than they seem to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vllm_adapter.config import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["streaming_warnings"]

_ONLY_WITH: Final = ("stream_slots", "stream_reserve_fraction", "ask_wait_s")
_DEFAULTS: Final = Settings()


def streaming_warnings(settings: Settings, role: str | None = None) -> Iterator[str]:
    """Yield a sentence per such setting.

    Args:
        settings: The connector's keys, already checked.
        role: The engine's `kv_role`; None if it is not known.
    """
    if not settings.streaming:
        unused = [name for name in _ONLY_WITH if getattr(settings, name) != getattr(_DEFAULTS, name)]
        if unused:
            yield f"{', '.join(unused)}: no effect without streaming"
        return
    if not settings.has_secrets and not settings.remote_hosts:
        yield (
            "streaming: without ticket_secret_files, ticket_secret_variable or remote_hosts this engine refuses early tickets "
            "(ticket-early-uncovered), so nothing is streamed to or from it"
        )
    if role != "kv_producer" and not settings.stream_reserve_fraction:
        yield "stream_reserve_fraction is 0: this engine refuses to read early (ticket-early-off) and computes these prompts"
    if role == "kv_both" and settings.stream_reserve_fraction == 1:
        yield "stream_reserve_fraction is 1 with kv_role 'kv_both': two engines that prefill for each other may wait for ever"
