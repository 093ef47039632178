"""Denied imports and uses in a bundle's Python files, by file and line.

Names are followed through imports (`import os as o`, `from os import system as s`), assignments (`o = os`), constant
`getattr`, `import_module` and `sys.modules[…]`, and from one file of the bundle into another. Flow is not: a name that
may stand for a denied thing anywhere in its file is taken for it everywhere in it. Whoever wants to hide a use can;
this finds what is written plainly. Source: call-execution X41.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from threading import Event
from typing import Final

from callyard.functions.audit.rules import BUILTINS, Rules
from callyard.functions.imports import parse_source, resolve_import

NATIVE_SUFFIXES: Final = frozenset({".so", ".pyd", ".dll", ".dylib", ".pyc", ".pyo"})
"""What Python loads without a source text."""
PASSES_MAX: Final = 8
"""Passes over the assignments of a file: aliases of aliases of aliases."""
ALIASES_MAX: Final = 64
"""Most things that one name is taken to stand for."""
NAME_CHARACTERS_MAX: Final = 300
"""Longer dotted names are cut: no rule is as long."""
HOPS_MAX: Final = 10
"""Files that one name is followed through."""
_UTF8: Final = frozenset({"utf-8", "utf-8-sig", "ascii", "us-ascii"})

Aliases = dict[str, set[str]]


def review(files: Mapping[str, bytes], rules: Rules, *, native: bool = False, stop: Event | None = None) -> list[str]:
    """Why these files are refused, in the order of files and lines; empty: they are not.

    Ends early, with what was found so far, when `stop` is set: then nobody waits for the answer.
    """
    modules: dict[str, _Module] = {}
    reasons: list[str] = []
    for name, content in files.items():
        if stop is not None and stop.is_set():
            return reasons
        suffix = PurePosixPath(name).suffix
        if suffix in NATIVE_SUFFIXES and not native:
            reasons.append(f"{name}: a compiled file, which cannot be read")
        if suffix not in (".py", ".pyw"):
            continue
        try:
            module = _Module(name, _parse(name, content))
        except _Unreadable as error:
            reasons.append(str(error))
        except RecursionError:
            reasons.append(f"{name}:1: nested too deeply to be read")
        else:
            modules[module.module] = module
    for module in modules.values():
        if stop is not None and stop.is_set():
            break
        try:
            reasons += _Review(module, modules, rules).reasons()
        except RecursionError:
            reasons.append(f"{module.name}:1: nested too deeply to be read")
    return reasons


class _Unreadable(Exception):
    """A file whose text cannot be judged: `file:line: reason`."""


def _parse(name: str, content: bytes) -> ast.Module:
    """The tree of a UTF-8 text. Any other encoding is refused: a reviewer would not see what Python sees."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    except SyntaxError as error:
        raise _Unreadable(f"{name}:{_bad_line(content)}: {error}") from error
    if encoding not in _UTF8:
        raise _Unreadable(f"{name}:1: its encoding is {encoding}: expected UTF-8")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _Unreadable(f"{name}:{line}: not UTF-8 (byte 0x{content[error.start]:02x})") from error
    try:
        return parse_source(content, name)
    except SyntaxError as error:
        raise _Unreadable(f"{name}:{error.lineno or 1}: {type(error).__name__}: {error.msg}") from error
    except ValueError as error:
        line = content.count(b"\n", 0, max(0, content.find(b"\0"))) + 1
        raise _Unreadable(f"{name}:{line}: {error}") from error


def _bad_line(content: bytes) -> int:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return content.count(b"\n", 0, error.start) + 1
    return 1


class _Module:
    """One file: its module name, tree, and what its names may stand for."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name = name
        self.tree = tree
        parts = PurePosixPath(name).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.module = ".".join(parts[:-1] if self.is_package else parts)
        self.aliases: Aliases = {}
        self._names: dict[int, frozenset[str]] = {}
        """What an expression may stand for, by the id of its node; valid for the aliases as they are."""
        self._add_imports()
        self._add_assignments()

    def import_base(self, node: ast.ImportFrom) -> str:
        package = self.module if self.is_package else self.module.rpartition(".")[0]
        return resolve_import(package, node.level, node.module)

    def _add_imports(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    self._add(alias.asname or top, {alias.name if alias.asname else top})
            elif isinstance(node, ast.ImportFrom):
                base = self.import_base(node)
                for alias in node.names:
                    if alias.name != "*" and base:
                        self._add(alias.asname or alias.name, {f"{base}.{alias.name}"})

    def _add_assignments(self) -> None:
        assignments = list(_assignments(self.tree))
        for target, _ in assignments:
            if target in BUILTINS and target not in self.aliases:
                self._add(target, {f"builtins.{target}"})  # it is still the builtin elsewhere in the file
        for _ in range(PASSES_MAX):
            self._names.clear()
            news = 0
            for target, value in assignments:
                news += self._add(target, self.names_of(value))
            if not news:
                break
        self._names.clear()

    def _add(self, name: str, stands_for: set[str] | frozenset[str]) -> bool:
        """Whether that is news."""
        known = self.aliases.setdefault(name, set()) if stands_for else self.aliases.get(name, set())
        if stands_for <= known or len(known) >= ALIASES_MAX:
            return False
        known |= stands_for
        return True

    def names_of(self, node: ast.expr) -> frozenset[str]:
        """The dotted names that an expression may stand for."""
        found = self._names.get(id(node))
        if found is None:
            found = self._names[id(node)] = frozenset(self._resolve(node))
        return found

    def _resolve(self, node: ast.expr) -> Iterator[str]:
        match node:
            case ast.Name(id=name):
                if aliases := self.aliases.get(name):
                    yield from aliases
                elif name == "__builtins__":
                    yield "builtins"
                elif name in BUILTINS:
                    yield f"builtins.{name}"
            case ast.Attribute(value=value, attr=attr):
                for base in self.names_of(value):
                    yield base if len(base) > NAME_CHARACTERS_MAX else f"{base}.{attr}"
            case ast.NamedExpr(value=value):
                yield from self.names_of(value)
            case ast.IfExp(body=body, orelse=orelse):
                yield from self.names_of(body)
                yield from self.names_of(orelse)
            case ast.BoolOp(values=values):
                for value in values:
                    yield from self.names_of(value)
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
                called = self.names_of(func)
                if "importlib.import_module" in called:
                    yield name
                if "builtins.__import__" in called:
                    yield name.partition(".")[0]
            case ast.Call(func=func, args=[base, ast.Constant(value=str(name)), *_]):
                if "builtins.getattr" in self.names_of(func):
                    yield from (f"{found}.{name}" for found in self.names_of(base))
            case ast.Subscript(value=value, slice=ast.Constant(value=str(name))):
                if "sys.modules" in self.names_of(value):
                    yield name


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Single names that get a value: `a = …`, `a: T = …`, `(a := …)`, and the pairs of `a, b = …, …`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _pairs(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield from _pairs(node.target, node.value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for left, right in zip(target.elts, value.elts, strict=True):
            if isinstance(left, ast.Name):
                yield left.id, right


class _Review:
    """The denied uses of one file."""

    def __init__(self, module: _Module, modules: Mapping[str, _Module], rules: Rules) -> None:
        self._module = module
        self._modules = modules
        self._rules = rules
        self._own = {name.partition(".")[0] for name in modules}

    def reasons(self) -> list[str]:
        found: dict[tuple[int, str], None] = {}
        for node in ast.walk(self._module.tree):
            for text in self._judge(node):
                found[getattr(node, "lineno", 1), text] = None
        return [f"{self._module.name}:{line}: {text}" for line, text in sorted(found)]

    def _judge(self, node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield from self._judge_import(alias.name)
            case ast.ImportFrom(names=names):
                base = self._module.import_base(node)
                for alias in names if base else ():  # without a base it leaves its package, and fails
                    if alias.name != "*":
                        yield from self._judge_import(f"{base}.{alias.name}")
                        continue
                    yield from self._judge_import(base)
                    if self._rules.has_denied_below(base):
                        yield f"imports everything from {base}, of which some is denied"
            case ast.Attribute(attr=attr):
                if self._rules.denies_attribute(attr):
                    yield f"uses .{attr}, which is denied"
                yield from self._judge_use(node)
            case ast.Name():  # what else it stands for was told where it was imported or named
                yield from self._judge_use(node, only="builtins.")
            case ast.Call(func=func, args=args):
                called = self._module.names_of(func)
                if "builtins.getattr" in called and len(args) >= 2:
                    yield from self._judge_getattr(args[0], args[1])
                if "builtins.vars" in called and args:
                    yield from self._judge_reach(args[0], "vars")
                yield from self._judge_use(node)
            case ast.Subscript():
                yield from self._judge_use(node)

    def _judge_import(self, name: str) -> Iterator[str]:
        for meant in self._follow(name):
            rule = self._denied(meant)
            if rule is not None:
                yield f"imports {meant}, which is denied{_by(rule, meant)}"

    def _judge_use(self, node: ast.expr, only: str = "") -> Iterator[str]:
        for name in self._module.names_of(node):
            if not name.startswith(only):
                continue
            for meant in self._follow(name):
                rule = self._denied(meant)
                if rule is not None:
                    shown = rule if meant.startswith(f"{rule}.") else meant
                    yield f"uses {shown.removeprefix('builtins.')}, which is denied{_by(rule, shown)}"
        if isinstance(node, ast.Attribute) and node.attr == "__dict__":
            yield from self._judge_reach(node.value, "__dict__")

    def _judge_getattr(self, base: ast.expr, name: ast.expr) -> Iterator[str]:
        if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
            yield from self._judge_reach(base, "getattr")
        elif self._rules.denies_attribute(name.value):
            yield f"uses .{name.value}, which is denied"

    def _judge_reach(self, base: ast.expr, by: str) -> Iterator[str]:
        """A computed attribute of something that has a denied one."""
        for name in self._module.names_of(base):
            for meant in self._follow(name):
                if self._rules.has_denied_below(meant):
                    yield f"reads attributes of {meant} by {by}, of which some are denied"

    def _denied(self, name: str) -> str | None:
        top = name.partition(".")[0]
        if top in self._own:
            return None  # the bundle's own code is judged where it stands
        return self._rules.denies(name, imported=top != "builtins")

    def _follow(self, name: str) -> set[str]:
        """What a name stands for once the bundle's own modules have been looked into."""
        reached = {name}
        fresh = [name]
        for _ in range(HOPS_MAX):
            fresh = [found for old in fresh for found in self._look_into(old) if found not in reached]
            reached.update(fresh)
            if not fresh or len(reached) > ALIASES_MAX:
                break
        return reached

    def _look_into(self, name: str) -> Iterator[str]:
        if name.partition(".")[0] not in self._own:
            return
        parts = name.split(".")
        for end in range(1, len(parts)):
            module = self._modules.get(".".join(parts[:end]))
            if module is not None:
                for meant in module.aliases.get(parts[end], ()):
                    yield ".".join([meant, *parts[end + 1 :]])


def _by(rule: str, name: str) -> str:
    shown = rule.removeprefix("builtins.")
    return "" if rule == name else f" by the rule {shown!r}"
