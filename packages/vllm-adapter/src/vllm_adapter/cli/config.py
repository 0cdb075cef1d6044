"""`vllm-adapter config`: print the configuration that the connector takes, and check one without starting an engine."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_adapter.cli.values import Json, json_text, read_json, say
from vllm_adapter.config.keys import describe_keys, describe_schema
from vllm_adapter.config.whole import Problem, Verdict, check_transfer_config
from vllm_adapter.errors import AdapterError

__all__ = ["config"]


def config(
    *,
    explain: Annotated[bool, typer.Option("--explain", help="Every key with default, range and meaning.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="The same as a JSON schema.")] = False,
    check: Annotated[
        str | None, typer.Option(metavar="CONFIG", help="Check a --kv-transfer-config: its JSON text, its file, or -.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain the connector's own keys, or check a --kv-transfer-config.

    \b
    examples:
      vllm-adapter config --explain
      vllm-adapter config --check kv-transfer-config.json

    \b
    exit codes:
      0  done; with --check: the configuration is good
      1  --check: it is wrong, or cannot be read
      2  wrong usage
    """  # noqa: D301 - a backslash keeps the lines of the help
    if explain + schema + (check is not None) != 1:
        raise typer.BadParameter("--explain, --schema and --check exclude each other, and one of them is needed")
    if check is not None:
        _check(check, as_json=as_json)
    else:
        print(_explanation() if explain else json_text(describe_schema(), indent=2))


def _explanation() -> str:
    lines: list[str] = []
    for name, about in describe_keys().items():
        limits = f", one of {', '.join(about['enum'])}" if "enum" in about else ""
        if "maximum" in about:
            limits = f", {about['minimum']:g} to {about['maximum']:g}"
        lines += [f"{name} ({about['type']}, default {about['default']}{limits})", f"    {about['description']}"]
    return "\n".join(lines)


def _check(source: str, *, as_json: bool) -> None:
    """Print every problem of a configuration; exit with 1 if there is one."""
    try:
        verdict = check_transfer_config(read_json(source))
    except AdapterError as error:
        verdict = Verdict((Problem(error.code, "", str(error)),))
    if as_json:
        problems = [problem._asdict() for problem in verdict.problems]
        print(json_text({"is_good": not problems, "problems": problems, "notes": verdict.notes}, indent=2))
    for problem in () if as_json else verdict.problems:
        where = f"{problem.key}: " if problem.key else ""
        say("config", f"{where}{problem.message} ({problem.code})")
    if verdict.problems:
        raise typer.Exit(1)
    if not as_json:
        print("\n".join([*verdict.notes, "good"]))
