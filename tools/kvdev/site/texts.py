"""Find every text of a module that a user may come to see, by its syntax tree.

Theory of operation. Each literal of at least three words counts, wherever it stands; documentation strings and comments do not,
but for those of commands, which `--help` prints. So nothing that is printed, logged or raised is missed for the way it gets
there: through a variable, a table, a function's result. Then each literal gets its level. A call that logs, raises or makes a
finding says it for its arguments, and for the literals that a name, a condition or a function of the same module in their place
stands for. A pair of a code and a text is an error. All other literals are a command's help, or a *text*: a part of a message,
or of what a command prints. Values are shown by name: `{peer}`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["LEVELS", "Text", "texts_of", "words_of"]

LEVELS = ("no-go", "error", "refusal", "warning", "note", "ok", "info", "text", "help")
_LOGGED = {
    "info": "info", "warn": "warning", "warning": "warning", "warning_once": "warning", "error": "error", "exception": "error",
}  # fmt: skip
"""Methods of loggers, recorders and reports -> level."""
_LOGGERS = re.compile(r"(^|[._])(log|logger|recorder)$")
_REFUSALS = frozenset({"BadParameter", "UsageError", "_Refused", "_Refusal", "_RefusalError"})
"""Exceptions by which a command refuses its arguments."""
_FINDINGS = {"ok": "ok", "note": "note", "refuse": "no-go"}
_CODE = re.compile(r"[a-z]+(-[a-z0-9]+)+")
_ONE_WORD_CODES = frozenset({"closed", "refused", "cancelled", "draining"})
_LEAST_WORDS = 3
_LEAST_PLAIN = 2
"""Words of a text that has no level which are no values."""
_WORD = re.compile(r"[A-Za-z]{2,}")
_NO_NAMES = frozenset(
    (
        "len",
        "str",
        "list",
        "sorted",
        "join",
        "for",
        "in",
        "self",
        "r",
        "f",
        "repr",
        "if",
        "else",
        "not",
        "and",
        "or",
        "is",
    )
)
_NO_TEXT = re.compile(r"re\.|cast$|(logging\.)?getLogger$|_T$|Transition$")
"""Calls whose arguments nobody reads, and rows of state machines, which are in docs/state-machines.md."""
_NO_WORDS = re.compile(r"<[^>]*>|[\w-]+=\"[^\"]*\"|[\w\[\], .]+ \| None|from .* import .*")
"""Tags, attributes, types and code."""
_MOST_WORDS_OF_A_PART = 5
"""Of what a private helper's sentence is filled with, as in `_differ(code, "The attention window", ...)`."""
_CODES = {"InvalidConfig": "invalid-config", "InvalidEvent": "invalid-event"}
"""Codes that are those of a class of errors."""
_MOST_STEPS = 4
"""From a name to its value, from there to a function's result, and so on."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@final
@dataclass(frozen=True, slots=True)
class Text:
    """A text of a module.

    Attributes:
        level: Kind of text, of `LEVELS`.
        code: Its stable code, or empty.
        text: The text, values by name.
        advice: The next step that the message itself carries, or empty.
    """

    level: str
    code: str
    text: str
    advice: str = ""


def texts_of(tree: ast.Module) -> Iterator[Text]:
    """Yield the texts of a module."""
    module = _Module(tree)
    told: set[int] = set()
    for call in module.calls:
        level = _level_of(call, is_raised=id(call) in module.raised)
        if level:
            for literal in _longest([module.literals_of([each]) for each in _told(call, level)]):
                told.add(id(literal))
                yield from _texts(literal, level, _code_of(call, level), _advice_of(call, level))
            told.update(id(each) for each in _advice_nodes(call, level))
    for literal in module.literals:
        if id(literal) not in told:
            code = module.neighbour_code(literal)
            level = "help" if id(literal) in module.help else "error" if code else "text"
            yield from _texts(literal, level, code)
    for text in module.command_help:
        yield Text("help", "", " ".join(text.split()))


def _longest(arguments: list[list[ast.expr]]) -> list[ast.expr]:
    """Return the literals of the argument with the longest one: the others are values, names and causes."""
    return max(arguments, key=lambda literals: max((len(words_of(each)) for each in literals), default=0), default=[])


def _texts(literal: ast.expr, level: str, code: str, advice: str = "") -> Iterator[Text]:
    text = " ".join(words_of(literal).replace("\b", "").split())
    plain = _WORD.findall(_NO_WORDS.sub(" ", re.sub(r"\{[^{}]*\}|%[a-z]", " ", text)))
    if len(text.split()) >= _LEAST_WORDS and (len(plain) >= _LEAST_PLAIN or level != "text"):
        yield Text(level, code, text, advice)


@final
class _Module:
    """A module's tree with what leads from a name or a call to literals."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        self._parents = {id(child): node for node in nodes for child in ast.iter_child_nodes(node)}
        self._functions = {node.name: node for node in nodes if isinstance(node, _Function)}
        self._values: dict[tuple[int, str], list[ast.expr]] = {}
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.raised = {id(node.exc) for node in nodes if isinstance(node, ast.Raise)}
        self.literals = [
            node
            for node in nodes
            if isinstance(node, ast.expr)
            and _is_literal(node)
            and not self._is_inner(node)
            and not _is_no_text(node, self._parents)
        ]
        self.command_help = [
            ast.get_docstring(each) or "" for each in self._functions.values() if self._is_command(each)
        ]
        for node in nodes:
            self._note_value(node)
        self.help = {
            id(literal)
            for call in self.calls
            for keyword in call.keywords
            if keyword.arg in {"help", "epilog"}
            for literal in self.literals_of([keyword.value])
        }

    def _is_inner(self, node: ast.AST) -> bool:
        """Return whether a literal is a part of another one, a documentation string, or an annotation."""
        parent = self._parents[id(node)]
        return isinstance(parent, ast.Expr | ast.JoinedStr) or (isinstance(parent, ast.BinOp) and _is_literal(parent))

    def _is_command(self, function: _Function) -> bool:
        """Return whether `@app.command()` stands above a function, or `app.command()(function)` anywhere."""
        decorators = [ast.unparse(each) for each in function.decorator_list]
        applied = (
            isinstance(call.func, ast.Call)
            and ast.unparse(call.func.func).startswith("app.")
            and ast.unparse(call.args[0]) == function.name
            for call in self.calls
        )
        return any(each.startswith(("app.command", "app.callback")) for each in decorators) or any(applied)

    def _note_value(self, node: ast.AST) -> None:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            targets = [node.target]
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(value, ast.expr):
                self._values.setdefault((self._scope(node), target.id), []).append(value)

    def _scope(self, node: ast.AST) -> int:
        """Return the function that a node is in, 0 for the module."""
        while (parent := self._parents.get(id(node))) is not None:
            if isinstance(parent, _Function):
                return id(parent)
            node = parent
        return 0

    def literals_of(self, expressions: list[ast.expr], steps: int = _MOST_STEPS) -> list[ast.expr]:
        """Return the literals that expressions stand for."""
        return [literal for each in expressions for literal in self._literals_of(each, steps)]

    def _literals_of(self, node: ast.expr, steps: int) -> list[ast.expr]:
        if _is_literal(node):
            return [node]
        if not steps:
            return []
        inner: list[ast.expr] = []
        if isinstance(node, ast.IfExp):
            inner = [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            inner = node.values
        elif isinstance(node, ast.BinOp):
            inner = [node.left, node.right]
        elif isinstance(node, ast.Name):
            scopes = (self._scope(node), 0)
            inner = next((self._values[scope, node.id] for scope in scopes if (scope, node.id) in self._values), [])
        elif isinstance(node, ast.Call):
            function = self._functions.get(ast.unparse(node.func).rpartition(".")[2])
            inner = [
                each.value
                for each in (ast.walk(function) if function is not None else ())
                if isinstance(each, ast.Return) and each.value is not None
            ]
        return self.literals_of(inner, steps - 1)

    def neighbour_code(self, literal: ast.expr) -> str:
        """Return the code beside a text, as in `return "no-peer", f"..."`; empty for none."""
        parent = self._parents[id(literal)]
        beside: list[ast.expr] = []
        if isinstance(parent, ast.Tuple):
            beside = parent.elts
        elif isinstance(parent, ast.Call):
            is_part = (
                ast.unparse(parent.func).startswith("_") and len(words_of(literal).split()) <= _MOST_WORDS_OF_A_PART
            )
            if is_part:
                return ""
            beside = [*parent.args, *(each.value for each in parent.keywords if each.arg == "code")]
        elif isinstance(parent, ast.keyword):
            return self.neighbour_code_of_call(parent)
        return _first_code(beside)

    def neighbour_code_of_call(self, keyword: ast.keyword) -> str:
        """Return the code in the call of a keyword."""
        call = self._parents[id(keyword)]
        return _code_of(call, "error") if isinstance(call, ast.Call) else ""


def _is_literal(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_literal(node.left) or _is_literal(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_no_text(node: ast.AST, parents: Mapping[int, ast.AST]) -> bool:
    """Return whether a literal is a pattern, a type, or a `repr`, which developers see."""
    while (parent := parents.get(id(node))) is not None:
        if isinstance(parent, ast.Call) and _NO_TEXT.match(ast.unparse(parent.func)):
            return True
        if isinstance(parent, _Function):
            return parent.name == "__repr__"
        node = parent
    return False


def _level_of(node: ast.Call, *, is_raised: bool) -> str:
    """Return at which level a call shows its text; empty if it shows none."""
    if isinstance(node.func, ast.Attribute):
        receiver, method = ast.unparse(node.func.value), node.func.attr
        if method in _LOGGED and _LOGGERS.search(receiver):
            return _LOGGED[method]
        if method in _FINDINGS and receiver.endswith("findings"):
            return _FINDINGS[method]
        if method == "error" and receiver.endswith("parser"):
            return "refusal"
    name = ast.unparse(node.func).rpartition(".")[2]
    if name == "print" and any(each.arg == "file" and "stderr" in ast.unparse(each.value) for each in node.keywords):
        return "refusal"
    if name in _REFUSALS:
        return "refusal"
    return "error" if is_raised or name.endswith("Error") else ""


def _is_finding(level: str) -> bool:
    return level in _FINDINGS.values()


def _told(node: ast.Call, level: str) -> list[ast.expr]:
    """Return the arguments that hold the text; of a finding, which has advice too, its message."""
    if _is_finding(level):
        place = 1 if level == "ok" else 2
        return node.args[place : place + 1]
    return [*node.args, *(each.value for each in node.keywords if each.arg == "message")]


def _advice_nodes(node: ast.Call, level: str) -> list[ast.expr]:
    return node.args[3:4] if _is_finding(level) and level != "ok" else []


def _advice_of(node: ast.Call, level: str) -> str:
    return "".join(" ".join(words_of(each).split()) for each in _advice_nodes(node, level))


def _code_of(node: ast.Call, level: str) -> str:
    """Return the code in a call; the first word of one that logs is the cause whose lines are limited."""
    if level in {"warning", "info"} or (
        isinstance(node.func, ast.Attribute) and _LOGGERS.search(ast.unparse(node.func.value))
    ):
        return ""
    named = [each.value for each in node.keywords if each.arg == "code"]
    return _first_code(named or list(node.args)) or _CODES.get(ast.unparse(node.func), "")


def _first_code(nodes: list[ast.expr]) -> str:
    constants = (each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str))
    return next((one for one in constants if _CODE.fullmatch(one) or one in _ONE_WORD_CODES), "")


def words_of(node: ast.expr) -> str:
    """Return a text as it is written: f-strings with their values by name, parts that are added joined."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(each.value) if isinstance(each, ast.Constant) else _value(each) for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(words_of(each) if _is_literal(each) else _value(each) for each in (node.left, node.right))
    return ""


def _value(node: ast.expr) -> str:
    """Return the name of a value: `{question.endpoint.host}` is {host}, `{len(ranks)}` is {ranks}."""
    names = re.findall(r"[A-Za-z]\w*", ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node))
    plain = [name for name in names if name not in _NO_NAMES]
    plain = [name for name in plain if not name.isupper()] or plain  # `{host[:_MAX_HOST_CHARS]!r}` is {host}
    return "{" + (plain[-1].strip("_") if plain else "value") + "}"
