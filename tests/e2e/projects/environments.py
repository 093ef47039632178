"""Virtual environments with no more in them than executors import: no Callyard."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from callyard.worker.interpreter import NEEDS

_BELOW = ("pydantic-core", "annotated-types", "typing-inspection")
"""What those need themselves."""


def make_environment(folder: Path, *, without: Iterable[str] = ()) -> Path:
    """A new environment with the few packages, copied from ours; its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    packages = site_packages(folder)
    for name in {*NEEDS, *_BELOW} - set(without):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            source = Path(str(distribution.locate_file(top)))
            if source.is_dir():
                shutil.copytree(source, packages / top, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, packages / top)
    return folder / "bin" / "python"


def site_packages(environment: Path) -> Path:
    return next((environment / "lib").glob("python*/site-packages"))


def install_editable(project: Path, environment: Path) -> None:
    """What an editable install leaves: the build backend makes the wheel, an installer unpacks it."""
    built = environment / "built"
    built.mkdir()
    code = "import sys, hatchling.build; print(hatchling.build.build_editable(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(built)], cwd=project, capture_output=True, text=True, timeout=120, check=True
    )
    with zipfile.ZipFile(built / done.stdout.split()[-1]) as wheel:
        wheel.extractall(site_packages(environment))


def make_wheel(folder: Path, name: str, source: str) -> Path:
    """A wheel of one module."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", source)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path
