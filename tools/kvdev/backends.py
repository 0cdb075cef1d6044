"""Engines behind the demo router: turns, and a pause for those that refuse."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ABOUT", "Refusal", "Side", "is_aborted", "check_first_event", "says_something"]

ABOUT = (
    "A demo tool, not for service: round robin, no load balancing, no access control. Routers for service that speak the same "
    "protocol: vllm-router, llm-d, Ray Serve LLM, Dynamo."
)
_PAUSE_S = 1.0
"""An engine that refused is not asked for so long while another one can be."""


@final
class Refusal(Exception):  # noqa: N818  (an engine's answer, not a fault of the router)
    """An engine did not answer a request of which nothing has gone to the client.

    Attributes:
        has_seen_ticket: Whether it has probably read by the ticket, as an engine that died in its answer has. One that cannot be
            reached, or that drains, has not: the ticket is good for another one, and must be, lest its lease stays open.
    """

    def __init__(self, reason: str, *, has_seen_ticket: bool = True) -> None:
        super().__init__(reason)
        self.has_seen_ticket = has_seen_ticket


@final
class Side:
    """The prefill or the decode engines, asked in turn.

    Args:
        urls: Their base URLs.
        now_s: A monotonic clock.
    """

    def __init__(self, urls: Sequence[str], now_s: Callable[[], float] = time.monotonic) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._now_s = now_s
        self._turn = 0
        self._asked_again_s: dict[str, float] = {}

    def in_turn(self) -> list[str]:
        """Return all engines in the order to ask them in: the next in turn first, those that refused lately last."""
        start = self._turn % len(self.urls)
        self._turn += 1
        turned = self.urls[start:] + self.urls[:start]
        return sorted(turned, key=lambda url: url in self.refusing())

    def refusing(self) -> list[str]:
        """Return the engines that refused lately."""
        now_s = self._now_s()
        return [url for url in self.urls if self._asked_again_s.get(url, now_s) > now_s]

    def refused(self, url: str, reason: object) -> None:
        """Leave an engine alone for a while; say so the first time."""
        if url not in self._asked_again_s:
            print(f"router: {url} does not answer and is asked last from now on: {reason}", flush=True)
        self._asked_again_s[url] = self._now_s() + _PAUSE_S

    def answered(self, url: str) -> None:
        """Ask an engine in its turn again."""
        if self._asked_again_s.pop(url, None) is not None:
            print(f"router: {url} answers again", flush=True)


def is_aborted(answer: object) -> bool:
    """Whether an engine gave a request up: vLLM answers so, with HTTP 200, while it drains."""
    return any(choice.get("finish_reason") == "abort" for choice in _choices(answer))


def says_something(line: bytes) -> bool:
    """Whether a line of a stream is the client's business: text, an end, an error, or none of a shape known here.

    The first event of a chat names the role of the speaker and says nothing yet.
    """
    answer = _payload(line)
    if not isinstance(answer, dict) or "choices" not in answer:
        return bool(line.strip())
    return any(_has_content(choice) for choice in _choices(answer))


def check_first_event(line: bytes) -> None:
    """Check that a stream begins with an answer.

    Raises:
        Refusal: It ended before it said anything, or its first event is an abort or an error.
    """
    answer = _payload(line)
    if not line:
        raise Refusal("it ended its stream before it said anything")
    if is_aborted(answer):
        raise Refusal("it drains", has_seen_ticket=False)
    if isinstance(answer, dict) and "error" in answer:
        raise Refusal(str(answer["error"])[:200], has_seen_ticket=False)


def _payload(line: bytes) -> object:
    """Return the JSON of a data line, None for anything else."""
    try:
        return json.loads(line[6:]) if line.startswith(b"data: ") else None
    except ValueError:
        return None


def _has_content(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    said = [value for key, value in delta.items() if key != "role"] if isinstance(delta, dict) else []
    return bool(choice.get("finish_reason") or choice.get("text") or any(said))


def _choices(answer: object) -> list[dict[str, Any]]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
