"""Sandboxes in a Kubernetes cluster, by `kubectl` and its current context: each is a Job of one pod.

The pod has no service account and no new privileges, and a network policy lets it reach nothing but the gateway, if
the cluster's network enforces policies. The cluster pulls the images; nothing is built. The jobs of this process are
deleted as soon as it has ended, other processes' jobs at the next start, and each by the cluster after a day.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence

from rllm._runtime.ids import new_id
from rllm.errors import ConfigError
from rllm.sandbox.base import ExecResult, SandboxBackend, SandboxError, SandboxSpec
from rllm.sandbox.client import ASK_TIMEOUT_S, FIND_FOLDER, MARK, ClientSandbox, ask, end_of, uncancelled
from rllm.sandbox.owner import has_ended, run_after, this_process
from rllm.sandbox.route import gateway_address, public_route

logger = logging.getLogger(__name__)
_APP, _NAME, _OWNER = "app=rllm-sandbox", "rllm-sandbox", "rllm-owner"
_START_TIMEOUT_S = 300.0
"""Seconds for a pod to be placed, and its image to be pulled."""
_POLL_S = 0.5
_REMOVE_ALL = """
for round in 1 2 3; do kubectl delete job,networkpolicy --selector "$1" --wait=false; sleep 2; done
"""
_READ_VARIABLES = """
variables=
while IFS= read -r line && [ "$line" != "$1" ]; do variables="$variables$line
"; done
eval "$variables"
unset variables line
"""
"""A shell reads a pipe byte by byte, so the rest of the input is left for the command."""
_IN_FOLDER = 'cd "$2" && shift 2 && exec "$@"'
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
        mark = env.get(MARK, "")
        script = (_READ_VARIABLES if self.stdin_of_client(env) else "") + _IN_FOLDER
        inside = ["env", f"{MARK}={mark}", "sh", "-c", script, "sh", mark, cwd, *program]
        return ["kubectl", "exec", *options, self._pod, "--", *inside], None

    def stdin_of_client(self, env: Mapping[str, str]) -> str:
        """Return variables as lines of a shell, and the mark as the last one: other users can see command lines."""
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in env.items() if name != MARK]
        return "".join([*lines, f"{env[MARK]}\n"]) if lines else ""

    def own_stderr(self, stderr: str) -> str:
        before, separator, _ = stderr.rpartition("command terminated with exit code ")
        return before if separator else stderr

    def is_lost(self, result: ExecResult) -> bool:
        return result.exit_code == -9 or (result.exit_code == 1 and "error" in result.stderr.lower())

    async def is_running(self) -> bool:
        result = await _kubectl("get", "pod", self._pod, "--output", "jsonpath={.status.phase}")
        return result.stdout.strip() == "Running"

    async def open_route(self, url: str) -> str:
        self._check_open()
        return public_route(url, "kubernetes")

    async def close(self) -> None:
        self.end_reason = self.end_reason or "it was closed"
        await uncancelled(_delete(f"{_NAME}={self.id}"))


class Kubernetes(SandboxBackend):
    """Starts pods."""

    name = "kubernetes"

    def check(self) -> None:
        if not shutil.which("kubectl"):
            raise ConfigError("sandbox=kubernetes: kubectl is not installed; install it, or use sandbox=podman")
        command = ["kubectl", "auth", "can-i", "create", "jobs"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
        if result.returncode:
            reason = (result.stdout + result.stderr).strip().rpartition("\n")[2]
            raise ConfigError(f"sandbox=kubernetes: `{' '.join(command)}` fails ({reason}); see `kubectl config`")

    async def prepare(self) -> None:
        run_after(this_process(), _REMOVE_ALL, f"{_OWNER}={_owner()}")
        logger.warning("sandbox=kubernetes: max_processes has no effect: set podPidsLimit of the cluster's kubelets")
        await super().prepare()

    async def launch(self, spec: SandboxSpec) -> KubernetesSandbox:
        name = f"rllm-{new_id()}"
        try:
            created = await _kubectl("create", "--filename", "-", stdin=_objects(name, spec))
            if not created.ok:
                raise SandboxError(f"a sandbox of {spec.image} cannot be started: {end_of(created)}")
            sandbox = KubernetesSandbox(name, await _pod_of(name, spec.image))
            found = await sandbox.exec(["sh", "-c", FIND_FOLDER, "sh", spec.workdir or ""])
            if not found.ok:
                raise SandboxError(f"the folder of a sandbox of {spec.image} cannot be made: {end_of(found)}")
            sandbox.workdir = found.stdout.strip()
            for target, folder in spec.mounts.items():
                await sandbox.upload(folder, target)
        except BaseException:
            await uncancelled(_delete(f"{_NAME}={name}"))
            raise
        return sandbox

    async def remove_orphans(self) -> int:
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
        logger.warning("sandboxes may still exist in the cluster: %s", end_of(result))


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
                raise SandboxError(f"a sandbox of {image} cannot be started: {reason}")
        await asyncio.sleep(_POLL_S)
    raise SandboxError(f"a sandbox of {image} did not start within {_START_TIMEOUT_S:g} s: {reason}")


def _owner() -> str:
    """Return a label of this process; labels are shorter than `this_process()`."""
    return hashlib.sha256(this_process().encode()).hexdigest()[:32]


# JSON is YAML. See https://kubernetes.io/docs/concepts/services-networking/network-policies/ and
# https://kubernetes.io/docs/concepts/workloads/controllers/job/.
_OBJECTS = """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {metadata}
spec:
  podSelector: {{matchLabels: {labels}}}
  policyTypes: [Ingress, Egress]
  ingress: []
  egress: {egress}
---
apiVersion: batch/v1
kind: Job
metadata: {metadata}
spec:
  backoffLimit: 0
  activeDeadlineSeconds: 86400
  ttlSecondsAfterFinished: 60
  template:
    metadata: {{labels: {labels}}}
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 0
      automountServiceAccountToken: false
      enableServiceLinks: false
      containers:
        - name: sandbox
          image: {image}
          command: [sh, -c, "while :; do sleep 3600; done"]
          env: {env}
          resources: {{limits: {{cpu: "{cpus}", memory: {memory_mb}Mi, ephemeral-storage: {disk_mb}Mi}}}}
          securityContext: {{allowPrivilegeEscalation: false}}
"""


def _objects(name: str, spec: SandboxSpec) -> str:
    """Return the network policy and the job of a sandbox."""
    key, value = _APP.split("=")
    labels = {key: value, _NAME: name, _OWNER: _owner()}
    address = gateway_address()
    allowed = [{"to": [{"ipBlock": {"cidr": f"{address[0]}/32"}}], "ports": [{"port": address[1]}]}] if address else []
    return _OBJECTS.format(
        metadata=json.dumps({"name": name, "labels": labels, "annotations": {_OWNER: this_process()}}),
        labels=json.dumps(labels),
        egress=json.dumps(allowed),
        image=json.dumps(spec.image),
        env=json.dumps([{"name": name, "value": value} for name, value in spec.env.items()]),
        cpus=spec.limits.cpus,
        memory_mb=spec.limits.memory_mb,
        disk_mb=spec.limits.disk_mb,
    )
