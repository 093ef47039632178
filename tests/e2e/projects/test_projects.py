"""Twelve projects of other people, each run by `callyard run`, or refused in the words of the guide."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.projects.conftest import CopyProject, RunIn
from tests.e2e.projects.environments import install_editable, make_environment, make_wheel

GUIDE = Path(__file__).parents[3] / "docs/guides/your-project.md"


def assert_promised(said: str, **places: object) -> None:
    """`said` ends a line of what was printed with a message that the guide has, its places in capitals filled in."""
    promises = [match.replace("\\|", "|") for match in re.findall(r"^\| `(.+?)` \|", GUIDE.read_text(), re.M)]
    for promise in promises:
        text = promise
        for name, value in places.items():
            text = text.replace(name, str(value))
        if text in said:
            return
    raise AssertionError(f"the guide promises none of this: {said!r}")


# --- the twelve -----------------------------------------------------------------------------------------------------


def test_a_flat_script(copy_project: CopyProject, callyard: RunIn) -> None:
    project = copy_project("flat")
    done = callyard(project, "run", "scores.py", "-", rows='{"name": "Ada", "points": 17}\n["Bo", 5]\n')
    assert [result["output"] for result in done.results] == ["Ada: 85 %", "Bo: 25 %"], done.err


@pytest.mark.requirement("X86")
@pytest.mark.parametrize("target", ["src/shop/prices.py", "shop.prices", "src/shop/prices"])
def test_a_src_layout_package_with_data_files(copy_project: CopyProject, callyard: RunIn, target: str) -> None:
    project = copy_project("src_layout")
    if target == "src/shop/prices":  # the folder brings its data by itself
        (project / "src/shop/__init__.py").write_text("from .prices import fail, look, price\n")
        target, include = "src/shop", []
    else:
        include = ["--include", "shop/data/*.csv"]
    done = callyard(project, "run", f"{target}:price", "-", *include, rows='["tea"]\n')
    assert done.results[0].get("output") == {"item": "tea", "cents": 300}, done.err
    looked = callyard(project, "call", f"{target}:look", *include)
    assert looked.status == 0, looked.err
    assert '"source":"def price(item: str) -> Price:"' in looked.out
    assert '"hints":"Price"' in looked.out
    assert '"beside":2' in looked.out
    assert '"module":"shop.prices"' in looked.out
    failed = callyard(project, "call", f"{target}:fail", *include)
    lines = (project / "src/shop/prices.py").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "out of tea" in text)
    assert f'File "shop/prices.py", line {line}, in fail' in failed.err
    assert 'raise RuntimeError("out of tea")' in failed.err


def test_data_that_was_not_included_is_named(copy_project: CopyProject, callyard: RunIn) -> None:
    done = callyard(copy_project("src_layout"), "run", "shop.prices:price", "-", rows='["tea"]\n')
    assert done.status == 1
    assert_promised(done.results[0]["error"]["message"], FILE="shop/data/prices.csv")


@pytest.mark.parametrize("target", ["report.py", "ledger.entries:balance"])
def test_an_editable_install(copy_project: CopyProject, callyard: RunIn, target: str) -> None:
    project = copy_project("editable")
    make_environment(project / ".venv")
    install_editable(project, project / ".venv")
    folder = project if target == "report.py" else project / "elsewhere"  # from where only the install finds it
    folder.mkdir(exist_ok=True)
    done = callyard(folder, "run", target, "-", rows="[[1, 2, 4]]\n")
    assert done.results[0].get("output") == ("balance 7" if target == "report.py" else 7), done.err
    assert f"executors run {project / '.venv/bin/python'}" in done.err
    listed = callyard(project, "list", "--files", "report.py")
    assert "imports ledger==2.1" in listed.out


def test_a_package_with_a_c_extension(copy_project: CopyProject, callyard: RunIn) -> None:
    done = callyard(copy_project("extension"), "run", "stats.py:mean", "-", rows="[[1, 2, 6]]\n")
    assert done.results[0].get("output") == 3.0, done.err


def test_pydantic_models_in_another_module(copy_project: CopyProject, callyard: RunIn) -> None:
    project = copy_project("models")
    row = '{"items": [{"name": "tea", "quantity": 2}, {"name": "salt", "quantity": 3}], "discount": "0.5"}\n'
    done = callyard(
        project, "run", "orders.totals:largest", "-", rows=row + '{"items": [{"name": "x", "quantity": 0}]}\n'
    )
    assert done.results[0].get("output") == {"name": "salt", "quantity": 3}, done.err
    assert "/items/0/quantity" in done.results[1]["error"]["message"]


def test_a_notebook_run_by_nbclient(copy_project: CopyProject, callyard: RunIn) -> None:
    nbclient = pytest.importorskip("nbclient", reason="a dev dependency, with ipykernel")
    project = copy_project("notebook")
    code = (
        "import json, nbformat, nbclient, sys\n"
        "notebook = nbformat.read('cells.ipynb', as_version=4)\n"
        "nbclient.NotebookClient(notebook, timeout=120, kernel_name='python3').execute()\n"
        "print(json.dumps([[output.get('text') or output['data']['text/plain'] for output in cell.outputs]"
        " for cell in notebook.cells]))\n"
    )
    assert nbclient is not None
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "[2, 42]" in done.stdout
    assert_promised(done.stdout.replace('\\"', '"'), NAME="triple")
    given = callyard(project, "run", "cells.ipynb", "-")
    assert given.status == 2
    assert_promised(given.err, FILE="cells.ipynb")


def test_a_script_with_a_guard(copy_project: CopyProject, callyard: RunIn) -> None:
    project = copy_project("guarded")
    done = callyard(project, "run", "fares.py:fare", "-", rows='{"km": 2}\n')
    assert done.results[0].get("output") == 7, done.err
    by_itself = subprocess.run(
        [sys.executable, "fares.py"], cwd=project, capture_output=True, text=True, timeout=120, check=False
    )
    assert by_itself.stdout == "11\n", by_itself.stderr


def test_a_script_that_reads_its_words_at_import(tmp_path: Path, callyard: RunIn) -> None:
    """It gets none, as when it runs by itself, and no word of ours."""
    (tmp_path / "words.py").write_text(
        "import argparse, sys\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--rate', type=int, default=3)\n"
        "RATE = parser.parse_args().rate\n"
        "def price(km: int) -> list:\n"
        "    return [RATE * km, sys.argv, parser.prog]\n"
    )
    done = callyard(tmp_path, "run", "words.py:price", "-", rows='{"km": 2}\n')
    assert done.results[0].get("output") == [6, ["words.py"], "words.py"], done.err


def test_dependencies_in_a_script_without_uv_are_listed(copy_project: CopyProject, callyard: RunIn) -> None:
    project = copy_project("script")
    done = callyard(project, "run", "greet.py", "-", PATH="/usr/bin:/bin")
    assert done.status == 2
    assert_promised(done.err, FILE="greet.py", LIST="greeting-under-test")


def test_dependencies_in_a_script_of_somebody_else_are_not_installed(
    copy_project: CopyProject, callyard: RunIn
) -> None:
    project = copy_project("script")
    done = callyard(project, "run", "greet.py", "-", "--audit", "ast")
    assert done.status == 2
    assert_promised(done.err, FILE="greet.py", LIST="greeting-under-test")


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
def test_dependencies_in_a_script_run_through_uv(copy_project: CopyProject, callyard: RunIn, tmp_path: Path) -> None:
    project = copy_project("script")
    wheel = make_wheel(tmp_path, "greeting_under_test", "def greet(name):\n    return f'hello {name}'\n")
    source = (project / "greet.py").read_text()
    (project / "greet.py").write_text(source.replace("greeting-under-test", f"greeting-under-test @ {wheel.as_uri()}"))
    cache = subprocess.run(["uv", "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip()
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "UV_CACHE_DIR": cache}
    for _ in range(2):
        done = callyard(project, "run", "greet.py", "-", rows='["Ada"]\n', **env)
        assert done.results[0].get("output") == "hello Ada", done.err
        assert "with the packages that greet.py names" in done.err
    kept = tmp_path / "cache/callyard/environments"
    assert len([path for path in kept.iterdir() if path.is_dir()]) == 1


def test_a_broken_import_names_the_interpreter_and_what_mends_it(copy_project: CopyProject, callyard: RunIn) -> None:
    done = callyard(copy_project("broken"), "run", "jobs.py", "-", rows='["{}"]\n')
    assert done.status == 2
    assert "jobs.py:3: ModuleNotFoundError" in done.err
    assert "-m pip install nowhere_under_test" in done.err or "uv pip install" in done.err
    assert_promised(done.err, PYTHON=sys.executable, NAME="nowhere_under_test")


def test_an_import_by_a_text_is_told_to_be_included(copy_project: CopyProject, callyard: RunIn) -> None:
    project = copy_project("broken")
    done = callyard(project, "run", "lazy.py", "-", rows='["abc"]\n')
    assert done.status == 2
    assert_promised(done.err, FILE="plugins/**/*.py")
    mended = callyard(project, "run", "lazy.py", "-", "--include", "plugins/**/*.py", rows='["abc"]\n')
    assert mended.results[0].get("output") == "cba", mended.err


def test_a_slow_import(copy_project: CopyProject, callyard: RunIn) -> None:
    project = copy_project("slow")
    late = callyard(project, "run", "model.py", "-", "--start-timeout", "500ms", rows="[1]\n")
    assert late.status == 2
    assert_promised(late.err, MODULE="model", MILLISECONDS="500")
    done = callyard(project, "run", "model.py", "-", rows="[1]\n")
    assert done.results[0].get("output") == 2, done.err


@pytest.mark.parametrize("target", ["tool/parts/cut.py", "tool.parts.cut"])
def test_relative_imports(copy_project: CopyProject, callyard: RunIn, target: str) -> None:
    done = callyard(copy_project("relative"), "run", f"{target}:cut", "-", rows="[3]\n")
    assert done.results[0].get("output") == [15, 15], done.err


def test_a_relative_import_without_a_package(copy_project: CopyProject, callyard: RunIn) -> None:
    project = copy_project("relative")
    done = callyard(project, "run", "loose/part.py", "-", rows="[]\n")
    assert done.status == 2
    assert_promised(done.err)
    as_module = callyard(project, "run", "loose.part", "-", rows="[]\n")
    assert as_module.results[0].get("output") == 7, as_module.err


def test_a_namespace_package(copy_project: CopyProject, callyard: RunIn) -> None:
    project = copy_project("namespace")
    done = callyard(project, "run", "acme.billing.rates:rate", "-", rows='["basic"]\n')
    assert done.results[0].get("output") == "9.00", done.err
    itself = callyard(project, "run", "acme.billing", "-")
    assert itself.status == 2
    assert_promised(itself.err, NAME="acme.billing", LIST="acme.billing.rates, acme.billing.table")
