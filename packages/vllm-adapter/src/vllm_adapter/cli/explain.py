"""`vllm-adapter explain`: the meaning, consequence and next step of a code, as logs, metrics and errors name it."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import typer

from vllm_adapter.cli.values import Json, json_text, wrapped
from vllm_adapter.codes import code_table
from vllm_adapter.config.keys import nearest
from vllm_adapter.errors import ConfigurationError

__all__ = ["CodeEntry", "explain", "load_codes"]


class CodeEntry(NamedTuple):
    """A code as one package uses it; `next` is a command, a setting or a page."""

    code: str
    package: str
    meaning: str
    consequence: str
    next: str


def load_codes() -> list[CodeEntry]:
    """Return the entries of `codes.toml` by code; a code that several packages use has an entry for each meaning."""
    # Two libraries, with NumPy and ZMQ, load for their own sentences.
    from kv_handshake.errors import CODES
    from kv_nixl_agent.errors import ERROR_CODES

    own: dict[str, Any] = {"kv-handshake": CODES, "kv-nixl-agent": ERROR_CODES}
    entries: list[CodeEntry] = []
    for code, facts, group in code_table():
        about = {**group, **facts}
        meaning = about.get("meaning") or own[about["package"]][code].meaning
        meaning = f"{meaning[0].upper()}{meaning.rstrip('.')[1:]}."
        entries.append(CodeEntry(code, about["package"], meaning, about["consequence"], about["next"]))
    return sorted(entries)


def explain(
    code: Annotated[
        str | None, typer.Argument(metavar="[CODE]", help="As a line of the log ends with it; default: list all.")
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """Print what a code means, what its consequence is, and what to do next.

    \b
    examples:
      vllm-adapter explain hash-mismatch
      vllm-adapter explain

    \b
    exit codes:
      0  done
      2  wrong usage, or no such code
    """  # noqa: D301 - a backslash keeps the lines of the help
    entries = load_codes()
    if code is not None:
        code = code.strip(" ()[]`'\".,:;").lower()  # as it is pasted from a log
        entries = [each for each in entries if each.code == code]
        if not entries:
            known = {each.code for each in load_codes()}
            hint = nearest(code, known, most=3) or "; list them with `vllm-adapter explain`"
            raise ConfigurationError(f"there is no code '{code}'{hint}", code="unknown-code")
    if as_json:
        print(json_text([each._asdict() for each in entries], indent=2))
    for each in () if as_json else entries:
        if code is None:
            print(wrapped(each.meaning, f"{each.code:32}"))
        else:
            print(f"{each.code} ({each.package})")
            for name in ("meaning", "consequence", "next"):
                print(wrapped(getattr(each, name), f"  {name:13}"))
