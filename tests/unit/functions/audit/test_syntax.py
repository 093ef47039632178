"""What the syntax review finds, and where it says so."""

from __future__ import annotations

from threading import Event

import pytest

from callyard.errors import UsageError
from callyard.functions.audit.rules import DEFAULT_DENIED, Rules
from callyard.functions.audit.syntax import review

pytestmark = pytest.mark.requirement("X41")


def judge(source: str | bytes, *, deny: tuple[str, ...] = DEFAULT_DENIED, allow: tuple[str, ...] = ()) -> list[str]:
    content = source.encode() if isinstance(source, str) else source
    return review({"tools.py": content}, Rules(deny, allow))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import subprocess", "tools.py:1: imports subprocess, which is denied"),
        ("import json\nimport subprocess as s", "tools.py:2: imports subprocess, which is denied"),
        ("from os import system", "tools.py:1: imports os.system, which is denied"),
        ("from os import system as run", "tools.py:1: imports os.system, which is denied"),
        ("import os\nos.system('x')", "tools.py:2: uses os.system, which is denied"),
        ("import os as o\ndef f():\n    return o.popen", "tools.py:3: uses os.popen, which is denied"),
        ("import os\no = os\np: object = o\n(q := p).system", "tools.py:4: uses os.system, which is denied"),
        ("import os, json\na, b = json, os\nb.fork()", "tools.py:3: uses os.fork, which is denied"),
        ("import os\n(os if 1 else None).system", "tools.py:2: uses os.system, which is denied"),
        ("import os.path\nos.kill(1, 9)", "tools.py:2: uses os.kill, which is denied"),
        ("from ctypes import *", "tools.py:1: imports ctypes, which is denied"),
        ("from os import *", "tools.py:1: imports everything from os, of which some is denied"),
        ("import ctypes.util", "tools.py:1: imports ctypes.util, which is denied by the rule 'ctypes'"),
        ("def f():\n    import subprocess", "tools.py:2: imports subprocess, which is denied"),
        ("def f(x):\n    return eval(x)", "tools.py:2: uses eval, which is denied"),
        ("e = exec", "tools.py:1: uses exec, which is denied"),
        ("import builtins\nbuiltins.eval('1')", "tools.py:2: uses eval, which is denied"),
        ("__builtins__.exec", "tools.py:1: uses exec, which is denied"),
        ("import os\neval = os.path\neval('1')", "tools.py:3: uses eval, which is denied"),
        ("compile('1', '', 'eval')", "tools.py:1: uses compile, which is denied"),
        ("__import__('subprocess')", "tools.py:1: uses __import__, which is denied"),
        (
            "import importlib\nimportlib.import_module('os')",
            "tools.py:2: uses importlib.import_module, which is denied",
        ),
        ("import os\ngetattr(os, 'sys' + 'tem')", "tools.py:2: reads attributes of os by getattr, of which some are"),
        ("import os\ngetattr(os, 'system')", "tools.py:2: uses os.system, which is denied"),
        ("import os\nvars(os)['system']", "tools.py:2: reads attributes of os by vars, of which some are denied"),
        (
            "import os\nos.__dict__['system']",
            "tools.py:2: reads attributes of os by __dict__, of which some are denied",
        ),
        ("().__class__.__subclasses__()", "tools.py:1: uses .__subclasses__, which is denied"),
        ("getattr(f, '__globals__')", "tools.py:1: uses .__globals__, which is denied"),
    ],
)
def test_finds(source: str, reason: str) -> None:
    found = judge(source)
    assert any(line.startswith(reason) for line in found), found


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.path.join('a', 'b')\nos.environ",
        "from re import compile\ncompile('a')",
        "import re\nre.compile('a')",
        "class A:\n    def system(self): ...\nA().system()",
        "import importlib.metadata",
        "x = 'import subprocess; eval(1)'  # subprocess",
        "import json as os\nos.system",
        "import math\ngetattr(math, 'p' + 'i')",
    ],
)
def test_lets_pass(source: str) -> None:
    assert judge(source) == []


def test_longest_rule_decides() -> None:
    rules = {"deny": ("os", "os.path.join"), "allow": ("os.path",)}
    assert judge("import os.path", **rules) == []
    assert judge("from os.path import split", **rules) == []
    assert judge("from os.path import join", **rules) == ["tools.py:1: imports os.path.join, which is denied"]
    assert judge("import os", **rules) == ["tools.py:1: imports os, which is denied"]
    found = judge("import os.path\nos.getpid()", **rules)
    assert found == ["tools.py:2: uses os, which is denied"]


def test_allow_list() -> None:
    only = {"deny": ("*",), "allow": ("math",)}
    assert judge("import math\nprint(math.pi)\nfrom math import sqrt", **only) == []
    assert judge("import json", **only) == ["tools.py:1: imports json, which is denied by the rule '*'"]


def test_an_allowed_import_module_is_followed() -> None:
    source = "from importlib import import_module as load\nload('subprocess').run\nload('json')"
    found = judge(source, allow=("importlib.import_module",))
    assert found
    assert all(line.startswith("tools.py:2: uses subprocess") for line in found)
    allowed = judge("import sys\nsys.modules['os'].system", allow=("sys.modules",))
    assert allowed == ["tools.py:2: uses os.system, which is denied"]


def test_names_are_followed_through_the_bundles_own_files() -> None:
    files = {
        "pkg/__init__.py": b"from . import inner as door\n",
        "pkg/inner.py": b"import os as machine\n",
        "tools.py": b"from pkg import door\ndoor.machine.system('x')\n",
        "other.py": b"from pkg.inner import machine\nmachine.fork()\n",
    }
    assert review(files, Rules(DEFAULT_DENIED, ())) == [
        "tools.py:2: uses os.system, which is denied",
        "other.py:2: uses os.fork, which is denied",
    ]


def test_own_modules_need_no_rule() -> None:
    files = {"tools.py": b"import helper\nfrom .more import x\n", "helper.py": b"", "more.py": b"x = 1\n"}
    assert review(files, Rules(("*",), ())) == []


def test_aliases_in_a_ring_end() -> None:
    files = {"a.py": b"from b import x\n", "b.py": b"from a import x\n", "c.py": b"import a\na.x.system\n"}
    assert review(files, Rules(DEFAULT_DENIED, ())) == []
    assert judge("a = b\nb = a\na.system") == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"x = 1\ndef f(:\n", "tools.py:2: SyntaxError: "),
        (b"x = 1\ny = '\xff'\n", "tools.py:2: "),
        (b"# coding: latin-1\nx = '\xff'\n", "tools.py:1: its encoding is iso-8859-1: expected UTF-8"),
        (b"# coding: nonsense\n", "tools.py:1: unknown encoding"),
        (b"x = 1\nx = '\0'\n", "tools.py:"),
        (b"x = " + b"(" * 5_000 + b")" * 5_000, "tools.py:1: "),
    ],
)
def test_what_cannot_be_read_is_refused(content: bytes, reason: str) -> None:
    (found,) = judge(content)
    assert found.startswith(reason), found


def test_deep_chains_end() -> None:
    assert judge("import os\nx = os" + ".a" * 200 + "\nos.system") == ["tools.py:3: uses os.system, which is denied"]
    for source in ("os" + ".a" * 900, "x = os" + ".a" * 900, "x = " + "-" * 900 + "1", "os" + ".a" * 20_000):
        found = judge(f"import os\n{source}\nos.system")
        assert found, "refused, for the use or for its depth"


def test_native_files() -> None:
    files = {"tools.py": b"", "lib/fast.cpython-311-x86_64-linux-gnu.so": b"\x7fELF", "old.pyc": b"", "win.pyd": b""}
    rules = Rules(DEFAULT_DENIED, ())
    assert review(files, rules) == [
        f"{name}: a compiled file, which cannot be read" for name in files if name != "tools.py"
    ]
    assert review(files, rules, native=True) == []


def test_stops_when_nobody_waits() -> None:
    stop = Event()
    stop.set()
    assert review({"tools.py": b"import subprocess"}, Rules(DEFAULT_DENIED, ()), stop=stop) == []


@pytest.mark.parametrize("rule", ["", "os.", "os system", "..x", 5, "os.*"])
def test_bad_rules(rule: object) -> None:
    with pytest.raises(UsageError, match="audit rule"):
        Rules([rule], ())  # type: ignore[list-item]
    with pytest.raises(UsageError, match="list of names"):
        Rules("os", ())


def test_fingerprint_tells_rules_apart() -> None:
    assert Rules(("os", "re"), ()).fingerprint == Rules(("re", "os"), ()).fingerprint
    assert Rules(("os", "re"), ()).fingerprint != Rules(("os",), ("re",)).fingerprint
