"""The Job of docs/kubernetes.md: what it starts is a command of ours, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.cli import parse

PAGE = (Path(__file__).parent.parent / "docs" / "kubernetes.md").read_text()


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@pytest.fixture(scope="module")
def pod(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["template"]["spec"]
    return found


def test_the_schema_of_kubernetes_accepts_it(job: dict[str, Any]) -> None:
    reason = "no schema: pip install kubernetes-validate"
    kubernetes = pytest.importorskip("kubernetes_validate", reason=reason)
    kubernetes.validate(job, kubernetes.latest_version(), strict=True)
    job["spec"]["paralelism"] = job["spec"]["parallelism"]
    with pytest.raises(kubernetes.ValidationError, match="paralelism"):
        kubernetes.validate(job, kubernetes.latest_version(), strict=True)
    del job["spec"]["paralelism"]


def test_its_command_joins_with_the_key_of_the_secret(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    program, *arguments = container["command"]
    told = parse(arguments)
    assert program == "fresco" and told.call == "launch.commands.join:join"
    assert f"fresco join {told.head}" in PAGE, "the address that the run prints"

    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    folder, _, file = told.key.rpartition("/")
    (name,) = [name for name, path in mounts.items() if path == folder]
    secret = volumes[name]["secret"]["secretName"]
    assert f"kubectl create secret generic {secret} --from-file={file}=" in PAGE
    assert mounts["shm"] == "/dev/shm" and f"runs={mounts['runs']} " in PAGE


def test_there_is_one_pod_a_node_and_one_machine_of_the_run_for_each(job: dict[str, Any], pod: dict[str, Any]) -> None:
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchLabels"] == job["spec"]["template"]["metadata"]["labels"]
    count = job["spec"]["parallelism"]
    assert count == job["spec"]["completions"] and f"cluster.nodes={count} " in PAGE
    assert pod["restartPolicy"] == "Never", "a pod that has ended well is not wanted again"
