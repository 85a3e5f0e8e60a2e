"""Rollout of a task: an agent works in a sandbox, and the verifier rewards its files in another one."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from weakref import WeakKeyDictionary

from rllm.errors import AgentError, RolloutError, boundary, last_lines, raised
from rllm.sandbox.base import ImageSource, Sandbox, SandboxBackend, SandboxError
from rllm.sandbox.client import TRANSFER_TIMEOUT_S, uncancelled
from rllm.sandbox.owner import own_folder
from rllm.tasks.changes import changes, diff
from rllm.tasks.task import MAX_TEXT, SandboxAgent, TaskFolder, TaskOutcome
from rllm.tasks.verifier import reward_of, run_verifier

logger = logging.getLogger(__name__)

_EMPTY = 'mkdir -p "$1" && cd "$1" && rm -rf ./* ./.[!.]* ./..?* /logs/verifier $2 && mkdir -p /logs/verifier'
"""Removes the image's content from the folders to which the agent's files, the tests and the reward come."""
_UNREACHABLE = re.compile(
    r"name resolution|could not resolve|name or service not known|nodename nor servname|ENOTFOUND|EAI_AGAIN"
    r"|network is unreachable|ENETUNREACH|connection refused|ECONNREFUSED",
    re.IGNORECASE,
)
"""Messages of programs, curl, Python and Node.js among them, that could not reach a server."""


async def run_task(
    task: TaskFolder,
    agent: SandboxAgent,
    backend: SandboxBackend,
    *,
    base_url: str = "",
    api_key: str = "",
    model: str = "policy",
    on_failure: Callable[[TaskOutcome], None] | None = None,
) -> TaskOutcome:
    """Let an agent work on a task, and return its verifier's reward.

    The agent's sandbox is closed before the verifier starts, with all of its processes. The verifier has a new sandbox
    of the task's image, to which only the working directory and the task's `artifacts` are copied, and then `tests`.
    So nothing that an agent does to programs, to `/tests` or `/logs` reaches the verifier, except for what
    `tests/test.sh` runs or imports from the working directory.

    Args:
        task: the task.
        agent: the agent; one that is stopped at `task.agent_timeout_s` is rewarded for what it did until then.
        backend: where sandboxes are started.
        base_url: URL of the rollout's session, with `/v1`.
        api_key: key of that session.
        model: name of the model in the agent's requests.
        on_failure: called before an error is raised, or if the rollout is cancelled, with what is known of it.

    Raises:
        AgentError: if the agent fails, or leaves no working directory.
        RewardError: if the verifier gives no reward; that is not a reward of 0.
        SandboxError: if the image cannot be built, a sandbox cannot be started or ends, or this machine fails.
    """
    to_model = {"base_url": base_url, "api_key": api_key, "model": model}
    with boundary(SandboxError, f"a rollout of {task.name} in sandbox={backend.name}"):
        folder = TemporaryDirectory(prefix="rollout-", dir=own_folder())
        try:
            known = _Known(Path(folder.name))
            try:
                await _roll_out(task, agent, backend, known, to_model)
            except BaseException:
                if on_failure is not None:
                    known.reward, known.reward_parts = None, {}
                    on_failure(await asyncio.to_thread(known.outcome_of_failure))
                raise
            return await asyncio.to_thread(known.outcome)
        finally:  # in a thread: it may have all files that a sandbox may have
            await uncancelled(asyncio.to_thread(folder.cleanup))


@dataclass
class _Known:
    """Files, timings and reward of a rollout so far."""

    carried: Path
    """Folder for the files of the agent's sandbox."""
    has_files: bool = False
    """True if all files of the working directory were copied, before the agent worked and afterwards."""
    timings: dict[str, float] = field(default_factory=dict)
    agent_timed_out: bool = False
    verifier_output: str = ""
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)

    def outcome(self) -> TaskOutcome:
        """Compare the files, and return all that is known."""
        before, after = self.carried / "before", self.carried / "workdir"
        output = self.verifier_output
        return TaskOutcome(
            reward=self.reward,
            reward_parts=self.reward_parts,
            changes=changes(before, after) if self.has_files else None,
            diff=diff(before, after) if self.has_files else "",
            verifier_output=output if len(output) <= MAX_TEXT else f"[...]{output[5 - MAX_TEXT :]}",
            timings=self.timings,
            agent_timed_out=self.agent_timed_out,
        )

    def outcome_of_failure(self) -> TaskOutcome:
        """Return all that is known, without the files if they cannot be compared: that error is not the rollout's."""
        try:
            return self.outcome()
        except Exception as error:
            logger.warning("the files of a failed rollout cannot be compared: %s", raised("changes", error))
            self.has_files = False
            return self.outcome()


async def _roll_out(
    task: TaskFolder, agent: SandboxAgent, backend: SandboxBackend, known: _Known, to_model: Mapping[str, str]
) -> None:
    """Roll out the task, and record its files, timings and reward in `known`."""
    with _timed(known.timings, "start_s"):
        image = await _image(task, task.image, backend)
        verifier_image = await _image(task, task.verifier_image, backend) if task.verifier_image else image
        sandbox = await _start_with_agent(task, agent, backend, image)
    async with sandbox:
        if PurePosixPath(sandbox.workdir) == PurePosixPath("/"):
            raise SandboxError(
                f"the working directory of {task.name} is /, which cannot be copied to the verifier: set "
                "environment.workdir in task.toml, or WORKDIR in its Dockerfile"
            )
        await sandbox.download(sandbox.workdir, known.carried / "before", max_bytes=task.limits.disk_mb << 20)
        try:
            with _timed(known.timings, "agent_s"), boundary(AgentError, f"agent {agent}"):
                known.agent_timed_out = not await _work(task, agent.for_task(task), sandbox, to_model)
        except RolloutError as error:
            with suppress(SandboxError):  # its files are shown, if there are any
                await _take_workdir(task, sandbox, known)
            raise _with_remedy(error) from error.__cause__
        await _take(task, sandbox, known)
    with _timed(known.timings, "verifier_s"):
        workdir = None if task.verifier_image else task.workdir
        # The verifier has room of its own in addition to the files of an agent that filled its disk.
        limits = replace(task.limits, disk_mb=2 * task.limits.disk_mb)
        fresh = await backend.start(verifier_image, limits=limits, workdir=workdir, env=task.env)
        async with fresh:
            await _give(task, fresh, sandbox.workdir, known.carried)
            ended = await run_verifier(task, fresh)
            known.verifier_output = ended.output
            known.reward, known.reward_parts = await reward_of(task, fresh, ended)


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


async def _start(task: TaskFolder, backend: SandboxBackend, image: str, agent: SandboxAgent | None = None) -> Sandbox:
    return await backend.start(
        image, limits=task.limits, workdir=task.workdir, env=task.env, mounts=agent.mounts if agent else None
    )


async def _start_with_agent(task: TaskFolder, agent: SandboxAgent, backend: SandboxBackend, image: str) -> Sandbox:
    """Start a sandbox with the agent installed: from a snapshot if that can hold the agent and the backend has them."""

    async def install() -> str | None:
        async with await _start(task, backend, image, agent) as sandbox:
            await _install(agent, sandbox)
            try:
                return await sandbox.snapshot()
            except SandboxError:  # the backend has none
                return None

    ready = None
    if agent.installs_into_image and type(agent).install is not SandboxAgent.install:
        # `install` refers to the agent, so no other one can get its id.
        ready = await _once((backend, image, id(agent), task.workdir, frozenset(task.env.items())), install)
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


async def _work(task: TaskFolder, agent: SandboxAgent, sandbox: Sandbox, to_model: Mapping[str, str]) -> bool:
    """Let the agent work; return whether it ended by itself."""
    try:
        async with asyncio.timeout(task.agent_timeout_s) as deadline:
            await agent.run(task.instruction, sandbox, timeout_s=task.agent_timeout_s, **to_model)
    except TimeoutError:
        if not deadline.expired():
            raise
        return False
    return True


def _with_remedy(error: RolloutError) -> RolloutError:
    """Return the error of an agent, with advice if it could not reach a server."""
    if not isinstance(error, AgentError) or not _UNREACHABLE.search(str(error)):
        return error
    return AgentError(
        f"{str(error).rstrip()}\nA sandbox has no network: send model calls to the URL that "
        "`sandbox.open_route(base_url)` returns, and put what the agent downloads into the image"
    )


async def _take_workdir(task: TaskFolder, sandbox: Sandbox, known: _Known) -> None:
    await sandbox.download(sandbox.workdir, known.carried / "workdir", max_bytes=task.limits.disk_mb << 20)
    known.has_files = True


async def _take(task: TaskFolder, sandbox: Sandbox, known: _Known) -> None:
    """Copy the working directory and the artifacts out of the agent's sandbox."""
    try:
        await _take_workdir(task, sandbox, known)
    except SandboxError as error:
        await sandbox.check_running()  # an agent is not blamed for a sandbox that ended
        raise AgentError(f"the agent left no working directory {sandbox.workdir} that can be read: {error}") from error
    for number, path in enumerate(task.artifacts):
        try:
            await sandbox.download(path, known.carried / f"artifact-{number}", max_bytes=task.limits.disk_mb << 20)
        except SandboxError:  # the agent did not make it, and the verifier will see that
            await sandbox.check_running()


async def _give(task: TaskFolder, sandbox: Sandbox, workdir: str, carried: Path) -> None:
    """Copy the agent's working directory and artifacts into the verifier's sandbox."""
    tests = "" if task.verifier_image else "/tests"
    emptied = await sandbox.exec(["sh", "-c", _EMPTY, "sh", workdir, tests], cwd="/", timeout_s=TRANSFER_TIMEOUT_S)
    if not emptied.ok:
        raise SandboxError(
            f"{workdir} and /logs/verifier cannot be made empty for the verifier: {last_lines(emptied.stderr)}"
        )
    await sandbox.upload(carried / "workdir", workdir)
    for number, path in enumerate(task.artifacts):
        if (source := carried / f"artifact-{number}").exists():
            await sandbox.upload(source, path)


_Made = Callable[[], Coroutine[None, None, str | None]]
_made_in: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, tuple[asyncio.Task[str | None], _Made]]] = (
    WeakKeyDictionary()
)


async def _once(key: Hashable, make: _Made) -> str | None:
    """Return the result of a coroutine that runs once for each key and event loop; again if it failed.

    `make` is kept with the result, and with it the objects that it uses.
    """
    loop = asyncio.get_running_loop()
    made = _made_in.setdefault(loop, {})
    if key not in made:
        made[key] = loop.create_task(make()), make
    task, _ = made[key]
    try:
        return await asyncio.shield(task)
    finally:
        is_failed = task.done() and (task.cancelled() or task.exception() is not None)
        if is_failed and key in made and made[key][0] is task:
            del made[key]


@contextmanager
def _timed(timings: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        timings[name] = time.monotonic() - started
