"""Rollouts of tasks in real sandboxes: rewards, and agents that try to win without solving the task."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile

import pytest

from rllm.errors import AgentError, RewardError
from rllm.sandbox import SandboxError
from rllm.tasks import SandboxAgent
from rllm.tasks.check import Idle, Oracle, check_task
from rllm.tasks.folder import read_task
from rllm.tasks.run import run_task

from .conftest import DEBIAN, EXAMPLES, backend_or_skip

pytestmark = pytest.mark.sandbox
NO_REWARD = "#!/bin/sh\ntrue\n"


@pytest.fixture
def local():
    return backend_or_skip("local")


@pytest.fixture
def podman():
    return backend_or_skip("podman")


def processes():
    """Return the command lines of the processes that this one started."""
    import psutil

    return [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]


class Shell(SandboxAgent):
    """Agent that runs one command in the sandbox."""

    def __init__(self, command="true"):
        self.command = command

    async def run(self, instruction, sandbox, *, base_url, api_key, model, timeout_s):
        result = await sandbox.exec(self.command)
        assert result.exit_code == 0, result.stderr


async def test_work_of_an_agent_is_rewarded_and_described(backend, task_folder):
    task = read_task(task_folder())
    outcome = await run_task(task, Shell("echo yes > done; echo three >> notes.txt"), backend)
    assert outcome.reward == 1.0
    assert list(map(str, outcome.changes)) == ["added done (4 bytes)", "changed notes.txt (14 bytes)"]
    assert "+three" in outcome.diff
    assert set(outcome.timings) == {"start_s", "agent_s", "verifier_s"}
    verdict = outcome.verdict()
    assert verdict["files changed"] == "added done (4 bytes)\nchanged notes.txt (14 bytes)"
    assert json.loads(json.dumps(verdict)) == verdict


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt", id="forges the reward"),
        pytest.param(
            "mkdir -p /logs/verifier; (while :; do echo 1 > /logs/verifier/reward.txt; done) >/dev/null 2>&1 &",
            id="leaves a process that rewrites the reward",
        ),
        pytest.param(
            "mkdir /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 555 /tests",
            id="plants a test",
        ),
        pytest.param(
            "mkdir -p /usr/backend/bin /opt/bin 2>/dev/null; for place in /opt/bin /usr/backend/bin /bin; do "
            "printf '#!/bin/true\\necho yes' > $place/cat; done 2>/dev/null; true",
            id="replaces programs",
        ),
        pytest.param(
            "echo 'cat() { echo yes; }' > ~/.profile; cp ~/.profile ~/.bashrc; cp ~/.profile .env", id="rc files"
        ),
        pytest.param("ln -s /logs/verifier/reward.txt reward; ln -s /tests tests", id="links to the verifier's files"),
    ],
)
async def test_forged_reward_file_is_ignored(backend, task_folder, command):
    outcome = await run_task(read_task(task_folder()), Shell(command), backend)
    assert outcome.reward == 0.0
    assert not any("reward.txt; done" in line for line in processes())


async def test_agent_that_replaces_the_shell_affects_only_itself(podman, task_folder):
    task = read_task(task_folder())
    with pytest.raises(AgentError, match="working directory"):
        await run_task(task, Shell("echo yes > done; cp /bin/true /tmp/x; mv -f /tmp/x /bin/sh"), podman)
    assert (await run_task(task, Idle(), podman)).reward == 0.0


async def test_verifier_gets_only_the_working_directory_and_artifacts(backend, task_folder):
    test = "#!/bin/sh\nls /data /srv > /tests/found 2>&1; cat /tests/found\necho 1 > /logs/verifier/reward.txt\n"
    task = read_task(task_folder({"task.toml": 'artifacts = ["/data", "/nowhere"]', "tests/test.sh": test}))
    outcome = await run_task(task, Shell("mkdir -p /data /srv; touch /data/kept /srv/lost"), backend)
    assert "kept" in outcome.verifier_output
    assert "lost" not in outcome.verifier_output


async def test_agent_that_removes_the_working_directory_gets_no_reward(backend, task_folder):
    with pytest.raises(AgentError, match="working directory"):
        await run_task(read_task(task_folder()), Shell("cd / && mv /app /gone"), backend)


@pytest.mark.parametrize(
    ("test", "named"),
    [
        ("true", r"wrote no reward.*reward\.txt.*exit code 0"),
        ("echo broken >&2; exit 3", "exit code 3.*broken"),
        ("echo nan > /logs/verifier/reward.txt", "'nan'.*finite"),
        ("echo -inf > /logs/verifier/reward.txt", "'-inf'.*finite"),
        ("echo yes > /logs/verifier/reward.txt", "'yes'"),
        ("echo 1 > /tmp/x; ln -s /tmp/x /logs/verifier/reward.txt", "no regular file"),
        ("mkfifo /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", "no regular file"),
        ("rm -rf /logs", "wrote no reward"),
    ],
)
async def test_verifier_without_reward_leaves_the_rollout_unscored(local, task_folder, test, named):
    task = read_task(task_folder({"tests/test.sh": f"#!/bin/sh\n{test}\n"}))
    with pytest.raises(RewardError, match=rf"(?s)verifier of task.*{named}"):
        await run_task(task, Idle(), local)


async def test_hanging_verifier_is_stopped(local, task_folder):
    files = {"tests/test.sh": "#!/bin/sh\nsleep 600\n", "task.toml": "[verifier]\ntimeout_sec = 0.3\n"}
    with pytest.raises(RewardError, match=r"verifier\.timeout_sec=0\.3"):
        await run_task(read_task(task_folder(files)), Idle(), local)


async def test_parts_of_a_reward_are_kept(local, task_folder):
    test = '#!/bin/sh\necho \'{"style": 0.25, "speed": 0.5}\' > /logs/verifier/reward.json\n'
    outcome = await run_task(read_task(task_folder({"tests/test.sh": test})), Idle(), local)
    assert (outcome.reward, outcome.reward_parts) == (0.75, {"style": 0.25, "speed": 0.5})


async def test_agent_stopped_at_its_deadline_is_rewarded_for_its_work(backend, task_folder):
    task = read_task(task_folder({"task.toml": "[agent]\ntimeout_sec = 2"}))
    outcome = await run_task(task, Shell("echo yes > done; sleep 600"), backend)
    assert (outcome.reward, outcome.agent_timed_out) == (1.0, True)
    assert outcome.verdict()["agent"] == "stopped at its deadline"
    assert "sleep 600" not in processes()


async def test_agent_error_is_attributed_to_it(local, task_folder):
    class Broken(Shell):
        async def run(self, instruction, sandbox, **about):
            raise KeyError("model")

    with pytest.raises(AgentError, match="agent Broken raised KeyError"):
        await run_task(read_task(task_folder()), Broken(), local)


async def test_agent_error_is_reported_even_if_its_files_cannot_be_compared(local, task_folder, monkeypatch, caplog):
    def compare(before, after):
        raise OSError("File name too long")

    monkeypatch.setattr("rllm.tasks.run.changes", compare)
    known = []
    with pytest.raises(AgentError, match="agent Shell raised AssertionError: lost"):
        await run_task(read_task(task_folder()), Shell("echo lost >&2; exit 1"), local, on_failure=known.append)
    assert (known[0].changes, "agent_s" in known[0].timings) == (None, True)
    assert "File name too long" in caplog.text


async def test_sandbox_killed_during_a_run_fails_the_rollout(local, task_folder):
    class Killed(Shell):
        async def run(self, instruction, sandbox, **about):
            os.kill(sandbox._first_process, signal.SIGKILL)
            await sandbox.exec("echo yes > done")

    with pytest.raises(SandboxError):
        await run_task(read_task(task_folder()), Killed(), local)


async def test_agent_is_installed_before_it_works_and_not_for_the_verifier(backend, task_folder):
    class Installed(Shell):
        answer = "yes"

        async def install(self, sandbox):
            await sandbox.exec(f"mkdir -p /opt/agent; echo {self.answer} > /opt/agent/answer")

    test = "#!/bin/sh\nls /opt; grep -c yes /app/done > /logs/verifier/reward.txt\n"
    task = read_task(task_folder({"tests/test.sh": test}))
    agent = Installed("cp /opt/agent/answer done")
    for outcome in [await run_task(task, agent, backend), await run_task(task, agent, backend)]:
        assert outcome.reward == 1.0
        assert "agent" not in outcome.verifier_output
    other = Installed("cp /opt/agent/answer done")
    other.answer = "no"
    assert (await run_task(task, other, backend)).reward == 0.0


async def test_mounted_agent_needs_no_snapshot(local, task_folder):
    seen = []

    class Mounted(Shell):
        installs_into_image = False

        async def install(self, sandbox):
            seen.append(sandbox.id)

        async def run(self, instruction, sandbox, **about):
            seen.append(sandbox.id)

    await run_task(read_task(task_folder()), Mounted(), local)
    assert len(seen) == 2
    assert len(set(seen)) == 1


async def test_agent_is_not_blamed_for_this_machine(local, task_folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(SandboxError, match="/nowhere"):
        await run_task(read_task(task_folder()), Idle(), local)


async def test_dockerfile_is_built_in_the_sandbox_or_its_failure_is_reported(local, task_folder):
    built = f"FROM {DEBIAN}\nENV WORD=yes\nWORKDIR /srv/shop\nRUN echo $WORD > word\n"
    test = '#!/bin/sh\n[ "$(cat /srv/shop/word) $WORD $PWD" = "yes yes /srv/shop" ] && echo 1 > /logs/verifier/reward.txt\n'
    task = read_task(task_folder({"environment/Dockerfile": built, "tests/test.sh": test}))
    assert (await run_task(task, Idle(), local)).reward == 1.0
    failing = task_folder({"environment/Dockerfile": f"FROM {DEBIAN}\nRUN echo no luck; exit 4\n"}, "failing")
    with pytest.raises(SandboxError, match=r"(?s)line 2: exit code 4: no luck"):
        await run_task(read_task(failing), Idle(), local)


async def test_verifier_with_its_own_image_gets_the_same_files(backend, task_folder):
    test = "#!/bin/sh\nls /tests; cat /app/done; [ -f here ] && echo 1 > /logs/verifier/reward.txt\n"
    files = {
        "task.toml": '[verifier]\nenvironment_mode = "separate"\n',
        "tests/Dockerfile": f"FROM {DEBIAN}\nWORKDIR /srv/tests\nRUN touch here\nCOPY . /tests/\nRUN touch /tests/made\n",
        "tests/test.sh": test,
    }
    outcome = await run_task(read_task(task_folder(files)), Oracle(), backend)
    assert outcome.reward == 1.0
    assert {"made", "test.sh", "yes"} <= set(outcome.verifier_output.split())
    assert list(map(str, outcome.changes)) == ["added done (4 bytes)"]


async def test_check_requires_a_passing_solution_and_an_initially_failing_verifier(local, task_folder):
    async def problems(name, files):
        checked = await check_task(read_task(task_folder(files, name)), local)
        return checked.ok, " ".join(checked.problems)

    assert await problems("good", {}) == (True, "")
    ok, named = await problems("unsolved", {"solution/solve.sh": "#!/bin/sh\necho no > done\n"})
    assert (ok, "reward of 0, not 1" in named) == (False, True)
    ok, named = await problems("free", {"tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"})
    assert (ok, "doing nothing has a reward of 1" in named) == (False, True)
    ok, named = await problems("broken", {"solution/solve.sh": "#!/bin/sh\necho oops >&2; exit 5\n"})
    assert (ok, "exit code 5" in named) == (False, True)
    ok, named = await problems("silent", {"solution/solve.sh": "#!/bin/sh\nexit 3\n"})
    assert (ok, "solution/solve.sh failed (exit code 3): no output" in named) == (False, True)
    ok, named = await problems("alone", {"solution/solve.sh": None})
    assert (ok, "no solution/solve.sh" in named) == (False, True)


async def test_root_cannot_be_the_working_directory(local, task_folder):
    task = read_task(task_folder({"task.toml": '[environment]\nworkdir = "/"\n'}))
    with pytest.raises(SandboxError, match=r"environment\.workdir"):
        await run_task(task, Idle(), local)


async def test_failed_installation_is_raised_to_all_waiting_rollouts(local, task_folder):
    class Broken(Shell):
        async def install(self, sandbox):
            await asyncio.sleep(0.1)
            raise OSError("no such package")

    task, agent = read_task(task_folder()), Broken()
    failed = await asyncio.gather(*(run_task(task, agent, local) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in failed] == [AgentError] * 3


async def test_file_that_grows_during_the_copy_is_accepted(backend, task_folder):
    """The agent left a program running."""
    grow = "(while :; do head -c 1000000 /dev/zero; sleep 0.01; done) > log 2>&1 & echo yes > done; sleep 0.5"
    outcome = await run_task(read_task(task_folder()), Shell(grow), backend)
    assert outcome.reward == 1.0


async def test_many_concurrent_rollouts_leave_nothing_behind(local, task_folder):
    task = read_task(task_folder())
    outcomes = await asyncio.gather(*(run_task(task, Oracle(), local) for _ in range(8)))
    assert [outcome.reward for outcome in outcomes] == [1.0] * 8
    assert not any("bwrap" in line for line in processes())


LEAVES_A_WRITER = """
import os
if not os.fork():
    os.setsid()
    while True:
        open("/logs/verifier/reward.txt", "w").write("1")
"""
HOSTILE_REPOSITORY = """
for name in post-checkout reference-transaction fsmonitor; do
    printf '#!/bin/sh\necho 1 > /logs/verifier/reward.txt; kill -9 $PPID\n' > .git/hooks/$name
    chmod +x .git/hooks/$name
done
git config core.fsmonitor .git/hooks/fsmonitor
git config alias.rev-parse '!echo 1 > /logs/verifier/reward.txt'
"""


@pytest.mark.parametrize(
    ("example", "command"),
    [
        ("fix-median", f"cat > median.py <<'END'\n{LEAVES_A_WRITER}END"),
        ("log-report", "ln -s /tests/expected.csv report.csv"),
        ("repair-git", HOSTILE_REPOSITORY),
    ],
)
async def test_verifiers_of_the_examples_resist_attacks(local, example, command):
    outcome = await run_task(read_task(EXAMPLES / example), Shell(command), local)
    assert outcome.reward < 1


def test_examples_pass_and_the_command_reports_it(local):
    command = [sys.executable, "-m", "rllm", "tasks", "check", str(EXAMPLES), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout.splitlines()[-1])
    assert {row["task"]: (row["solution"], row["nothing"], row["ok"]) for row in report["tasks"]} == {
        "fix-median": (1.0, 0.0, True),
        "log-report": (1.0, 0.0, True),
        "repair-git": (1.0, 0.0, True),
    }


def test_command_fails_if_a_task_fails(local, task_folder):
    folder = task_folder({"tests/test.sh": NO_REWARD})
    command = [sys.executable, "-m", "rllm", "tasks", "check", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "RewardError" in ended.stdout
    assert "1 of 1 task failed" in ended.stdout
