"""The programs and names of docs/scaling.md work; the manifests have the fields of KubeRay's API."""

from __future__ import annotations

import re
import shlex
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from rllm.cli import app
from rllm.trainer.config import TrainConfig, load_config

from . import kuberay
from .conftest import RunTrainer

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "scaling.md").read_text()
MANIFESTS = ROOT / "examples" / "kubernetes"
COMMANDS = re.findall(r"rllm train .*", TEXT)


@pytest.mark.parametrize("setting", sorted(set(re.findall(r"`((?:ray|rollout|gateway)\.\w+)[`=]", TEXT))))
def test_documented_settings_exist(setting: str) -> None:
    attrgetter(setting)(TrainConfig())


def test_ray_settings_are_documented() -> None:
    assert [name for name in type(TrainConfig().ray).model_fields if f"ray.{name}" not in TEXT] == []


def check_command(command: str) -> None:
    _, name, agent, *words = shlex.split(command)
    known = get_command(app).get_command(None, name)  # type: ignore[attr-defined]
    options = {option for parameter in known.params for option in parameter.opts}
    assert agent == "agent.py:agent"
    assert {word for word in words if word.startswith("--")} <= options
    load_config([word for word in words if "=" in word])


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands_exist(command: str) -> None:
    check_command(command)


def test_documented_agent_trains(run_trainer: RunTrainer) -> None:
    pytest.importorskip("openai")
    found = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    exec(found[1], names)
    run = run_trainer(agent=lambda word, base_url: names["agent"](question=word, answer="i", base_url=base_url))
    assert len(run.words) == 12


def documents() -> list[Any]:
    return [item for path in sorted(MANIFESTS.glob("*.yaml")) for item in yaml.safe_load_all(path.read_text())]


@pytest.mark.parametrize("document", documents(), ids=lambda document: document["kind"])
def test_manifests_have_the_documented_fields(document: Any) -> None:
    schema = kuberay.SCHEMAS[document["apiVersion"], document["kind"]]
    assert re.fullmatch(r"[a-z0-9-]+", document["metadata"]["name"])
    assert list(kuberay.problems(document["spec"], schema)) == []
    assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}


def test_errors_in_a_manifest_are_found() -> None:
    pod = {"spec": {"containers": [{"name": "ray", "resources": {"limits": {"cpu": 8, "memory": "64 gigabytes"}}}]}}
    wrong = {
        "rayVersion": 2.6,
        "authOptions": {"mode": "none"},
        "headGroupSpec": {"rayStartParams": {"num-cpus": 0}, "template": pod},
        "workerGroupSpecs": [{"groupname": "a", "minReplicas": "1"}],
    }
    assert sorted(kuberay.problems(wrong, kuberay.CLUSTER)) == [
        "spec.authOptions.mode='none' is no word of disabled, token",
        "spec.headGroupSpec.rayStartParams.num-cpus=0 is no str",
        "spec.headGroupSpec.template.spec.containers[0].resources.limits.memory='64 gigabytes' is no quantity",
        "spec.rayVersion=2.6 is no str",
        "spec.workerGroupSpecs[0].groupName is missing",
        "spec.workerGroupSpecs[0].groupname is unknown",
        "spec.workerGroupSpecs[0].maxReplicas is missing",
        "spec.workerGroupSpecs[0].minReplicas='1' is no int",
        "spec.workerGroupSpecs[0].template is missing",
    ]


def test_manifests_are_consistent() -> None:
    cluster, claim, job = documents()
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    check_command(job["spec"]["entrypoint"])
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    assert all(group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] for group in groups[1:])
    for pod in pods:
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert len({container["image"] for pod in pods for container in pod["containers"]}) == 1
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"]).keys() == {"working_dir", "env_vars"}
    version = cluster["spec"]["rayVersion"]
    assert f"rayproject/ray:{version}-" in (MANIFESTS / "Dockerfile").read_text()
