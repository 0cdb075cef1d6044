"""Every command of every page is run, by this test or by one that it names; `kvdev/pages/ways.toml` says which, and why not."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
from ruamel.yaml import YAML

from kvdev.arguments import make_parser
from kvdev.pages.commands import PageCommand, commands_of, faults_of, read_pages
from kvdev.pages.running import Run, Workplace, workplace
from kvdev.pages.ways import Checked, Named, Played, Seen, read_ways, row_of
from kvdev.pages.witnesses import essential_words, missing_words, words_of_test
from kvdev.paths import PACKAGES, ROOT
from kvdev.testing import SCOPES
from vllm_adapter.host.transfer_config import check_transfer_config

T = TypeVar("T")
PAGES = read_pages()
COMMANDS = [command for page, text in PAGES.items() for command in commands_of(page, text)]
WHAT_TO_DO = "no row of tools/kvdev/pages/ways.toml is about it: let it be run there, or name the test that runs it"
TABLE = "commands that were not run, by reason"


def of_way(way: type[T]) -> list[tuple[PageCommand, T]]:
    rows = [(command, row_of(command)) for command in COMMANDS]
    return [(command, row.way) for command, row in rows if row and isinstance(row.way, way)]


def unknown(commands: list[PageCommand]) -> list[str]:
    return [f"{command.place}: `{command.text}`: {WHAT_TO_DO}" for command in commands if row_of(command) is None]


def test_pages_are_all_there() -> None:
    assert {page for page in PAGES if page.startswith("docs/operate/")} >= {
        "docs/operate/install.md",
        "docs/operate/ray.md",
    }
    readmes = {f"packages/{name}/README.md" for name in PACKAGES}
    assert {"README.md", "CONTRIBUTING.md", "reference/configuration.md", *readmes} <= set(PAGES)
    assert len({command.text for command in COMMANDS}) > 120


def test_no_command_hides_in_a_block_of_no_language() -> None:
    assert [fault for page, text in PAGES.items() for fault in faults_of(page, text)] == []


def test_every_command_has_a_way() -> None:
    assert unknown(COMMANDS) == []


def test_every_row_is_about_a_command() -> None:
    assert [row.pattern for row in read_ways() if not any(row_of(command) == row for command in COMMANDS)] == []


# ------------------------------------------------------------------------------------------------------------- (a) run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    with workplace(tmp_path_factory.mktemp("pages") / "checkout") as made:
        yield made


@pytest.mark.timeout(900)
def test_commands_do_what_their_pages_say(place: Workplace) -> None:
    """Commands of one page run one after the other, as a reader types them, and each text once for all pages."""
    known: set[tuple[str, str]] = set()
    pages: dict[str, list[tuple[PageCommand, Run]]] = defaultdict(list)
    for command, way in of_way(Run):
        key = command.text, command.shown or ""
        if key not in known:
            pages[command.page].append((command, way))
        known.add(key)
    with ThreadPoolExecutor(4) as pool:
        wrong = pool.map(
            lambda each: [fault for command, way in each for fault in place.run(command, way)], pages.values()
        )
    assert len(known) > 25
    assert [fault for each in wrong for fault in each] == []
    drawn = Path("docs/layout/uneven.svg")
    assert (place.folder / drawn).read_text() == (ROOT / drawn).read_text()


# -------------------------------------------------------------------------------------------------------- (b) witnesses


def test_a_witness_has_the_words_of_its_command() -> None:
    missing = {(command.text, way.test): missing_words(command.text, way.test) for command, way in of_way(Seen)}
    assert {key: words for key, words in missing.items() if words} == {}


def test_a_page_that_is_played_holds_the_command_and_its_test_reads_it() -> None:
    typed = {(command.page, command.text) for command in COMMANDS if not command.is_inline}
    for command, way in of_way(Played):
        reads = "read_pages" if way.page == "*" else Path(way.page).name
        assert reads in words_of_test(way.test), command
        assert way.page == "*" or (way.page, command.text) in typed or command.is_inline, command


# ------------------------------------------------------------------------------------------- (c) words that are checked


def test_what_is_not_run_has_a_test_and_a_reason(figures: list[str]) -> None:
    reasons: dict[str, set[str]] = defaultdict(set)
    for command, way in of_way(Checked):
        assert words_of_test(way.test)
        reasons[way.why].add(command.text)
    for command, _ in of_way(Named):
        assert command.is_inline, f"{command.place}: a block is to be typed"
        reasons["named in a sentence, without arguments"].add(command.text)
    figures.append(f"{TABLE}:")
    figures += [f"  {why}: {', '.join(sorted(texts))}" for why, texts in sorted(reasons.items())]


def dev_words(text: str) -> list[str]:
    words = shlex.split(text.partition(" > ")[0])
    return (
        words[words.index(next(word for word in words if word.endswith("dev.py"))) + 1 :] if "dev.py" in text else words
    )


def dev_faults(text: str) -> list[str]:
    """Return what is wrong with words of `dev.py`: verb, options, scopes, tests that -k selects, benchmarks."""
    try:
        options = make_parser().parse_args(dev_words(text))
    except SystemExit:
        return [f"{text}: dev.py does not take these words"]
    if options.verb == "bench":
        return [] if (ROOT / "tools" / "bench" / f"{options.name}.py").exists() else [f"{text}: no such benchmark"]
    if options.verb != "test":
        return []
    faults = [f"{text}: no scope {scope}" for scope in options.scope if scope not in SCOPES]
    folders = [ROOT / "integration_tests" / scope.replace("-", "_") for scope in options.scope]
    names = "\n".join(file.name + file.read_text() for folder in folders for file in folder.rglob("test_*.py"))
    return faults + [f"{text}: selects no test"] * (options.select not in names)


def test_words_of_dev_py_are_understood() -> None:
    texts = sorted(
        {command.text for command in COMMANDS if re.match(r"(.*dev\.py|test) ", command.text) and not command.shown}
    )
    assert len(texts) > 40
    assert [fault for text in texts for fault in dev_faults(text)] == []


def test_workflows_run_what_needs_an_index_or_a_tag() -> None:
    steps = "\n".join(file.read_text() for file in (ROOT / ".github" / "workflows").glob("*.yml"))
    for words in ("newest", "lock --check", "release --dry-run", "release --tagged"):
        assert f"run: python3 tools/dev.py {words}" in steps


def test_a_tag_as_on_the_page_starts_the_release() -> None:
    (pattern,) = YAML(typ="safe").load((ROOT / ".github/workflows/release.yml").read_text())["on"]["push"]["tags"]
    (command,) = [command.text for command in COMMANDS if command.text.startswith("git tag")]
    tag = command.split()[2].replace("NAME", "kv-topology").replace("VERSION", "0.2.0")
    assert command.endswith(f"git push origin {command.split()[2]}")
    assert Path(tag).match(pattern)


def test_hooks_before_a_commit_are_commands_of_the_workspace() -> None:
    (local,) = YAML(typ="safe").load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    programs = [next(word for word in hook["entry"].split() if word.startswith(".venv/")) for hook in local["hooks"]]
    assert programs
    assert [program for program in programs if not (Path(sys.executable).parent / Path(program).name).exists()] == []


def test_paths_of_pytest_exist() -> None:
    texts = [command.text for command in COMMANDS if re.search(r"\bpytest \S", command.text)]
    assert len(texts) >= 5
    assert [text for text in texts if not (ROOT / text.split()[-1]).exists()] == []


LONG_PROGRAMS = (
    "packages/kv-topology/tests/mutate.py",
    "integration_tests/gpu/run.py",
    "integration_tests/fleet_sim/simulate.py",
)


@pytest.mark.parametrize("program", LONG_PROGRAMS)
def test_a_program_that_takes_long_knows_its_options(program: str) -> None:
    name = Path(program).name
    done = subprocess.run(
        [sys.executable, ROOT / program, "--help"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    texts = [
        command.text for command in COMMANDS if re.match(rf"(python tests/)?{re.escape(name)} ", command.text + " ")
    ]
    options = {word for text in texts for word in essential_words(text) if word.startswith("--")}
    assert options
    assert [option for option in options if option not in done.stdout] == []


def test_configurations_of_all_pages_are_good() -> None:
    configs = [
        (page, one)
        for page, text in PAGES.items()
        for one in re.findall(r"'(\{\"kv_connector\".*?\})'", text, re.DOTALL)
    ]
    assert len(configs) >= 8
    for page, text in configs:
        problems = [problem.code for problem in check_transfer_config(json.loads(text.replace("\n>", "\n"))).problems]
        assert problems == (["unknown-key"] if "lease_duraton" in text else []), page


def test_the_tests_that_the_readme_calls_as_witnesses_exist() -> None:
    named = set(re.findall(r"`(test_\w+)` \|$", (ROOT / "README.md").read_text(), re.MULTILINE))
    files = [*ROOT.glob("packages/*/tests/*.py"), *ROOT.glob("integration_tests/**/*.py")]
    there = set(re.findall(r"def (test_\w+)\(", "\n".join(file.read_text() for file in files)))
    assert len(named) == 9
    assert named - there == set()


# -------------------------------------------------------------------------------------------------------- planted faults


def test_a_new_command_is_told_with_its_line_and_what_to_do() -> None:
    page = "# A\n\nType `kv-nixl doctor` and `kv-nixl cure --all`.\n\n```sh\n# first\nvllm-adapter heal now  # at once\n```\n"
    assert unknown(commands_of("a.md", page)) == [
        f"a.md:3: `kv-nixl cure --all`: {WHAT_TO_DO}",
        f"a.md:7: `vllm-adapter heal now`: {WHAT_TO_DO}",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("```\nls\n```\n", 1), ("x\n```bash\nls\n```\n", 2), ("```text\n$ ls\n```\n", 2), ("```text\nuv sync\n```\n", 2),
        ("a:\n\n    kv-nixl doctor\n", 3), ("```text\nA_B=1 python3 x.py\n```\n", 2),
    ],
)  # fmt: skip
def test_a_block_in_which_a_command_hides_is_told(text: str, line: int) -> None:
    (fault,) = faults_of("a.md", text)
    assert fault.startswith(f"a.md:{line}: ")


def test_commands_are_read_from_scripts_and_transcripts() -> None:
    page = "- x\n\n  ```sh\n  one --a \\\n    b\n  two\n  ```\n```console\n$ three \\\n> four\nout\n$ five\n```\n"
    assert [(each.line, each.text, each.shown) for each in commands_of("a.md", page)] == [
        (4, "one --a b", None), (6, "two", None), (9, "three \\\nfour", "out"), (12, "five", ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "way", "fault"),
    [
        ("vllm-adapter config --chek x", Run(), "exit code 2"),
        ("kv-handshake vectors", Run(prints="no such word"), "does not print"),
        ("kv-nixl serve --host nowhere.invalid", Run(is_endless=True, prints="127"), "exit code"),
    ],
)
def test_a_command_that_does_something_else_is_told(place: Workplace, text: str, way: Run, fault: str) -> None:
    assert any(fault in one for one in place.run(PageCommand("a.md", 7, text), way))


def test_an_output_that_differs_from_the_page_is_told(place: Workplace) -> None:
    assert place.run(PageCommand("a.md", 7, "echo one; echo two", "one\n..."), Run()) == []
    assert len(place.run(PageCommand("a.md", 7, "echo one", "two"), Run())) == 1


def test_a_witness_without_a_word_of_the_command_is_told() -> None:
    test = "packages/vllm-adapter/tests/test_check_reads.py::test_a_fall_back_to_tcp_is_a_reason_against_unless_it_is_allowed"
    assert missing_words("vllm-adapter check A B --allow-tcp", test) == []
    assert missing_words("vllm-adapter trace A B --allow-udp", test) == ["--allow-udp", "trace"]
    with pytest.raises(LookupError):
        words_of_test("packages/vllm-adapter/tests/test_check_reads.py::test_nothing")


@pytest.mark.parametrize(
    "text",
    [
        "python3 tools/dev.py fly",
        "test hots",
        "dev.py test fleet -k no_such",
        "dev.py bench sleep",
        "dev.py dist --far",
    ],
)
def test_words_that_dev_py_does_not_know_are_told(text: str) -> None:
    assert len(dev_faults(text)) == 1
