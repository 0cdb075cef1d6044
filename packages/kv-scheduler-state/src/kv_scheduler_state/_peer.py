"""The engine at the other end."""

from __future__ import annotations

from typing import NamedTuple, final

__all__ = ["PeerAddress"]


@final
class PeerAddress(NamedTuple):
    """What a ticket says about the engine that wrote it; the same in all its tickets.

    Attributes:
        engine_id: Its name (`remote_engine_id`).
        host: Address of its side channel (`remote_host`).
        port: Port of its side channel (`remote_port`).
        tp: Its tensor-parallel size (`tp_size`, 1 if absent).
        pp: Its pipeline-parallel size (`pp_size`, 1 if absent).
        dcp: Its decode-context-parallel size (`dcp_size`, 1 if absent).
        generation: Generation of its memory registration (`kv_generation`), or None.
        registration_generation: vLLM's own counter of that kind (`remote_registration_generation`), or None.
        dialect: Connector version that it speaks (`kv_dialect`), or None.
    """

    engine_id: str
    host: str
    port: int
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    generation: int | None = None
    registration_generation: int | None = None
    dialect: int | None = None
