"""`vllm-adapter revoke`: end all unread leases of a live engine, so that vLLM's `/pause` does not wait for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vllm_adapter.cli.engines import ask_all, ask_one, of_engine
from vllm_adapter.cli.values import coded_errors, json_text, seconds
from vllm_adapter.observe.cause_log import plain_text
from vllm_adapter.observe.status_socket import REVOKE_REQUEST, status_folders

__all__ = ["add_revoke"]

_TROUBLE = 1
_NOT_FOUND = 3

_EPILOG = """\b
examples:
  vllm-adapter revoke prefill-0
  curl -X POST 'http://localhost:8000/pause?mode=keep' & vllm-adapter revoke prefill-0

\b
exit codes:
  0  the engine revokes its leases, or had none
  1  its scheduler did not answer
  2  wrong usage
  3  no such engine, or more than one, runs on this machine for this user
"""


def add_revoke(app: typer.Typer) -> None:
    """Register the command."""
    app.command("revoke", epilog=_EPILOG)(_revoke)


def _revoke(
    engine: Annotated[
        str, typer.Argument(metavar="ENGINE", help="Engine id, the beginning of one, or a process id of its scheduler.")
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="The engine's answer as JSON.")] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Wait for an answer.")] = 3.0,
    folder: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Where the sockets are; default: where this user's engines put them."),
    ] = None,
) -> None:
    """Revoke all unread leases of a live engine: their tickets become worthless, and their blocks are free.

    vLLM counts a finished request whose blocks are kept for a reader as work, so /pause of a prefill engine waits for its
    longest unread lease. Run this while /pause waits, or before it. Readers of these tickets end as kv_load_failure_policy says.
    """
    folders = (Path(folder),) if folder else status_folders()
    with coded_errors("revoke"):
        timeout_s = seconds("--timeout", timeout)
    # An empty name is a script's mistake; as the beginning of every name it would stand for the only engine here.
    found = of_engine(ask_all(folders, timeout_s=timeout_s), engine) if engine.strip() else []
    sockets = [answer.get("socket") or "" for answer in found if answer.get("part") == "scheduler"]
    if not sockets:
        _say(f"no scheduler of an engine {engine!r} found; vllm-adapter status lists the engines of this machine")
        raise typer.Exit(_NOT_FOUND)
    answer = ask_one(Path(sockets[0]), REVOKE_REQUEST, timeout_s=timeout_s) or {"error": "it has ended"}
    if as_json:
        print(json_text(answer, indent=2))
    if "error" in answer:
        _say(f"engine {engine!r} revoked nothing: {answer['error']}")
        raise typer.Exit(_TROUBLE)
    if not as_json:
        print(
            plain_text(
                f"engine {answer.get('engine_id')}: {answer.get('leases')} leases revoked, "
                f"{answer.get('leased_blocks')} blocks ({answer.get('leased_bytes')} bytes on each rank) come back"
            )
        )


def _say(text: str) -> None:
    print(f"vllm-adapter revoke: {plain_text(text)}", file=sys.stderr)
