import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from rllm import cli
from rllm.cli.inputs import load_agent
from rllm.engine.episode_log import EpisodeLog
from rllm.gateway.server import ServerThread
from rllm.rewards.llm_judge import RelativeJudge
from rllm.rewards.scoring import reward_function_of
from rllm.store import open_store
from rllm.testing.scripted import ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer

from ..ports import free_port
from .conftest import as_a_program, here
from .test_without_extras import BARE

AGENT = """
from openai import OpenAI

client = OpenAI()


def agent(question, answer):
    messages = [{"role": "user", "content": question}]
    response = client.chat.completions.create(model="any", messages=messages, max_tokens=32)
    if "bug" in question:
        raise ValueError(f"no idea at {id(response):#x}")
    return None if "unscored" in question else float(response.choices[0].message.content == answer)
"""
ROWS = [
    {"id": "right", "question": "fig", "answer": "FIG"},
    {"id": "wrong", "question": "lime", "answer": "lemon"},
]


@pytest.fixture
def eval_work(work):
    """A folder with an agent whose correct answers are in capitals; the current directory."""
    (work / "my_agent.py").write_text(AGENT)
    write_tasks(work, ROWS)
    return work


def write_tasks(folder, rows):
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class ShoutingEngine(ScriptedEngine):
    """Engine that answers in capitals at once, except for the questions in `held`."""

    def __init__(self):
        self.held: set[str] = set()
        super().__init__(
            lambda messages: messages[-1]["content"].upper(),
            latency_s=lambda messages: 600.0 if messages[-1]["content"] in self.held else 0.0,
        )


@pytest.fixture
def server():
    with ScriptedServer(ShoutingEngine(), model="big") as server:
        yield server


@pytest.fixture
def runs(monkeypatch, capsys):
    """Run a command that must succeed, in this process; return its output on stdout and on stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rllm", *arguments])
        with as_a_program(), pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code in (0, None)
        return capsys.readouterr()

    return run


def arguments(server, *more):
    options = {"--dataset": "tasks.jsonl", "--base-url": server.base_url}
    given = [part for name, value in options.items() if name not in more for part in (name, value)]
    return ["eval", "my_agent.py:agent", *given, *more]


def test_agent_is_evaluated_against_a_server(eval_work, server):
    bugs = [{"id": name, "question": f"a {name}", "answer": ""} for name in ("bug 1", "bug 2", "unscored")]
    write_tasks(eval_work, [*ROWS, *bugs])
    more = ["--n", "2", "--temperature", "0.5", "--out", "out", "sampling.top_p=0.9", "--json"]
    done = here(*arguments(server, *more), cwd=eval_work)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    assert report["accuracy"]["value"] == pytest.approx(1 / 4)  # one right, one wrong, two failed; one is left out
    assert report["pass_at_k"]["2"]["num_tasks"] == 4
    assert (report["num_rollouts"], report["num_failed"], report["num_unscored"]) == (10, 4, 2)
    assert report["mean_reward"] == 0.5
    [failure] = report["failures"]
    assert failure["count"] == 4
    assert failure["text"].startswith("AgentError: agent raised ValueError: no idea at 0x")
    assert [task["task_id"] for task in report["tasks"]] == ["right", "wrong", "bug 1", "bug 2", "unscored"]
    # Each byte is a token: 10 for the markers of the turns, then the question; and the answer with its end.
    assert report["tasks"][0]["cost"]["sampled_tokens"] == len("FIG") + 1
    assert report["tasks"][1]["cost"]["prompt_tokens"] - report["tasks"][0]["cost"]["prompt_tokens"] == 1
    assert report["tasks"][0]["cost"]["num_calls"] == 1.0
    assert {(asked["model"], asked["temperature"], asked["top_p"]) for asked in server.requests} == {("big", 0.5, 0.9)}
    for expected in ("accuracy", "25.0% [", "pass@2", "5: 1 always solved, 0 sometimes, 3 never", "4 of 10 rollouts failed",
                 "2 of 10 rollouts were not scored", "10/10 rollouts, 2 correct, 4 failed"):  # fmt: skip
        assert expected in done.stderr
    with open_store(str(eval_work / "out" / "traces.db"), read_only=True) as store:
        assert len(store.sessions()) == 10


def test_repeated_command_runs_only_failed_rollouts(eval_work, server, runs):
    write_tasks(eval_work, [*ROWS, {"id": "b", "question": "bug", "answer": "BUG"}])
    printed, text = runs(*arguments(server))
    assert "accuracy     33.3% [" in printed
    again = shlex.split(text.split("continue with: ")[1].splitlines()[0])
    [folder] = (eval_work / "evals").iterdir()
    assert again[-2:] == ["--out", str(folder.relative_to(eval_work))]
    server.requests.clear()
    _, text = runs(*again[again.index("eval") :])
    assert [asked["messages"][0]["content"] for asked in server.requests] == ["bug"]
    assert "2 kept" in text
    assert json.loads((folder / "report.json").read_text())["num_failed"] == 1


def test_results_are_broken_down_by_environment(eval_work, server, runs):
    lake = "gymnasium:FrozenLake-v1?size=2&max_steps=3&is_slippery=false"
    rows = [{"env": lake}, {"env": "gymnasium:CliffWalking-v1?size=1&max_steps=3"}]
    (eval_work / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed, answer = runs("eval", "--data", "mixed.jsonl", "--base-url", server.base_url, "--json")
    report = json.loads(printed)
    assert {name: (part["num_tasks"], part["mean_reward"]) for name, part in report["sources"].items()} == {
        "FrozenLake-v1": (2, 0.0),
        "CliffWalking-v1": (1, -1.0),  # the last number of "Legal actions: 0, 1, 2, 3" is a step
    }
    assert "CliffWalking-v1  0.0% [" in answer
    (eval_work / "rewards.py").write_text("def short(task, answer):\n    return float(len(answer) < 5)\n")
    printed, _ = runs(
        "eval", "--env", rows[1]["env"], "--reward", "rewards.py:short", "--base-url", server.base_url, "--json"
    )
    assert json.loads(printed)["mean_reward"] == 0.0, "-1 of the environment, and 1 of the reward"


STUCK = """
import threading
import gymnasium


class Stuck(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        return 0, {}

    def step(self, action):
        threading.Event().wait()


gymnasium.register("Stuck-v0", entry_point=Stuck)
"""


def test_environment_step_that_hangs_fails_its_rollout(eval_work, server):
    (eval_work / "stuck.py").write_text(STUCK)
    env = "gymnasium:stuck:Stuck-v0?size=1"
    done = here("eval", "--env", env, "--base-url", server.base_url, "--timeout", "0.1", cwd=eval_work)
    assert done.returncode == 1
    assert "did not finish within timeout_s=0.1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["eval", "train"])
def test_invalid_environment_is_rejected_before_loading_a_model(work, fails, command):
    code, errors = fails(command, "--env", "gymnasium:NoSuchGame-v0", "--model", "some/model")
    assert code == 2
    assert "NoSuchGame" in errors
    assert "some/model" not in errors


def started(server, *more, held, cwd):
    """Start an evaluation, and return its process once only the held question is unanswered; it needs no torch."""
    server.engine.held = held
    program = BARE + "from rllm.__main__ import main; main()"
    command = [sys.executable, "-c", program, *arguments(server, "--out", "out", "--max-concurrent", "1", *more)]
    process = subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("1/2"):
            break
    while len(server.requests) < 2:  # the held call has not arrived yet
        assert process.poll() is None
        time.sleep(0.01)
    return process


@pytest.mark.slow
def test_kill_9_loses_only_unfinished_rollouts(eval_work, server, runs):
    with started(server, held={"lime"}, cwd=eval_work) as process:
        os.kill(process.pid, signal.SIGKILL)
    with (eval_work / "out" / "episodes.jsonl").open("a") as file:
        file.write('{"id": "torn')  # as after a crash of the machine
    server.engine.held = set()
    printed, answer = runs(*arguments(server, "--out", "out", "--json"))
    assert "1/2 rollouts, 1 correct, 1 kept" in answer
    assert json.loads(printed)["accuracy"]["value"] == 0.5
    assert [asked["messages"][0]["content"] for asked in server.requests] == ["fig", "lime", "lime"]
    episodes = EpisodeLog.read(eval_work / "out" / "episodes.jsonl")
    assert [episode.id for episode in episodes] == ["right:0", "wrong:0"]


@pytest.mark.slow
def test_ctrl_c_saves_results_and_prints_resume_command(eval_work, server):
    with started(server, held={"lime"}, cwd=eval_work) as process:
        process.send_signal(signal.SIGINT)
        printed = process.stderr.read()
        assert process.wait(timeout=60) == 130
    lines = printed.splitlines()  # errors of interrupted calls are not printed
    assert lines[:2] == ["", "Stopped. 1 of 2 rollouts are done and kept in out."]
    assert re.fullmatch(r"Continue with: .*rllm eval .*--out out .*", lines[2])
    assert len(lines) == 3
    assert [episode.id for episode in EpisodeLog.read(eval_work / "out" / "episodes.jsonl")] == ["right:0"]


def test_local_model_is_evaluated_in_this_process(eval_work, policy, runs, fails):
    more = ["--model", str(policy), "--n", "2", "--out", "out", "--json"]
    more += ["sampling.max_tokens=4", "sampling.min_p=1e-3"]
    printed, _ = runs("eval", "my_agent.py:agent", "--dataset", "tasks.jsonl", *more)
    report = json.loads(printed)
    assert (report["num_rollouts"], report["num_failed"]) == (4, 0)
    assert 1 <= report["cost"]["sampled_tokens"] <= 4
    identity = json.loads((eval_work / "out" / "evaluation.json").read_text())
    assert str(policy) in identity["model"]
    assert json.loads(identity["sampling"]) == {"max_tokens": 4, "min_p": 0.001}
    code, errors = fails("eval", "my_agent.py:agent", "--dataset", "tasks.jsonl", *more, "seed=1")
    assert (code, "model settings was {}, and is now {'seed': 1}" in errors) == (2, True)  # it has other answers


TWO_TURNS = """
from openai import OpenAI

client = OpenAI()


def agent(question, answer):
    messages = [{"role": "user", "content": question}]
    for _ in range(2):
        response = client.chat.completions.create(model="any", messages=messages, max_tokens=8)
        reply = {"role": "assistant", "content": response.choices[0].message.content}
        messages += [reply, {"role": "user", "content": "Again."}]
    return 1.0
"""


def test_later_turns_use_the_prompt_settings_of_the_gateway(eval_work, policy, runs, fails):
    (eval_work / "my_agent.py").write_text(TWO_TURNS)
    command = ["eval", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", str(policy)]
    runs(*command, "--out", "exact")
    runs(*command, "--out", "rendered", "gateway.exact_turns=false")
    assert continues_exactly(eval_work / "exact") == [True, True]
    assert False in continues_exactly(eval_work / "rendered")
    assert "'exact_turns': False" in fails(*command, "--out", "exact", "gateway.exact_turns=false")[1]


def continues_exactly(folder):
    """Return whether the second call of each session begins with the tokens of the first."""
    with open_store(str(folder / "traces.db"), read_only=True) as store:
        pairs = [store.by_session(session.id) for session in store.sessions()]
    known = [[*first.prompt_ids, *first.response_ids] for first, _ in pairs]
    return [second.prompt_ids[: len(ids)] == ids for ids, (_, second) in zip(known, pairs, strict=True)]


def test_evaluation_accepts_a_server_without_token_ids(eval_work, server, runs):
    server.fault = "no_tokens"
    out, _ = runs(*arguments(server, "--upstream-kind", "openai"))
    assert "50.0% [" in out
    assert "tokens unknown (not every call has token ids), 1.0 calls" in out
    why = out.partition("2 of 2 rollouts had a call without usable tokens:\n  2 x ")[2]
    assert "return_token_ids: true" in why
    assert "return_token_ids" not in server.requests[0]


REFUSED = """
from openai import BadRequestError, OpenAI


def agent(question, answer):
    with OpenAI() as client:
        try:
            client.chat.completions.create(model="any", messages=[], max_tokens=32)
        except BadRequestError:
            return 0.5
"""


def test_report_has_the_reason_of_refused_calls(eval_work, server, runs):
    (eval_work / "my_agent.py").write_text(REFUSED)
    out, _ = runs(*arguments(server, "--out", "out"))
    assert "tokens unknown (not every call has token ids)" in out
    assert "2 of 2 rollouts had a call without usable tokens:\n  2 x " in out
    assert "messages" in out.partition("2 x ")[2]
    again, _ = runs(*arguments(server, "--out", "out"))
    assert again == out  # the log of episodes has the reason, too


def test_complete_evaluation_makes_no_calls(eval_work, server, runs):
    first, _ = runs(*arguments(server, "--out", "out"))
    num_calls = len(server.requests)
    again, answer = runs(*arguments(server, "--out", "out"))
    assert again == first
    assert "All rollouts are done already" in answer
    assert len(server.requests) == num_calls


def test_evaluation_fails_if_all_rollouts_fail(eval_work, server, fails):
    write_tasks(eval_work, [{"question": "bug", "answer": ""}])
    code, errors = fails(*arguments(server))
    assert code == 1
    assert "the only rollout failed, so there is no result:\n  1 x AgentError: agent raised" in errors
    assert "\nDetails of each: " in errors
    [folder] = (eval_work / "evals").iterdir()
    assert json.loads((folder / "report.json").read_text())["accuracy"] is None
    code, errors = fails("eval", "--compare", str(folder), str(folder))
    assert (code, f"no rollout of {folder} was scored" in errors) == (2, True), errors
    assert here(*arguments(server), cwd=eval_work).stdout == ""  # no accuracy, and no cost, without rollouts


def test_evaluation_fails_if_no_rollout_is_scored(eval_work, server, fails):
    write_tasks(eval_work, [{"question": text, "answer": ""} for text in ("unscored", "bug")])
    code, errors = fails(*arguments(server))
    why = "no rollout was scored, so there is no result: the agent or --reward must return a reward"
    assert (code, errors.splitlines()[-1]) == (1, f"rllm: {why}")


def test_episodes_are_listed_with_their_outcome(eval_work, server, runs):
    write_tasks(eval_work, [*ROWS, {"id": "bug", "question": "bug", "answer": ""}])
    assert "Details of each: " in runs(*arguments(server, "--out", "out")).out
    listed = json.loads(here("explain", "out", "--json", cwd=eval_work).stdout)["episodes"]
    ends = {item["episode_id"]: item["error"]["type"] if item["error"] else item["rewards"]["agent"] for item in listed}
    assert ends == {"right:0": 1.0, "wrong:0": 0.0, "bug:0": "AgentError"}
    assert "ValueError: no idea" in here("explain", "out", "bug:0", cwd=eval_work).stdout
    assert not re.search("split|step", here("explain", "out", cwd=eval_work).stdout)
    shown = here("explain", "out", "right:0", "--tokens", cwd=eval_work).stdout
    assert "│ 0    │ 22 + 4 │         │ FIG    │" in shown
    assert not re.search("train|learn|advantage|baseline", shown)


def test_duplicate_setting_is_reported_and_the_option_wins(eval_work, server, runs, caplog):
    runs(*arguments(server, "--out", "out", "--temperature", "0.5", "sampling.temperature=0.1"))
    assert "sampling.temperature=0.1 and sampling.temperature=0.5 are both given" in caplog.text
    assert json.loads((eval_work / "out" / "evaluation.json").read_text())["sampling"] == '{"temperature":0.5}'


@pytest.mark.parametrize("name", ["config.yaml", "traces.db"])
def test_folder_of_another_program_is_rejected(eval_work, server, fails, name):
    (eval_work / "out").mkdir()
    (eval_work / "out" / name).touch()
    assert f"out='out' has a {name} of another program" in fails(*arguments(server, "--out", "out"))[1]


def test_evaluated_agent_of_a_folder_cannot_change(eval_work, server, runs, fails):
    runs(*arguments(server, "--out", "out"))
    (eval_work / "my_agent.py").write_text(AGENT + "\n# edited")
    write_tasks(eval_work, ROWS[:1])
    code, errors = fails(*arguments(server, "--out", "out", "--model", "small", "--temperature", "0"))
    assert code == 2
    for message in (
        "out='out' holds another evaluation",
        "agent was my_agent.py:agent (sha256 ",
        "model was big, and is now small",
        "dataset was 2 tasks (sha256 ",
        'sampling was {}, and is now {"temperature":0.0}',
    ):
        assert message in errors


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--dataset", "none.jsonl"], "'none.jsonl': no such file"),
        (["--dataset", "empty.jsonl"], "is empty"),
        (["--dataset", ""], "'' names no data"),
        (["--dataset", "odd.jsonl"], "row 0 of odd: agent needs 'answer', which is not a column"),
        (["--temperature", "11"], "temperature=11.0: use a number from 0 to 10"),
        (["--timeout", "0"], "'--timeout': 0: use a number of seconds above 0"),
        (["--base-url", "localhost:8000"], "localhost:8000"),
        (["--out", "my_agent.py"], "out='my_agent.py' cannot be used"),
        (["sampling.top_q=1"], "sampling.top_q=1: did you mean 'sampling.top_p'?"),
        (["sampling.zzz=1"], "sampling.zzz=1: use only temperature, top_p"),
        (["sampling.top_p=high"], "top_p='high'"),
        (["sampling.top_k=["], "top_k='['"),
        (["optim.lr=1"], "optim.lr=1 would have no effect; rllm eval takes the settings sampling.NAME=, gateway.NAME="),
        (["model.dtype=float32"], "model.dtype=float32: the server holds the model"),
        (["seed=1"], "seed=1: the server holds the model"),
        (["gateway.prt=1"], "gateway.prt is not a setting; did you mean 'gateway.port'?"),
        (["temperature"], "use key=value"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_reported_before_any_call(eval_work, server, fails, more, message):
    (eval_work / "empty.jsonl").touch()
    (eval_work / "odd.jsonl").write_text('{"question": "a"}\n')
    code, errors = fails(*arguments(server, *more))
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors
    assert server.requests == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "m"], "--data is missing"),
        (
            ["--dataset", "tasks.jsonl"],
            "--model is missing: name a model folder or hub id, or a server with --base-url",
        ),
        (["--dataset", "tasks.jsonl", "--model", "./no-model"], "no such folder"),
        (["--data", "tasks.jsonl", "--model", "m", "model.engine=vllm"], "model.engine='vllm' would have no effect"),
        (
            ["--data", "tasks.jsonl", "--model", "m", "--upstream-kind", "openai"],
            "--upstream-kind openai would have no",
        ),
        (["--data", "tasks.jsonl", "--model", "m", "model.lora_rank=8"], "because nothing is trained here"),
    ],
)
def test_missing_and_ineffective_arguments_are_reported(eval_work, fails, arguments, message):
    code, errors = fails("eval", "my_agent.py:agent", *arguments)
    assert code == 2
    assert message in errors


def test_checkpoint_of_a_run_is_evaluated(eval_work, policy, runs, fails):
    checkpoints = eval_work / "run" / "checkpoints"
    for number in (1, 2):
        shutil.copytree(policy, checkpoints / f"step-00000{number}")
        (checkpoints / f"step-00000{number}" / "trainer_state.json").write_text(json.dumps({"step": number}))
    more = ["--dataset", "tasks.jsonl", "--model", "run", "sampling.max_tokens=4"]
    for number, chosen in ((2, []), (1, ["--checkpoint", "step-000001"])):
        runs("eval", "my_agent.py:agent", *more, *chosen, "--out", f"evals/{number}")
        identity = json.loads((eval_work / "evals" / str(number) / "evaluation.json").read_text())
        assert f"step-00000{number}" in identity["model"]
    code, errors = fails("eval", "my_agent.py:agent", *more, "--checkpoint", "step-000009")
    assert (code, "step-000009" in errors) == (2, True)


def test_two_evaluations_are_compared_task_by_task(eval_work, server, runs, fails):
    write_tasks(eval_work, [*ROWS, {"id": "new", "question": "kiwi", "answer": "KIWI"}])
    runs(*arguments(server, "--out", "first", "--limit", "2"))
    (eval_work / "my_agent.py").write_text(AGENT.replace("== answer", "== answer or 1"))
    runs(*arguments(server, "--out", "second"))
    printed, _ = runs("eval", "--compare", "first", "second", "--json")
    found = json.loads(printed)
    assert (found["num_tasks"], found["num_better"], found["num_worse"], found["num_unpaired"]) == (2, 1, 0, 1)
    assert (found["accuracy"]["first"], found["accuracy"]["value"]) == (0.5, 0.5)
    assert "agent" in found["changes"]
    code, errors = fails("eval", "--compare", "first", "nowhere")
    assert (code, "--compare nowhere" in errors) == (2, True)
    for given, name in (
        (["--data", "tasks.jsonl"], "--data"),
        (["--n", "3"], "--n"),
        (["agent.py:f"], "FILE.py:function"),
    ):
        code, errors = fails("eval", *given, "--compare", "first", "second")
        assert (code, f"leave out {name}" in errors) == (2, True)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, None),
        ({"OPENAI_API_KEY": "a"}, "Bearer a"),
        ({"OPENAI_API_KEY": "a", "RLLM_UPSTREAM_API_KEY": "b"}, "Bearer b"),
    ],
)
def test_server_with_several_models_needs_a_model_name(eval_work, fails, monkeypatch, given, sent):
    for name in ("OPENAI_API_KEY", "RLLM_UPSTREAM_API_KEY"):
        monkeypatch.setenv(name, given.get(name, ""))
    keys = []

    async def models(request):
        keys.append(request.headers.get("authorization"))
        return JSONResponse({"data": [{"id": "small"}, {"id": "big"}]})

    with ServerThread(Starlette(routes=[Route("/v1/models", models)])) as server:
        code, errors = fails("eval", "my_agent.py:agent", "--dataset", "tasks.jsonl", "--base-url", server.url)
    assert code == 2
    assert f"--model is missing: the server at {server.url} lists small, big; choose one" in errors
    assert keys == [sent]


def test_unreachable_server_is_reported_first(eval_work, fails, server):
    port = free_port()
    code, errors = fails(*arguments(server, "--base-url", f"http://127.0.0.1:{port}/v1"))
    assert code == 1
    assert f"the upstream http://127.0.0.1:{port}/v1 broke off or cannot be reached" in errors
    assert not (eval_work / "evals").exists()


def test_judge_scores_and_its_verdicts_are_kept(work, policy):
    (work / "said.py").write_text(AGENT.partition("    if")[0] + "    return response.choices[0].message.content\n")
    write_tasks(work, ROWS)
    judged = [json.dumps({"reasoning": "so", "scores": {"right": score}}) for score in (10, 5)]
    with ScriptedServer(ScriptedEngine(judged)) as server:
        rubric = {"model": "m", "base_url": server.base_url, "criteria": [{"name": "right", "description": "right"}]}
        (work / "rubric.yaml").write_text(json.dumps(rubric))
        asked = ("eval", "said.py:agent", "--reward", "judge:rubric.yaml", "--data", "tasks.jsonl", "--model", policy)
        done = here(*asked, "--out", "evals/one", cwd=work)
        assert done.returncode == 0, done.stderr
    episodes = list(EpisodeLog.read(work / "evals/one/episodes.jsonl"))
    assert sorted(item.trajectories[0].reward for item in episodes) == [0.5, 1.0]
    assert episodes[0].trajectories[0].info["verdict"]["reasoning"] == "so"
    assert [len(item.trajectories[0].steps) for item in episodes] == [1, 1], "the judge's call is not the agent's"
    assert len((work / "evals/one/verdicts.jsonl").read_text().splitlines()) == 2
    assert "rubric is a file of type .yaml" in here(*asked[:3], "judge:none.txt", *asked[4:], cwd=work).stderr
    refused = here(*asked[:3], "judge:none.yaml", *asked[4:], cwd=work)
    assert (refused.returncode, "none.yaml" in refused.stderr) == (2, True)


def test_judge_may_score_a_benchmark(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rubric = {"model": "m", "base_url": "http://127.0.0.1:1/v1", "relative": True}
    Path("rubric.yaml").write_text(json.dumps(rubric))
    assert isinstance(reward_function_of(load_agent("gsm8k", "judge:rubric.yaml")), RelativeJudge)
