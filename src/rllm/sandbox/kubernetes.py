"""Sandboxes in a Kubernetes cluster, by `kubectl` and its current context: each is a Job of one pod.

The pod has no service account and no new privileges, and a network policy lets it reach nothing but the gateway, where
the cluster's network enforces policies. The cluster pulls the images; nothing is built. The jobs of this process are
deleted as soon as it has ended, those of others at the next start, and each by the cluster after a day.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rllm._runtime.ids import new_id
from rllm.errors import ConfigError
from rllm.sandbox.base import ExecResult, ImageSource, SandboxBackend, SandboxError, SandboxLimits
from rllm.sandbox.client import ASK_TIMEOUT_S, ClientSandbox, ask, end_of, uncancelled
from rllm.sandbox.owner import has_ended, run_after, this_process
from rllm.sandbox.public_route import gateway_address, public_route
from rllm.types import JSONObject

logger = logging.getLogger(__name__)
_LIMITS = SandboxLimits()
_APP, _NAME, _OWNER = "app=rllm-sandbox", "rllm-sandbox", "rllm-owner"
_START_TIMEOUT_S = 300.0
"""Seconds for a pod to be placed, and its image to be pulled."""
_LIFETIME_S = 86400
_POLL_S = 0.5
_INIT = "while :; do sleep 3600; done"
_FIND_FOLDER = 'folder=${1:-$PWD}; [ "$folder" != / ] || folder=/app; mkdir -p -- "$folder" && echo "$folder"'
_REMOVE_ALL = """
for round in 1 2 3; do kubectl delete job,networkpolicy --selector "$1" --wait=false; sleep 2; done
"""
_FAILURES = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "RunContainerError"}
)


class KubernetesSandbox(ClientSandbox):
    """A pod."""

    def __init__(self, name: str, pod: str) -> None:
        """Represent a pod that runs."""
        self.id = name
        self.workdir = "/"
        self._pod = pod

    def client(
        self, program: Sequence[str], *, cwd: str, env: Mapping[str, str], stdin: bool, as_root: bool = False
    ) -> tuple[Sequence[str], Mapping[str, str] | None]:
        """Return the command line of `kubectl exec`, which always runs as the image's user."""
        options = ["--stdin"] if stdin else []
        variables = [f"{name}={value}" for name, value in env.items()]
        inside = ["env", *variables, "sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", cwd, *program]
        return ["kubectl", "exec", *options, self._pod, "--", *inside], None

    def own_stderr(self, stderr: str) -> str:
        """Return what a command wrote, without the exit code that kubectl adds."""
        before, separator, _ = stderr.rpartition("command terminated with exit code ")
        return before if separator else stderr

    def is_lost(self, result: ExecResult) -> bool:
        """Return whether the exit code may be kubectl's."""
        return result.exit_code == -9 or (result.exit_code == 1 and "error" in result.stderr.lower())

    async def is_running(self) -> bool:
        """Return whether the pod runs."""
        result = await _kubectl("get", "pod", self._pod, "--output", "jsonpath={.status.phase}")
        return result.stdout.strip() == "Running"

    async def open_route(self, url: str) -> str:
        """Return the gateway's public URL of a session."""
        self._check_open()
        return public_route(url, "kubernetes")

    async def close(self) -> None:
        """Delete the job, its pod and its network policy."""
        self.end_reason = self.end_reason or "it was closed"
        await uncancelled(_delete(f"{_NAME}={self.id}"))


class Kubernetes(SandboxBackend):
    """Starts pods."""

    name = "kubernetes"

    def __init__(self) -> None:
        """Start nothing."""
        self._started = False

    def check(self) -> None:
        """Raise `ConfigError` unless kubectl is installed and may make jobs."""
        if not shutil.which("kubectl"):
            raise ConfigError("sandbox=kubernetes: kubectl is not installed; install it, or use sandbox=podman")
        command = ["kubectl", "auth", "can-i", "create", "jobs"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
        if result.returncode:
            reason = (result.stdout + result.stderr).strip().rpartition("\n")[2]
            raise ConfigError(f"sandbox=kubernetes: `{' '.join(command)}` fails ({reason}); see `kubectl config`")

    async def image(self, source: ImageSource) -> str:
        """Return the image's name, which the cluster pulls."""
        if not source.name:
            raise SandboxError(
                f"sandbox=kubernetes builds no images: push that of {source.folder} to a registry of the cluster, and "
                "name it in task.toml: [environment] docker_image"
            )
        return source.name

    async def start(
        self,
        image: str,
        *,
        limits: SandboxLimits = _LIMITS,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        mounts: Mapping[str, Path] | None = None,
    ) -> KubernetesSandbox:
        """Start a pod."""
        if not self._started:
            self._started = True
            run_after(this_process(), _REMOVE_ALL, f"{_OWNER}={_owner()}")
            _warn_of_processes()
            await self.remove_orphans()
        name = f"rllm-{new_id()}"
        try:
            objects = [_policy(name), _job(name, image, limits, env or {})]
            created = await _kubectl("create", "--filename", "-", stdin=json.dumps(_list(objects)))
            if not created.ok:
                raise SandboxError(f"no sandbox of {image} starts: {end_of(created)}")
            sandbox = KubernetesSandbox(name, await _pod_of(name, image))
            found = await sandbox.exec(["sh", "-c", _FIND_FOLDER, "sh", workdir or ""])
            if not found.ok:
                raise SandboxError(f"the folder of a sandbox of {image} cannot be made: {end_of(found)}")
            sandbox.workdir = found.stdout.strip()
            for target, folder in (mounts or {}).items():
                await sandbox.upload(folder, target)
        except BaseException:
            await uncancelled(_delete(f"{_NAME}={name}"))
            raise
        return sandbox

    async def remove_orphans(self) -> int:
        """Delete the jobs of ended processes of this machine."""
        result = await _kubectl("get", "jobs", "--selector", _APP, "--output", "json")
        jobs = [job["metadata"] for job in json.loads(result.stdout or "{}").get("items", ())]
        left = [job["labels"][_NAME] for job in jobs if has_ended(job.get("annotations", {}).get(_OWNER, ""))]
        if left:
            await _delete(f"{_NAME} in ({','.join(left)})")
        return len(left)


async def _kubectl(*arguments: str, stdin: str = "") -> ExecResult:
    return await ask(["kubectl", *arguments], stdin=stdin)


async def _delete(selector: str) -> None:
    result = await _kubectl("delete", "job,networkpolicy", "--selector", selector, "--wait=false")
    if not result.ok:
        logger.warning("Sandboxes may still exist in the cluster: %s", end_of(result))


async def _pod_of(name: str, image: str) -> str:
    """Return the name of a job's pod when it runs."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    reason = "it was not placed"
    while time.monotonic() < deadline:
        found = await _kubectl("get", "pods", "--selector", f"{_NAME}={name}", "--output", "json")
        for pod in json.loads(found.stdout or "{}").get("items", ()) if found.ok else ():
            status = pod.get("status", {})
            states = [state.get("state", {}) for state in status.get("containerStatuses", ())]
            if any("running" in state for state in states):
                return str(pod["metadata"]["name"])
            waiting = [state["waiting"] for state in states if "waiting" in state]
            reason = "; ".join(f"{each.get('reason')}: {each.get('message', '')}" for each in waiting) or reason
            if status.get("phase") == "Failed" or any(each.get("reason") in _FAILURES for each in waiting):
                raise SandboxError(f"no sandbox of {image} starts: {reason}")
        await asyncio.sleep(_POLL_S)
    raise SandboxError(f"no sandbox of {image} started in {_START_TIMEOUT_S:g} s: {reason}")


def _owner() -> str:
    """Return a label of this process; labels are shorter than `this_process()`."""
    return hashlib.sha256(this_process().encode()).hexdigest()[:32]


def _list(items: Sequence[JSONObject]) -> JSONObject:
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}


def _metadata(name: str) -> JSONObject:
    key, value = _APP.split("=")
    return {
        "name": name,
        "labels": {key: value, _NAME: name, _OWNER: _owner()},
        "annotations": {_OWNER: this_process()},
    }


def _policy(name: str) -> JSONObject:
    """Return a network policy; see https://kubernetes.io/docs/concepts/services-networking/network-policies/."""
    address = gateway_address()
    allowed = [{"to": [{"ipBlock": {"cidr": f"{address[0]}/32"}}], "ports": [{"port": address[1]}]}] if address else []
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(name),
        "spec": {
            "podSelector": {"matchLabels": {_NAME: name}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": allowed,
        },
    }


def _job(name: str, image: str, limits: SandboxLimits, env: Mapping[str, str]) -> JSONObject:
    """Return a job; see https://kubernetes.io/docs/concepts/workloads/controllers/job/."""
    container: JSONObject = {
        "name": "sandbox",
        "image": image,
        "command": ["sh", "-c", _INIT],
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "resources": {
            "limits": {
                "cpu": str(limits.cpus),
                "memory": f"{limits.memory_mb}Mi",
                "ephemeral-storage": f"{limits.disk_mb}Mi",
            }
        },
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    pod: JSONObject = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [container],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(name),
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": _LIFETIME_S,
            "ttlSecondsAfterFinished": 60,
            "template": {"metadata": {"labels": _metadata(name)["labels"]}, "spec": pod},
        },
    }


@functools.cache
def _warn_of_processes() -> None:
    logger.warning("sandbox=kubernetes: max_processes is the cluster's, see the kubelet's setting podPidsLimit")
