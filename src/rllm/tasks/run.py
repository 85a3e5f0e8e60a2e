"""Rollout of a task: an agent works in a sandbox, and the verifier rewards its files in another one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from weakref import WeakKeyDictionary

from rllm.errors import AgentError, boundary
from rllm.sandbox.base import ImageSource, Sandbox, SandboxBackend, SandboxError
from rllm.tasks.changes import changes, diff
from rllm.tasks.task import SandboxAgent, TaskFolder, TaskOutcome
from rllm.tasks.verifier import Verdict, verify

_EMPTY = 'mkdir -p "$1" && cd "$1" && rm -rf ./* ./.[!.]* ./..?* /logs/verifier $2 && mkdir -p /logs/verifier'
"""Removes what the image has where the agent's files and the reward come."""


async def run_task(
    task: TaskFolder,
    agent: SandboxAgent,
    backend: SandboxBackend,
    *,
    base_url: str = "",
    api_key: str = "",
    model: str = "policy",
) -> TaskOutcome:
    """Let an agent work on a task, and return its verifier's reward.

    The agent's sandbox is closed before the verifier starts, with all of its processes. The verifier has a new sandbox
    of the task's image, to which only the working directory and the task's `artifacts` are copied, and then `tests`.
    So nothing that an agent does to programs, to `/tests` or `/logs` reaches the verifier; what `tests/test.sh` runs or
    imports from the working directory does.

    Args:
        task: the task.
        agent: the agent; one that is stopped at `task.agent_timeout_s` is rewarded for what it did until then.
        backend: where sandboxes are started.
        base_url: URL of the rollout's session, with `/v1`.
        api_key: key of that session.
        model: name of the model in the agent's requests.

    Raises:
        AgentError: if the agent fails, or leaves no working directory.
        RewardError: if the verifier gives no reward; that is not a reward of 0.
        SandboxError: if the image cannot be built, or a sandbox cannot be started or ends.
    """
    timings: dict[str, float] = {}
    agent = agent.for_task(task)
    with TemporaryDirectory(prefix="rllm-task-") as folder:
        carried = Path(folder)
        with _timed(timings, "start_s"):
            image = await _image(task, task.image, backend)
            verifier_image = await _image(task, task.verifier_image, backend) if task.verifier_image else image
            sandbox = await _start_with_agent(task, agent, backend, image)
        async with sandbox:
            _check_workdir(task, sandbox.workdir)
            await sandbox.download(sandbox.workdir, carried / "before", max_bytes=task.limits.disk_mb << 20)
            with _timed(timings, "agent_s"), boundary(AgentError, f"agent {agent}"):
                timed_out = not await _work(task, agent, sandbox, base_url=base_url, api_key=api_key, model=model)
            await _take(task, sandbox, carried)
        with _timed(timings, "verifier_s"):
            workdir = None if task.verifier_image else task.workdir
            # The verifier has room of its own beside the files of an agent that filled its disk.
            limits = replace(task.limits, disk_mb=2 * task.limits.disk_mb)
            fresh = await backend.start(verifier_image, limits=limits, workdir=workdir, env=task.env)
            async with fresh:
                await _give(task, fresh, sandbox.workdir, carried)
                verdict = await verify(task, fresh)
        return await asyncio.to_thread(_outcome, verdict, carried, timings, timed_out)


def _outcome(verdict: Verdict, carried: Path, timings: dict[str, float], timed_out: bool) -> TaskOutcome:
    before, after = carried / "before", carried / "workdir"
    return TaskOutcome(
        reward=verdict.reward,
        reward_parts=verdict.parts,
        changes=changes(before, after),
        diff=diff(before, after),
        verifier_output=verdict.output,
        timings=timings,
        agent_timed_out=timed_out,
    )


async def _image(task: TaskFolder, source: ImageSource, backend: SandboxBackend) -> str:
    """Return an image of a task, built if need be within `task.build_timeout_s`."""
    try:
        async with asyncio.timeout(task.build_timeout_s) as deadline:
            return await backend.image(source)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise SandboxError(
            f"an image of {task.name} was not built within environment.build_timeout_sec={task.build_timeout_s:g}: "
            "raise that in task.toml, or build the image before"
        ) from error


def _check_workdir(task: TaskFolder, workdir: str) -> None:
    if PurePosixPath(workdir) == PurePosixPath("/"):
        raise SandboxError(
            f"the working directory of {task.name} is /, which cannot be copied to the verifier: set "
            "environment.workdir in task.toml, or WORKDIR in its Dockerfile"
        )


async def _start(task: TaskFolder, backend: SandboxBackend, image: str, agent: SandboxAgent | None = None) -> Sandbox:
    return await backend.start(
        image, limits=task.limits, workdir=task.workdir, env=task.env, mounts=agent.mounts if agent else None
    )


async def _start_with_agent(task: TaskFolder, agent: SandboxAgent, backend: SandboxBackend, image: str) -> Sandbox:
    """Start a sandbox in which the agent is installed: from a snapshot where the backend has them."""
    if type(agent).install is SandboxAgent.install:
        return await _start(task, backend, image, agent)

    async def install() -> str | None:
        async with await _start(task, backend, image, agent) as sandbox:
            await _install(agent, sandbox)
            try:
                return await sandbox.snapshot()
            except SandboxError:  # the backend has none
                return None

    ready = await _once((backend, image, str(agent)), install)
    sandbox = await _start(task, backend, ready or image, agent)
    if ready is None:
        try:
            await _install(agent, sandbox)
        except BaseException:
            await sandbox.close()
            raise
    return sandbox


async def _install(agent: SandboxAgent, sandbox: Sandbox) -> None:
    with boundary(AgentError, f"the installation of agent {agent}"):
        await agent.install(sandbox)


async def _work(
    task: TaskFolder, agent: SandboxAgent, sandbox: Sandbox, *, base_url: str, api_key: str, model: str
) -> bool:
    """Let the agent work; return whether it ended by itself."""
    try:
        async with asyncio.timeout(task.agent_timeout_s) as deadline:
            await agent.run(
                task.instruction,
                sandbox,
                base_url=base_url,
                api_key=api_key,
                model=model,
                timeout_s=task.agent_timeout_s,
            )
    except TimeoutError:
        if not deadline.expired():
            raise
        return False
    return True


async def _take(task: TaskFolder, sandbox: Sandbox, carried: Path) -> None:
    """Copy the working directory and the artifacts out of the agent's sandbox."""
    max_bytes = task.limits.disk_mb << 20
    try:
        await sandbox.download(sandbox.workdir, carried / "workdir", max_bytes=max_bytes)
    except SandboxError as error:
        await _check_running(sandbox)
        raise AgentError(f"the agent left no working directory {sandbox.workdir} that can be read: {error}") from error
    for number, path in enumerate(task.artifacts):
        try:
            await sandbox.download(path, carried / f"artifact-{number}", max_bytes=max_bytes)
        except SandboxError:  # the agent did not make it, and the verifier will see that
            await _check_running(sandbox)


async def _check_running(sandbox: Sandbox) -> None:
    """Raise `SandboxError` if the sandbox has ended, for which the agent is not blamed."""
    await sandbox.exec(["true"], cwd="/", timeout_s=60)


async def _give(task: TaskFolder, sandbox: Sandbox, workdir: str, carried: Path) -> None:
    """Copy the agent's working directory and artifacts into the verifier's sandbox."""
    tests = "" if task.verifier_image else "/tests"
    emptied = await sandbox.exec(["sh", "-c", _EMPTY, "sh", workdir, tests], cwd="/", timeout_s=task.verifier_timeout_s)
    if not emptied.ok:
        raise SandboxError(
            f"{workdir} and /logs/verifier cannot be made empty for the verifier: {emptied.stderr[-500:]}"
        )
    await sandbox.upload(carried / "workdir", workdir)
    for number, path in enumerate(task.artifacts):
        if (source := carried / f"artifact-{number}").exists():
            await sandbox.upload(source, path)


_tasks_of: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, asyncio.Task[str | None]]] = WeakKeyDictionary()


async def _once(key: Hashable, make: Callable[[], Coroutine[None, None, str | None]]) -> str | None:
    """Return the result of a coroutine that runs once for each key and event loop; again if it failed."""
    loop = asyncio.get_running_loop()
    tasks = _tasks_of.setdefault(loop, {})
    task = tasks.get(key) or loop.create_task(make())
    tasks[key] = task
    try:
        return await asyncio.shield(task)
    finally:
        is_failed = task.done() and (task.cancelled() or task.exception() is not None)
        if is_failed and tasks.get(key) is task:
            del tasks[key]


@contextmanager
def _timed(timings: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        timings[name] = time.monotonic() - started
