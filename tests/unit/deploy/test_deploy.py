"""Dockerfile and Kubernetes manifest say what the server does."""

from __future__ import annotations

import json
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from callyard.cli.app import app
from callyard.serve.config import Address, ServeConfig
from callyard.worker.config import WorkerConfig

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
OBJECTS: dict[str, dict[str, Any]] = {
    one["kind"]: one for one in yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())
}
POD = OBJECTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
LEAVES_S = 5
"""The server is gone 2 s after its drain deadline; the rest is for a slow machine."""


def parse(arguments: list[str]) -> dict[str, Any]:
    """As `callyard serve` does. Raises what it would refuse."""
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    found: dict[str, Any] = command.make_context("serve", list(arguments)).params
    return found


def instruction(name: str) -> str:
    """The last one of its name, on one line."""
    joined = DOCKERFILE.replace("\\\n", " ")
    return str(re.findall(rf"^{name} (.*)$", joined, re.M)[-1])


@pytest.mark.requirement("D46")
def test_the_grace_period_is_the_drain_and_five_seconds() -> None:
    drain_ms = parse(CONTAINER["args"])["drain"]
    assert drain_ms == ServeConfig().drain_deadline_ms
    assert POD["terminationGracePeriodSeconds"] == drain_ms // 1_000 + LEAVES_S
    assert f"--stop-timeout {drain_ms // 1_000 + LEAVES_S}" in DOCKERFILE


def test_probes_ask_the_admin_port() -> None:
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    arguments = parse(CONTAINER["args"])
    assert Address.parse(arguments["http"]).port == ports["http"]
    assert Address.parse(arguments["admin"]).port == ports["admin"]
    for probe, path in (("startupProbe", "/readyz"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        assert CONTAINER[probe]["httpGet"] == {"path": path, "port": "admin"}
    annotations = OBJECTS["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["admin"])
    assert OBJECTS["Service"]["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": "http"}]
    assert OBJECTS["Service"]["spec"]["selector"].items() <= OBJECTS["Deployment"]["metadata"]["labels"].items()


def test_a_slow_import_is_no_failed_start() -> None:
    startup = CONTAINER["startupProbe"]
    worker = WorkerConfig()
    longest_s = (worker.start_timeout_ms + worker.attach_timeout_ms) / 1_000
    assert startup["periodSeconds"] * startup["failureThreshold"] >= longest_s
    assert f"--start-period={longest_s:.0f}s" in DOCKERFILE


def test_it_runs_as_nobody_who_may_write_nothing_but_its_volumes() -> None:
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert POD["automountServiceAccountToken"] is False
    inside = CONTAINER["securityContext"]
    assert inside == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    user = f"{POD['securityContext']['runAsUser']}:{POD['securityContext']['runAsGroup']}"
    assert instruction("USER") == user
    assert not user.startswith("0")
    mounts = {mount["name"]: mount for mount in CONTAINER["volumeMounts"]}
    assert {name for name, mount in mounts.items() if not mount.get("readOnly")} == {"state", "tmp"}
    assert mounts["state"]["mountPath"] == instruction("VOLUME") == str(parse(CONTAINER["args"])["state_dir"])
    assert set(mounts) == {volume["name"] for volume in POD["volumes"]}


def test_resources_are_bounded() -> None:
    assert set(CONTAINER["resources"]["limits"]) == {"cpu", "memory"}
    assert set(CONTAINER["resources"]["requests"]) == {"cpu", "memory"}


def test_the_settings_in_the_secret_are_right(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(OBJECTS["Secret"]["stringData"]["serve.toml"])
    config = ServeConfig.read(file).with_settings(http=Address.parse(parse(CONTAINER["args"])["http"]))
    assert OBJECTS["Service"]["metadata"]["name"] in config.allowed_hosts
    assert list(config.tokens) == ["example"]
    compile(OBJECTS["ConfigMap"]["data"]["functions.py"], "functions.py", "exec")


def test_one_replica_while_the_keys_are_on_one_volume() -> None:
    spec = OBJECTS["Deployment"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_the_image_runs_the_same_command() -> None:
    assert json.loads(instruction("ENTRYPOINT")) == ["callyard", "serve"]
    image, manifest = parse(json.loads(instruction("CMD"))), parse(CONTAINER["args"])
    for name in ("target", "http", "admin", "state_dir", "config", "log_format"):
        assert image[name] == manifest[name], name


def test_the_image_is_checked_by_its_admin_port() -> None:
    command = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
    assert command[:2] == ["python", "-c"]
    compile(command[2], "healthcheck", "exec")
    assert f"127.0.0.1:{Address.parse(parse(json.loads(instruction('CMD')))['admin']).port}/livez" in command[2]


def test_the_image_names_no_registry_and_has_what_it_copies() -> None:
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.M) == ["python:${PYTHON}"] * 2
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M):
        for source in shlex.split(line)[:-1]:
            assert (ROOT / source).exists()
            assert any(fnmatch(source, pattern) for pattern in allowed), source
