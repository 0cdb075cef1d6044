"""The client that users have, for engines and routers on this machine."""

from __future__ import annotations

import openai

__all__ = ["openai_client"]


def openai_client(url: str, *, timeout_s: float) -> openai.AsyncOpenAI:
    """Return a client that asks once: no retries, no proxy of the environment, and a connection of its own per request."""
    plain = openai.DefaultAsyncHttpxClient(trust_env=False, headers={"Connection": "close"})
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=timeout_s, http_client=plain)
