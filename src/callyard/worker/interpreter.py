"""Which Python executors run, and whether it can.

`executor_python` names one, or says `auto`: the active virtual environment, else the `.venv` of the target's project,
else our own. Another interpreter needs only the few packages that executors import: Callyard itself is always this
very one, loaded by path (`executor.launch`), so its version cannot differ. What another interpreter has is asked of it
in a process. Code that is not trusted has no say: neither its `.venv` nor its dependencies are looked at.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import site
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from callyard import __version__
from callyard.errors import UsageError
from callyard.functions.script import Script
from callyard.functions.target import find_package_here, find_project

AUTO: Final = "auto"
"""The setting that looks for an environment; empty: our own interpreter."""
VIRTUAL_ENV: Final = "VIRTUAL_ENV"
PYTHON_MIN: Final = (3, 11)
NEEDS: Final[Mapping[str, str]] = {
    "greenlet": "3.5",
    "jiter": "0.19",
    "jsonschema-rs": "0.60.1",
    "msgspec": "0.23",
    "pydantic": "2.14",
    "typing-extensions": "4.12",
}
"""What executors import, with the least version: all that another interpreter must have."""
PROBE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    path: str
    """As it is started."""
    origin: str
    """Why it is this one, in words."""
    version: str
    prefixes: tuple[str, ...]
    """The folders it is installed in, and of the one below it."""
    user_site: str = ""
    """Packages installed for the user alone; empty: not in use."""
    user_base: str = ""
    is_own: bool = False
    """The one that runs this process."""
    other_callyard: str = ""
    """The version of a Callyard installed there that is not used, since it is another."""

    def summarize(self) -> str:
        text = f"executors run {self.path} (Python {self.version}), {self.origin}"
        if self.other_callyard:
            text += f"; not its callyard {self.other_callyard}, but this one, {__version__}"
        return text


def own_interpreter(origin: str = "Callyard's own") -> Interpreter:
    user_site = site.getusersitepackages()
    in_use = bool(site.ENABLE_USER_SITE) and os.path.isdir(user_site)
    return Interpreter(
        path=_walk_up(sys.executable),
        origin=origin,
        version=sys.version.partition(" ")[0],
        prefixes=(sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix),
        user_site=user_site if in_use else "",
        user_base=site.getuserbase() if in_use else "",
        is_own=True,
    )


def choose_interpreter(
    setting: str, target: Path | None = None, script: Script | None = None, *, trusted: bool = True
) -> Interpreter:
    """The interpreter for a setting and a target's file. It starts processes: not for an event loop.

    `script`: the packages that the target says it needs, for which `auto` makes an environment. Raises UsageError for
    one that cannot run executors, with the command that mends it.
    """
    if not setting:
        return own_interpreter()
    if setting == AUTO and script is not None and script.dependencies:
        from callyard.worker.environments import prepare_environment

        return check_interpreter(*prepare_environment(script, target.name if target else "the script", trusted=trusted))
    path, origin = locate_python(setting, target.parent if target is not None else None, trusted=trusted)
    return check_interpreter(path, origin)


def locate_python(setting: str, folder: Path | None, *, trusted: bool = True) -> tuple[str, str]:
    """Path and origin of an interpreter; `folder`: of the target. Raises UsageError when it is not there."""
    if setting != AUTO:
        return _find_named(setting), "as --python says"
    active = os.environ.get(VIRTUAL_ENV, "")
    if active:
        python = python_in(Path(active))
        if python is None:
            raise UsageError(
                f"${VIRTUAL_ENV} is {active}, where there is no bin/python: activate another environment, or name an"
                " interpreter with --python"
            )
        return python, f"of ${VIRTUAL_ENV}"
    if folder is not None and trusted:
        for place in _project_folders(folder.absolute()):
            python = python_in(place / ".venv")
            if python is not None:
                return python, f"of {place / '.venv'}"
    return sys.executable, "Callyard's own"


def python_in(environment: Path) -> str | None:
    """The interpreter of a virtual environment; None: that is none."""
    path = environment / "bin" / "python"
    return _walk_up(str(path.absolute())) if os.access(path, os.X_OK) else None


def _walk_up(path: str) -> str:
    """The same file, without `..`: a sandbox has none of the folders that such a path leads through.

    The file itself may be a link: an environment is found from where its link lies.
    """
    if os.pardir not in Path(path).parts:
        return path
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)


def package_finder(setting: str, *, trusted: bool = True) -> Any:
    """`FindPackage` by the interpreter that a target named from the working folder will run in."""

    def find(top: str) -> Iterable[str]:
        path, _ = locate_python(setting, Path.cwd(), trusted=trusted) if setting else (sys.executable, "")
        return find_package_here(top) if is_own(path) else ask(path, find=top)["found"]

    return find


def list_packages(path: str, names: Iterable[str]) -> dict[str, list[str]]:
    """The distributions, as `name==version`, that provide each top-level name there; none: it is not installed."""
    found: dict[str, list[str]] = ask(path, packages=list(names))["packages"]
    return found


def is_own(path: str) -> bool:
    """Whether that interpreter has the packages that this process has."""
    own = os.path.realpath(sys.executable)
    same_environment = os.path.realpath(os.path.dirname(path)) == os.path.realpath(os.path.dirname(sys.executable))
    return os.path.realpath(path) == own and same_environment


def check_interpreter(path: str, origin: str) -> Interpreter:
    """What an interpreter is. Raises UsageError when it cannot run executors, with what mends it."""
    if is_own(path):
        return own_interpreter(origin)
    said = ask(path)
    version = ".".join(map(str, said["version"]))
    if tuple(said["version"]) < PYTHON_MIN:
        least = ".".join(map(str, PYTHON_MIN))
        raise UsageError(
            f"{path} ({origin}) is Python {version}, and executors need {least} or newer: name another with --python"
        )
    if said["missing"] or said["old"]:
        raise UsageError(_explain_lack(path, origin, said))
    other = said["callyard"] or ""
    return Interpreter(
        path=path,
        origin=origin,
        version=version,
        prefixes=tuple(said["prefixes"]),
        user_site=said["user_site"],
        user_base=said["user_base"],
        other_callyard=other if other != __version__ else "",
    )


def pip_command(path: str, packages: Iterable[str], *, has_pip: bool = True) -> str:
    words = [path, "-m", "pip", "install"] if has_pip else ["uv", "pip", "install", "--python", path]
    return shlex.join([*words, *packages])


def ask(path: str, **questions: Any) -> dict[str, Any]:
    """What an interpreter says of itself (`_PROBE`). Raises UsageError when it does not run."""
    wanted = json.dumps({"needs": dict(NEEDS), **questions})
    try:
        done = subprocess.run(
            [path, "-c", _PROBE, wanted],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{path} does not run: {error}: name another interpreter with --python") from error
    try:
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        last = last or f"it ended with status {done.returncode}"
        raise UsageError(f"{path} is no Python that runs: {last}") from None
    return said


def _find_named(setting: str) -> str:
    path = Path(setting).expanduser()
    if path.is_dir():
        python = python_in(path)
        if python is None:
            raise UsageError(f"{_show(setting)}: there is no {path / 'bin' / 'python'}")
        return python
    found = shutil.which(str(path))
    if found is None:
        raise UsageError(f"{_show(setting)}: no such interpreter: expected a path, a virtual environment, or a command")
    return _walk_up(str(Path(found).absolute()))


def _show(setting: str) -> str:
    return f"{setting!r} (--python, or the setting executor_python)"


def _project_folders(folder: Path) -> Iterable[Path]:
    """The folder, and those above it up to the project's own."""
    project = find_project(folder / "_")
    yield folder
    if project is not None and folder.is_relative_to(project):
        for place in folder.parents:
            if not place.is_relative_to(project):
                return
            yield place


def _explain_lack(path: str, origin: str, said: Mapping[str, Any]) -> str:
    lacks = []
    if said["missing"]:
        lacks.append(f"it has no {', '.join(said['missing'])}")
    lacks += [f"its {name} is {version}, older than {NEEDS[name]}" for name, version in said["old"].items()]
    packages = [f"{name}>={NEEDS[name]}" for name in (*said["missing"], *said["old"])]
    return (
        f"{path} ({origin}) cannot run executors: {'; '.join(lacks)}. This mends it:\n"
        f"    {pip_command(path, packages, has_pip=said['pip'])}\n"
        f"or name another interpreter with --python"
    )


_PROBE: Final = """
import json, os, site, sys
if sys.path and sys.path[0] == "":
    del sys.path[0]
wanted = json.loads(sys.argv[1])
said = {"version": list(sys.version_info[:3])}
if sys.version_info >= (3, 8):
    import importlib.util
    from importlib import metadata

    def version(name):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    def numbers(text):
        found = []
        for part in text.split("."):
            digits = ""
            for letter in part:
                if not letter.isdigit():
                    break
                digits += letter
            if not digits:
                break
            found.append(int(digits))
        return found

    def find(top):
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            return []
        if spec is None:
            return []
        if spec.submodule_search_locations is not None:
            return [os.path.dirname(place) for place in spec.submodule_search_locations]
        if spec.origin and os.path.isfile(spec.origin):
            return [os.path.dirname(spec.origin)]
        return []

    def providers(top, by_name):
        found = version(top)
        if found is not None:
            return [metadata.metadata(top)["Name"] + "==" + found]
        if not by_name and wanted.get("packages"):
            by_name.update(metadata.packages_distributions() if hasattr(metadata, "packages_distributions") else {})
        return sorted({name + "==" + version(name) for name in by_name.get(top, ())})

    has = {name: version(name) for name in wanted["needs"]}
    user_site = site.getusersitepackages()
    in_use = bool(site.ENABLE_USER_SITE) and os.path.isdir(user_site)
    by_name = {}
    said.update(
        prefixes=[sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix],
        user_site=user_site if in_use else "",
        user_base=site.getuserbase() if in_use else "",
        callyard=version("callyard"),
        pip=importlib.util.find_spec("pip") is not None,
        missing=[name for name, found in has.items() if found is None],
        old={name: found for name, found in has.items() if found and numbers(found) < numbers(wanted["needs"][name])},
        found=find(wanted["find"]) if "find" in wanted else [],
        packages={top: providers(top, by_name) for top in wanted.get("packages", ())},
    )
print(json.dumps(said))
"""
"""For any Python 3. The last line that it prints is JSON."""
