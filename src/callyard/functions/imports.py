"""Which modules a source text imports, read from its syntax tree: nothing is run."""

from __future__ import annotations

import ast
import io
import tokenize
import warnings
from collections.abc import Iterable, Iterator

import msgspec


class Import(msgspec.Struct, frozen=True):
    """`module` is absolute. `names`: what `from module import …` asks for, each a submodule or an attribute."""

    module: str
    names: tuple[str, ...] = ()


def parse_source(source: bytes, filename: str) -> ast.Module:
    """The syntax tree. Raises `SyntaxError`, or `ValueError` for bytes that are no source text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape is the author's concern, and not here
        try:
            return ast.parse(source, filename)
        except (RecursionError, MemoryError) as error:
            raise ValueError("nested too deeply to be parsed") from error


def decode_source(source: bytes) -> str:
    """The text, by its byte order mark or coding line, else UTF-8. Raises `SyntaxError` or `UnicodeDecodeError`."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    return source.decode(encoding)


def list_imports(tree: ast.Module, module: str, *, is_package: bool) -> Iterator[Import]:
    """Every import statement, also inside functions. `module` is the source's own name, for relative imports."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_import(package, node.level, node.module)
            if base:
                yield Import(base, tuple(alias.name for alias in node.names))


def explain_absence(source: bytes, name: str) -> str:
    """Why a name that stands at the top of a file is no function that can be called; empty: not known."""
    try:
        body = parse_source(source, "").body
    except (SyntaxError, ValueError):
        return ""
    found = next((node for node in reversed(body) if getattr(node, "name", None) == name), None)
    if isinstance(found, ast.ClassDef):
        return f"{name} is a class: write a function that uses it"
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    if _yields(found.body):
        return f"{name} is a generator function: return a list"
    if name.startswith("_"):
        return f"{name} begins with an underscore, so it is private: rename it"
    return ""


def _yields(nodes: Iterable[ast.AST]) -> bool:
    """Whether this very function has a yield, and not only one inside it."""
    for node in nodes:
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)
        if not inner and _yields(ast.iter_child_nodes(node)):
            return True
    return False


def resolve_import(package: str, level: int, module: str | None) -> str:
    """The absolute name; empty: a relative import that leaves its package, which fails when it is run."""
    if level == 0:
        return module or ""
    parts = package.split(".") if package else []
    if level - 1 >= len(parts):
        return ""
    base = parts[: len(parts) - (level - 1)]
    return ".".join([*base, module] if module else base)
