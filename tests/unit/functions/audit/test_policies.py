"""Policies in words and as Python values, the external command, and the log."""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import sys
from pathlib import Path
from threading import Event, Timer

import pytest

from callyard.errors import UsageError
from callyard.functions.audit.command import run_command
from callyard.functions.audit.log import AuditLog, AuditRecord, now_text
from callyard.functions.audit.policies import (
    AllowPolicy,
    AstPolicy,
    BundleView,
    CallablePolicy,
    CommandPolicy,
    audit_id_of,
    parse_policy,
    read_answer,
    to_policy,
)
from callyard.functions.audit.verdict import REASONS_MAX, NoVerdict, Verdict, cut_reasons
from callyard.functions.bundle import Bundle
from callyard.ids import Digest
from tests.e2e.processes import is_alive, wait_until

pytestmark = pytest.mark.requirement("X41")


def view(files: dict[str, bytes] | None = None, folder: Path = Path("/nowhere")) -> BundleView:
    files = files or {"tools.py": b"import subprocess\n"}
    return BundleView(digest=Digest("d" * 64), target="tools.py", files=files, folder=folder)


# --- in words -----------------------------------------------------------------------------------------------------


def test_in_words() -> None:
    assert isinstance(parse_policy("allow"), AllowPolicy)
    assert parse_policy("ast").policy_id == AstPolicy().policy_id
    strict = parse_policy("ast: deny=requests,httpx allow=subprocess native")
    assert strict.policy_id != AstPolicy().policy_id
    assert strict.judge(view(), Event()) == Verdict(accepted=True)
    refused = strict.judge(view({"tools.py": b"import httpx\n", "x.so": b""}), Event())
    assert refused == Verdict(accepted=False, reasons=("tools.py:1: imports httpx, which is denied",))
    command = parse_policy("cmd: ./review.sh --level 'very high'")
    assert isinstance(command, CommandPolicy)
    assert command.argv == ("./review.sh", "--level", "very high")


@pytest.mark.parametrize(
    "text", ["", "deny", "allow: x", "ast: requests", "ast: deny", "cmd:", "cmd: 'open", "ast: deny=os.*"]
)
def test_bad_words(text: str) -> None:
    with pytest.raises(UsageError):
        parse_policy(text)


def test_as_values() -> None:
    assert to_policy(None) is None
    policy = AstPolicy()
    assert to_policy(policy) is policy
    assert isinstance(to_policy(["./review.sh"]), CommandPolicy)
    assert isinstance(to_policy(lambda bundle: True), CallablePolicy)
    for wrong in (5, [], [""], object()):
        with pytest.raises(UsageError, match="audit"):
            to_policy(wrong)


def test_bundle_view_names_its_target(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "tools.py").write_text("def f(): ...\n")
    bundle = Bundle.collect(tmp_path / "pkg" / "tools.py")
    seen = BundleView.of(bundle, tmp_path)
    assert (seen.target, seen.digest, seen.folder) == ("pkg/tools.py", bundle.digest, tmp_path)
    assert set(seen.files) == {"pkg/__init__.py", "pkg/tools.py"}


# --- callables ----------------------------------------------------------------------------------------------------


def test_answers_of_callables() -> None:
    assert read_answer(True) == Verdict(accepted=True)
    assert not read_answer(False).accepted
    for forgotten in (None, 1, "yes", ["reason"]):
        with pytest.raises(NoVerdict, match="expected a Verdict or a bool"):
            read_answer(forgotten)


async def test_async_callables_are_seen() -> None:
    async def judge(bundle: BundleView, strict: bool = False) -> bool:
        return not strict

    class Judge:
        async def __call__(self, bundle: BundleView) -> Verdict:
            return Verdict(accepted=False, reasons=("no",))

    for judged, accepted in ((judge, True), (functools.partial(judge, strict=True), False), (Judge(), False)):
        policy = CallablePolicy(judged)
        assert policy.is_async
        answer = policy.judge(view(), Event())
        assert not isinstance(answer, Verdict)
        assert (await answer).accepted is accepted
    with pytest.raises(NoVerdict, match="async def"):
        CallablePolicy(lambda bundle: judge(bundle)).judge(view(), Event())


def test_ids_tell_policies_and_bundles_apart() -> None:
    ids = {
        audit_id_of(policy, Digest(digest))
        for policy in (AllowPolicy(), AstPolicy(), AstPolicy(native=True), CommandPolicy(["a"]))
        for digest in ("1", "2")
    }
    assert len(ids) == 8
    assert all(len(audit_id) == 22 and audit_id.startswith("audit-") for audit_id in ids)


# --- the command --------------------------------------------------------------------------------------------------


def command(source: str, folder: Path = Path("/nowhere"), stop: Event | None = None) -> Verdict:
    return run_command([sys.executable, "-I", "-c", source, str(folder)], stop or Event())


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        ("", Verdict(accepted=True)),
        ("print('All checks passed!')", Verdict(accepted=True)),
        ("""print('{"results": []}')""", Verdict(accepted=True)),
        ("""print('{"verdict": "accept"}')""", Verdict(accepted=True)),
        ("""print('{"verdict": "refuse", "reasons": ["a", "b"]}')""", Verdict(accepted=False, reasons=("a", "b"))),
        (
            """print('{"verdict": "refuse", "reasons": ["a"]}'); exit(1)""",
            Verdict(accepted=False, reasons=("a",)),
        ),
        (
            "print('tools.py:1: bad\\n\\ntools.py:2: worse'); exit(1)",
            Verdict(accepted=False, reasons=("tools.py:1: bad", "tools.py:2: worse")),
        ),
        ("import sys; print('hm', file=sys.stderr); exit(1)", Verdict(accepted=False, reasons=("hm",))),
    ],
)
def test_verdicts_of_a_command(source: str, verdict: Verdict) -> None:
    assert command(source) == verdict


def test_a_command_that_contradicts_itself_refuses() -> None:
    assert not command("""print('{"verdict": "accept"}'); exit(1)""").accepted
    assert command("exit(1)").reasons == (f"refused by {sys.executable}",)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys; print('no licence', file=sys.stderr); exit(2)", "ended with status 2.*no licence"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by signal 9"),
        ("""print('{"verdict": "perhaps"}')""", "cannot be read"),
        ("""print('{"verdict": ')""", "cannot be read"),
    ],
)
def test_no_verdict_of_a_command(source: str, message: str) -> None:
    with pytest.raises(NoVerdict, match=message):
        command(source)


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(NoVerdict, match="cannot be started"):
        run_command(["/nowhere/review"], Event())


def test_the_folder_is_the_last_argument(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("x")
    policy = CommandPolicy(
        [sys.executable, "-I", "-c", "import os, sys; exit('tools.py' not in os.listdir(sys.argv[1]))"]
    )
    assert policy.judge(view(folder=tmp_path), Event()) == Verdict(accepted=True)


def test_a_flood_is_cut() -> None:
    verdict = command("import sys\nfor i in range(100_000): print('reason', i)\nexit(1)")
    assert not verdict.accepted
    assert len(verdict.reasons) == REASONS_MAX + 1


def test_a_stopped_command_dies_with_its_group(tmp_path: Path) -> None:
    source = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-I', '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1] + '/new', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "os.rename(sys.argv[1] + '/new', sys.argv[1] + '/pids')\n"
        "time.sleep(600)\n"
    )
    stop = Event()

    def stop_when_started() -> None:
        wait_until((tmp_path / "pids").exists, "the command started")
        stop.set()

    Timer(0, stop_when_started).start()
    with pytest.raises(NoVerdict, match="stopped"):
        command(source, tmp_path, stop)
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        wait_until(lambda pid=pid: not is_alive(pid), f"process {pid} gone")  # type: ignore[misc]


def test_a_grandchild_that_holds_the_pipe_is_not_waited_for(tmp_path: Path) -> None:
    source = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-I', '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1] + '/pid', 'w').write(str(child.pid))\n"
    )
    assert command(source, tmp_path) == Verdict(accepted=True)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid), "the grandchild gone")


# --- the log ------------------------------------------------------------------------------------------------------


def record(reason: str = "") -> AuditRecord:
    return AuditRecord(
        time=now_text(),
        audit="audit-1",
        digest=Digest("d"),
        target="tools.py",
        policy="ast",
        verdict="refused" if reason else "accepted",
        reasons=(reason,) if reason else (),
    )


def test_one_line_per_verdict(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.append(record("tools.py:1: \n bad"))
    AuditLog(path).append(record())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["verdict"] for line in lines] == ["refused", "accepted"]
    assert list(lines[0]) == ["time", "audit", "digest", "target", "policy", "verdict", "reasons"]
    assert lines[0]["time"].endswith("Z")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_line_that_a_crash_cut_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    AuditLog(path).append(record())
    whole = path.read_bytes()
    for cut in (1, 5, 20, len(whole) - 1):
        path.write_bytes(whole + whole[:cut])
        AuditLog(path)
        assert path.read_bytes() == whole
    path.write_bytes(whole[:7])
    AuditLog(path)
    assert path.read_bytes() == b""


def test_a_full_disk_leaves_nothing_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.append(record())
    whole = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, limits[1]))
    try:
        with pytest.raises(UsageError, match="cannot be written"):
            log.append(record())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == whole
    log.append(record())
    assert len(path.read_bytes().splitlines()) == 2


def test_a_file_of_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary")
    with pytest.raises(UsageError, match="does not end with a line of an audit log"):
        AuditLog(path)
    assert path.read_text() == "dear diary"
    for wrong in (tmp_path, tmp_path / "none" / "audit.jsonl"):
        with pytest.raises(UsageError, match="cannot be written"):
            AuditLog(wrong)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        AuditLog(tmp_path / "pipe")


def test_reasons_are_cut() -> None:
    assert cut_reasons(("a" * 1_000,)) == ("a" * 500 + "…",)
    assert cut_reasons(("r",) * 105) == (*("r",) * 100, "and 5 more")
