"""`vllm-adapter config`: print the configuration that the connector takes, and check one without starting an engine."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from vllm_adapter.cli.values import Json, json_text, read_json, say, wrapped
from vllm_adapter.config.keys import (
    GROUPS,
    describe_keys,
    describe_limits,
    describe_schema,
    load_keys,
    old_key,
    unknown_key,
)
from vllm_adapter.config.whole import Problem, Verdict, check_transfer_config, own_keys
from vllm_adapter.errors import AdapterError, code_of, message_of

__all__ = ["config"]


def config(
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="--explain: this key alone.")] = None,
    *,
    explain: Annotated[bool, typer.Option("--explain", help="Keys with default, range and meaning.")] = False,
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
      vllm-adapter config --explain kv_lease_duration
      vllm-adapter config --check kv-transfer-config.json

    \b
    exit codes:
      0  done; with --check: the configuration is good
      1  --check: it is wrong, or cannot be read
      2  wrong usage
    """  # noqa: D301 - a backslash keeps the lines of the help
    if explain + schema + (check is not None) != 1:
        raise typer.BadParameter("--explain, --schema and --check exclude each other, and one of them is needed")
    if key is not None and not explain:
        raise typer.BadParameter(f"KEY ({key}) belongs to --explain")
    if check is not None:
        _check(check, as_json=as_json)
    else:
        print(_explanation(key) if explain else json_text(describe_schema(), indent=2))


def _explanation(key: str | None) -> str:
    about = describe_keys()
    if key is not None and key not in about:
        if former := old_key(key):
            return f"{key} {former}"
        raise unknown_key(key)
    lines: list[str] = []
    for group, names in GROUPS.items():
        shown = [name for name in names if key in {None, name}]
        lines += [group] if shown else []
        for name in shown:
            lines += [f"  {name} ({describe_limits(name)})", wrapped(about[name]["description"], " " * 6)]
    return "\n".join(lines)


def _check(source: str, *, as_json: bool) -> None:
    """Print every problem of a configuration; exit with 1 if there is one."""
    try:
        given = read_json(source)
        verdict = check_transfer_config(given)
        if not verdict.problems:
            # A start on this machine also refuses bad secrets and key files. Only this check loads their libraries.
            from vllm_adapter.wiring import start_refusals

            refusals = start_refusals(load_keys(own_keys(cast("dict[str, object]", given)))[0])
            verdict = Verdict(tuple(Problem(code_of(each), "", message_of(each)) for each in refusals), verdict.notes)
    except AdapterError as error:
        verdict = Verdict((Problem(error.code, "", error.message),))
    if as_json:
        problems = [problem._asdict() for problem in verdict.problems]
        print(json_text({"is_good": not problems, "problems": problems, "notes": verdict.notes}, indent=2))
    for problem in () if as_json else verdict.problems:
        where = f"{problem.key}: " if problem.key else ""
        say("config", f"{where}{problem.message} ({problem.code})")
    if verdict.problems:
        raise typer.Exit(1)
    if not as_json:
        print("\n".join([*(f"note: {each}" for each in verdict.notes), "good"]))
