"""Which names code may not import or use: deny and allow rules, the longest that fits a name decides.

| rule | fits |
| --- | --- |
| `subprocess` | the module, and whatever is below it |
| `os.system` | that name, and whatever is below it |
| `eval` | a builtin: the same as `builtins.eval` |
| `.__globals__` | an attribute of that name, of anything |
| `*` | every module that is not the bundle's own |
"""

from __future__ import annotations

import builtins
import hashlib
import re
from collections.abc import Iterable
from typing import Final

from callyard.errors import UsageError

BUILTINS: Final = frozenset(dir(builtins))
EVERY_MODULE: Final = "*"
_RULE: Final = re.compile(r"\*|\.?[^\W\d]\w*(\.[^\W\d]\w*)*")

_OF_OS: Final = (
    *("system", "popen", "fork", "forkpty", "kill", "killpg", "posix_spawn", "posix_spawnp"),
    *("execl", "execle", "execlp", "execlpe", "execv", "execve", "execvp", "execvpe"),
    *("spawnl", "spawnle", "spawnlp", "spawnlpe", "spawnv", "spawnve", "spawnvp", "spawnvpe"),
)
DEFAULT_DENIED: Final = (
    # other processes
    *("subprocess", "multiprocessing", "pty", "posix", "nt", "_posixsubprocess"),
    *("concurrent.futures.process", "concurrent.futures.ProcessPoolExecutor"),
    *(f"os.{name}" for name in _OF_OS),
    # native code and raw sockets
    *("ctypes", "_ctypes", "cffi", "socket", "_socket"),
    # code made at run time
    *("eval", "exec", "compile", "__import__", "code", "codeop", "runpy", "marshal"),
    *("importlib.import_module", "importlib.__import__", "importlib.reload", "importlib.util", "importlib.machinery"),
    # the interpreter's inside, where other calls' values are
    *("gc", "sys.modules", "sys._getframe", "sys._current_frames", "sys.settrace", "sys.setprofile"),
    *(".__subclasses__", ".__globals__", ".__builtins__", ".__code__", ".f_globals", ".f_back", ".gi_frame"),
)
"""What `AstPolicy` denies unless it is told otherwise."""


class Rules:
    """Raises UsageError for what is no rule."""

    def __init__(self, deny: Iterable[str], allow: Iterable[str]) -> None:
        self._deny = frozenset(map(_read_rule, _listed("deny", deny)))
        self._allow = frozenset(map(_read_rule, _listed("allow", allow)))
        self._attributes = frozenset(rule[1:] for rule in self._deny - self._allow if rule.startswith("."))
        self._parents = frozenset(
            rule[: end.start()] for rule in self._deny - self._allow for end in re.finditer(r"\.", rule) if end.start()
        )
        text = "\n".join([*sorted(self._deny), "", *sorted(self._allow)])
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def denies(self, name: str, *, imported: bool = True) -> str | None:
        """The rule that denies a dotted name, if one does. `imported`: it stands for something of a module."""
        part = name
        while part:
            if part in self._allow:
                return None
            if part in self._deny:
                return part
            part = part.rpartition(".")[0]
        if imported and EVERY_MODULE in self._deny and EVERY_MODULE not in self._allow:
            return EVERY_MODULE
        return None

    def denies_attribute(self, attribute: str) -> bool:
        return attribute in self._attributes

    def has_denied_below(self, name: str) -> bool:
        """Whether something below a name is denied, so that a computed attribute of it may be anything."""
        return name in self._parents


def _listed(what: str, rules: Iterable[str]) -> Iterable[str]:
    if isinstance(rules, str):
        raise UsageError(f"{what} must be a list of names, got the text {rules!r}")
    return rules


def _read_rule(rule: object) -> str:
    if not isinstance(rule, str) or not _RULE.fullmatch(rule):
        raise UsageError(
            f"audit rule {rule!r}: expected a module (subprocess), a name in it (os.system), a builtin (eval),"
            " an attribute (.__globals__) or *"
        )
    return f"builtins.{rule}" if rule in BUILTINS else rule
