"""Tasks in sandboxes on two nodes, which do not see the folders of the driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.append(str(Path(__file__).parent))
import ray_tasks
from ray_project import lines, settings, until

from rllm.errors import ConfigError
from rllm.sandbox import open_backend
from rllm.sandbox.control_groups import left_groups

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

STORE_BYTES = 80 * 2**20
DEBIAN = "localhost/debian-min"
"""Made by `tests/sandbox/install.py`."""
OWN_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{0}/containers"
runroot = "{0}/run"
[storage.options]
additionalimagestores = ["/var/lib/containers/storage"]
"""
OWN_VIEW = 'hostname "$1" && mount -t tmpfs none "$2" && shift 2 && exec "$@"'
"""Run by `unshare`: another name of the machine, and an empty folder in the place of the driver's."""
TASK = {
    "task.toml": "",
    "instruction.md": "Write the word yes to the file done.\n",
    "environment/Dockerfile": f"FROM {DEBIAN}\nWORKDIR /app\nCOPY notes.db .\n",
    "environment/notes.db": "one\n",
    "tests/test.sh": "#!/bin/sh\ngrep -q yes /app/done && grep -q one /app/notes.db\n"
    "echo $((1 - $?)) > /logs/verifier/reward.txt\n",
}
CLEAN = """
import asyncio, sys
from rllm.sandbox import open_backend
from rllm.sandbox.owner import own_folder

async def main(backend, image):
    async with await open_backend(backend).start(image):
        own_folder()

asyncio.run(main(*sys.argv[1:]))
"""


@dataclass(kw_only=True)
class Node:
    """A node of the cluster with its own view of this machine."""

    name: str
    home: Path
    hidden: Path
    process: subprocess.Popen[bytes] | None = None
    temporary: Path = field(init=False)

    def __post_init__(self) -> None:
        self.temporary = self.home / "tmp"
        self.temporary.mkdir(parents=True)
        (self.home / "storage.conf").write_text(OWN_STORAGE.format(self.home))

    def run(self, *command: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
        view = ["unshare", "--mount", "--uts", "sh", "-c", OWN_VIEW, "sh", self.name, str(self.hidden)]
        own = {"HOME": self.home, "TMPDIR": self.temporary, "RLLM_CACHE": self.home / "cache"}
        own["CONTAINERS_STORAGE_CONF"] = self.home / "storage.conf"
        env = {**os.environ, **{name: str(path) for name, path in own.items()}}
        return subprocess.Popen([*view, *command], env=env, stdout=stdout)

    def clean(self, backend: str = "local", image: str = "host") -> None:
        """Start and close a sandbox in a new process, which removes what other ones have left."""
        assert self.run(sys.executable, "-c", CLEAN, backend, image).wait() == 0

    def start(self, address: str) -> None:
        """Join the cluster; a busy machine may need several tries, since Ray waits no longer than 30 seconds."""
        import ray

        joining = ["start", "--address", address, "--block", "--num-cpus=1", f"--object-store-memory={STORE_BYTES}"]
        for _ in range(3):
            self.process = self.run(sys.executable, "-m", "ray.scripts.scripts", *joining)
            until(lambda: self.process.poll() is not None or self._is_alive(ray))
            if self.is_running:
                return
        raise AssertionError(f"{self.name} does not start")

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def _is_alive(self, ray: Any) -> bool:
        return any(node["Alive"] and node["NodeManagerHostname"] == self.name for node in ray.nodes())

    def kill(self) -> None:
        """Kill all processes of the node, as if the machine lost its power."""
        found: set[psutil.Process] = set()
        # Suspended first, so that none reacts to the end of others; some may be started meanwhile.
        while new := self._members() - found:
            for process in new:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            found |= new
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def _members(self) -> set[psutil.Process]:
        first = psutil.Process(self.process.pid)
        lines = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
        cleaners = {process for process, line in lines if "rllm-sandboxes" in line and self.name in line[-1]}
        return {first, *first.children(recursive=True), *cleaners}

    @property
    def groups(self) -> list[Path]:
        return [group for group in left_groups() if f"-{self.name}:" in group.name]

    @property
    def processes(self) -> list[str]:
        """Processes in sandboxes of the node."""
        return [line for group in self.groups for file in group.rglob("cgroup.procs") for line in read_lines(file)]

    @property
    def containers(self) -> list[str]:
        output, _ = self.run("podman", "ps", "--all", "--quiet", stdout=subprocess.PIPE).communicate(timeout=60)
        return output.decode().split()

    @property
    def folders(self) -> list[Path]:
        return list(self.temporary.glob("rllm-*"))


def read_lines(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver's folder: its cache, its tasks and the project with the agent."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can give nodes their own view of the machine")
    try:
        open_backend("local")
    except ConfigError as error:
        pytest.skip(str(error))
    return tmp_path_factory.mktemp("driver")


@pytest.fixture(scope="module")
def started(hidden: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Node]]]:
    """A head that runs nothing, and two nodes that have not started."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    homes = tmp_path_factory.mktemp("nodes")
    nodes = [Node(name=f"node-{name}", home=homes / name, hidden=hidden) for name in "ab"]
    try:
        yield cluster.address, nodes
    finally:
        for node in nodes:
            if node.is_running:
                node.kill()
        cluster.shutdown()


@pytest.fixture
def cluster(started: tuple[str, list[Node]]) -> tuple[str, list[Node]]:
    """The address of the cluster, and its nodes, which run."""
    import ray

    address, nodes = started
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        for node in nodes:
            if not node.is_running:
                until(lambda node=node: not node._is_alive(ray))
                node.start(address)
    finally:
        ray.shutdown()
    return address, nodes


@pytest.fixture
def project(hidden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with an agent that `tmp_path / "hold"` stops, and tasks beside it."""
    root = hidden / "project"
    agent = ray_tasks.AGENT.replace("HOLD", repr(str(tmp_path / "hold")))
    for path, text in {f"tasks/{name}/{path}": text for name in ("one", "two") for path, text in TASK.items()}.items():
        (hidden / path).parent.mkdir(parents=True, exist_ok=True)
        (hidden / path).write_text(text)
    (root / "agents").mkdir(parents=True)
    (root / "agents/solver.py").write_text(agent)
    monkeypatch.chdir(root)
    monkeypatch.setenv("RLLM_CACHE", str(hidden / "cache"))
    yield root
    shutil.rmtree(root)


def driver(address: str, tasks: str, num_rollouts: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(ray_tasks.__file__)), address, tasks, str(num_rollouts)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_run_trains_on_a_folder_and_is_evaluated_on_a_repository(
    cluster: tuple[str, list[Node]], project: Path, hidden: Path, model_folder: Path, tmp_path: Path
) -> None:
    repository = shutil.copytree(hidden / "tasks", hidden / "repository")
    for command in ("init -q", "add -A", "-c user.name=a -c user.email=a@b.c commit -qm tasks"):
        subprocess.run(["git", "-C", str(repository), *command.split()], check=True)
    run = settings(model_folder, tmp_path / "run", "num_steps=1", "eval.every=1", "eval.num_rollouts=1")
    on_nodes = ["rollout.runner=ray", f"ray.address={cluster[0]}"]
    named = ["--env", f"tasks:{hidden}/tasks?agent=agents/solver.py:solve", "--val", f"tasks:file://{repository}"]
    done = subprocess.run(
        [sys.executable, "-m", "rllm", "train", *named, *run, *on_nodes], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    logged = {name: value for line in lines(tmp_path / "run") for name, value in line.items()}
    assert logged["rollout/num_failed"] == 0
    assert logged["rollout/reward"] == 1.0
    for node in cluster[1]:
        assert list((node.home / "cache/sandboxes").iterdir()), "each node has built the image itself"
        until(lambda node=node: not node.folders)


def test_killed_driver_leaves_no_sandboxes(cluster: tuple[str, list[Node]], project: Path, tmp_path: Path) -> None:
    address, nodes = cluster
    (tmp_path / "hold").touch()
    process = driver(address, "tasks:shell?size=4&agent=agents/solver.py:solve", 4)
    until(lambda: all(node.processes and node.folders for node in nodes) or process.poll() is not None)
    assert process.poll() is None
    process.kill()
    until(lambda: not any(node.processes or node.folders for node in nodes))
    for node in nodes:
        node.clean()
        assert not node.groups


def test_killed_node_leaves_no_sandboxes_and_its_rollouts_run_elsewhere(
    cluster: tuple[str, list[Node]], project: Path, hidden: Path, tmp_path: Path
) -> None:
    address, nodes = cluster
    (tmp_path / "hold").touch()
    process = driver(address, f"tasks:{hidden}/tasks?agent=agents/solver.py:solve", 6)
    until(lambda: all(node.processes and node.folders for node in nodes) or process.poll() is not None)
    assert process.poll() is None
    lost, survivor = nodes
    lost.kill()
    until(lambda: not lost.processes)
    (tmp_path / "hold").unlink()
    output, _ = process.communicate(timeout=500)
    episodes = [json.loads(line) for line in output.splitlines() if line.startswith('["task-')]  # Ray prints, too
    assert episodes == [[f"task-{number}", False, True, None] for number in range(6)]
    until(lambda: not survivor.folders)
    assert lost.folders, "files of rollouts that were under way"
    lost.clean()
    until(lambda: not lost.folders)
    assert not lost.groups


def test_killed_node_leaves_no_containers(
    cluster: tuple[str, list[Node]], project: Path, hidden: Path, tmp_path: Path
) -> None:
    if shutil.which("podman") is None or subprocess.run(["podman", "image", "exists", DEBIAN]).returncode:
        pytest.skip(f"podman has no image {DEBIAN}: run python tests/sandbox/install.py")
    address, (survivor, lost) = cluster
    (tmp_path / "hold").touch()
    process = driver(address, f"tasks:{hidden}/tasks?agent=agents/solver.py:solve&sandbox=podman", 6)
    until(lambda: (survivor.containers and lost.containers) or process.poll() is not None)
    assert process.poll() is None
    lost.kill()
    (tmp_path / "hold").unlink()
    output, _ = process.communicate(timeout=500)
    episodes = [json.loads(line) for line in output.splitlines() if line.startswith('["task-')]
    assert episodes == [[f"task-{number}", False, True, None] for number in range(6)]
    until(lambda: not survivor.containers)
    lost.clean("podman", DEBIAN)
    until(lambda: not lost.containers)


def test_error_names_the_node_without_bubblewrap(cluster: tuple[str, list[Node]], project: Path, hidden: Path) -> None:
    with pytest.raises(ConfigError, match=r"node \S+ cannot run rollouts: .*apt-get install bubblewrap"):
        ray_tasks.main(cluster[0], f"tasks:{hidden}/tasks?agent=agents/solver.py:solve", 1, {"PATH": "/nowhere"})
