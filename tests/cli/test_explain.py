"""`rllm explain`, on the files of a run of `rllm train`."""

import json

import pytest

from rllm.store import open_store
from rllm.types import StepCredit, Trace

from .conftest import here

AGENT = """
from openai import OpenAI

client = OpenAI()
turns = iter(range(10**9))

def agent(question):
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
    return float(next(turns) % 2)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, policy):
    folder = tmp_path_factory.mktemp("explain")
    in_parts = AGENT.replace("float(next(turns) % 2)", '{"right": next(turns) % 2, "brief": 0}')
    (folder / "agent.py").write_text(in_parts)
    (folder / "tasks.jsonl").write_text('{"id": "a:b", "question": "Who?"}\n')
    small = ["num_steps=1", "tasks_per_step=1", "rollout.group_size=2", "rollout.max_tokens=4", "run_dir=run"]
    done = here("train", "agent.py:agent", "--data", "tasks.jsonl", "--model", policy, *small, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def episode_of(run):
    with open_store(str(run / "traces.db"), read_only=True) as store:
        metadata = store.sessions(limit=1)[0].metadata
    return f"{metadata['task_id']}:{metadata['index']}"


def test_episodes_are_listed_if_none_is_named(run):
    done = here("explain", run, cwd=run)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert sorted(row[0] for row in rows) == ["a:b@0.0.0:0", "a:b@0.0.0:1"]
    assert sorted(row[3] for row in rows) == ["0", "1"]
    assert {(row[1], row[2]) for row in rows} == {("train", "1")}
    assert f"explain {run} {rows[0][0]}\n" in done.stdout, "the next command is shown"
    assert f"explain {run} {rows[0][0]}\n" in here("explain", run, "--limit", "1", cwd=run).stdout


def test_episodes_can_be_filtered_by_split_and_step(run):
    def listed(*chosen):
        return len(json.loads(here("explain", run, "--json", *chosen, cwd=run).stdout)["episodes"])

    assert [listed("--step", step) for step in ("0", "1", "2")] == [0, 2, 0]
    assert [listed("--split", split) for split in ("train", "eval")] == [2, 0]
    assert "has no such episodes" in here("explain", run, "--step", "2", cwd=run).stdout
    assert "--step list others" in here("explain", run, "--limit", "1", cwd=run).stdout
    refused = here("explain", run, "--split", "val", cwd=run)
    assert refused.returncode == 2
    assert "--split" in refused.stderr


def test_explain_points_to_calls_outside_of_rollouts(tmp_path):
    with open_store(str(tmp_path / "traces.db")) as store:
        store.open_session("first", {}).result()
    printed = here("explain", "traces.db", cwd=tmp_path).stdout
    assert printed.startswith("traces.db has no episodes yet; ")
    look = printed.partition("traces list ")[2].removesuffix(" lists other calls.\n")
    assert "first" in here("traces", "list", *look.split(), cwd=tmp_path).stdout
    assert "tokens in the batch" not in here("explain", "traces.db", "first", cwd=tmp_path).stdout
    missing = here("explain", "traces.db", "0:0", cwd=tmp_path).stderr
    assert "episode='0:0' is not in the store, which has no episodes\n" in missing
    here("traces", "delete", "first", cwd=tmp_path)
    assert "session='first' is not in the store, which is empty" in here("traces", "show", "first", cwd=tmp_path).stderr


def test_list_is_printed_as_json(run):
    [one] = json.loads(here("explain", run / "traces.db", "--limit", "1", "--json", cwd=run).stdout)["episodes"]
    assert (one["episode_id"], one["split"], one["step"]) == (episode_of(run), "train", 1)
    assert one["rewards"]["agent"] in (0.0, 1.0)
    assert one["error"] is None


def test_table_shows_which_tokens_are_trained(run):
    done = here("explain", run, episode_of(run), "--tokens", cwd=run)
    assert done.returncode == 0, done.stderr
    for word in (
        "a:b@0.0.0",
        "agent, right: ",
        "agent, brief: 0",
        ", train, step 1, reward ",
        "baseline",
        "0.5",
        "yes",
        "tokens in the batch",
        "version",
        "text",
        "sampler logprob",
    ):
        assert word in done.stdout
    look = done.stdout.split("Messages: ")[1].splitlines()[0].partition("traces show")[2]
    assert "call" in here("traces", "show", *look.split(), cwd=run).stdout


def test_json_has_every_token(run):
    output = json.loads(here("explain", run, episode_of(run), "--json", cwd=run).stdout)
    (step,) = output["steps"]
    assert abs(step["advantage"]) == pytest.approx(1.0, abs=1e-4)
    for token in step["tokens"]:
        assert token["sampler_logprob"] == pytest.approx(token["trainer_logprob"], abs=1e-4)
        assert (token["weight_version"], token["advantage"]) == (0, pytest.approx(step["advantage"]))


def test_side_call_has_its_reason(tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = [{"role": "user", "content": "How many figs?"}]
    answer = {"role": "assistant", "content": "Counting fruit"}
    calls = [
        Trace(id=name, call_id=name, session_id="s", model="m", messages=asked, tools=given, response=answer)
        for name, given in (("title", None), ("main", tools))
    ]
    with open_store(str(tmp_path / "traces.db")) as store:
        store.open_session("s", {"task_id": "t", "index": 0}).result()
        store.add(calls).result()
    rows = [line for line in here("explain", "traces.db", "t:0", cwd=tmp_path).stdout.splitlines() if "│" in line]
    assert ["side call (without tools)" in row for row in rows] == [True, False]


def test_zero_advantage_is_explained(tmp_path, policy):
    (tmp_path / "agent.py").write_text(AGENT.replace("float(next(turns) % 2)", "float(next(turns))"))
    (tmp_path / "tasks.jsonl").write_text('{"id": "a:b", "question": "Who?"}\n')
    small = ["num_steps=1", "tasks_per_step=1", "rollout.group_size=3", "rollout.max_tokens=4", "run_dir=run"]
    here("train", "agent.py:agent", "--data", "tasks.jsonl", "--model", policy, *small, cwd=tmp_path)
    printed = [here("explain", "run", f"a:b@0.0.0:{index}", cwd=tmp_path).stdout for index in range(3)]
    assert sorted("no: its advantage is 0" in one for one in printed) == [False, False, True]


def test_reason_of_a_dropped_step_is_given_in_words(tmp_path):
    call = Trace(id="t", call_id="t", session_id="s", model="m", messages=[], response={"content": "hi"})
    about = {"task_id": "t", "index": 0, "split": "train", "training_step": 0}
    credit = {"episode_id": "t:0", "training_step": 0, "trajectory_name": "agent", "reward": 1.0}
    with open_store(str(tmp_path / "traces.db")) as store:
        store.open_session("s", about).result()
        store.add([call]).result()
        store.annotate([StepCredit(trace_id="t", session_id="s", dropped="zero_variance", **credit)]).result()
    shown = here("explain", "traces.db", "t:0", cwd=tmp_path).stdout
    assert "no: all rollouts of its group have the same reward" in shown
    assert "zero_variance" not in shown


def test_failed_episode_names_its_failure(tmp_path, policy):
    fails = AGENT.replace("return float(next(turns) % 2)", "return 1 / 0")
    (tmp_path / "agent.py").write_text(fails)
    (tmp_path / "tasks.jsonl").write_text('{"id": "a:b", "question": "Who?"}\n')
    small = ["num_steps=1", "tasks_per_step=1", "rollout.group_size=2", "rollout.max_tokens=4", "run_dir=run"]
    here("train", "agent.py:agent", "--data", "tasks.jsonl", "--model", policy, *small, cwd=tmp_path)
    printed = here("explain", "run", "a:b@0.0.0:0", cwd=tmp_path).stdout
    assert "failed: AgentError: agent raised ZeroDivisionError: division by zero (at agent.py:9)\n" in printed
    assert f'File "{tmp_path / "agent.py"}", line 9, in agent\n' in printed
    assert "no running event loop" not in printed, "internal errors of the engine are not shown"
    error = json.loads(here("explain", "run", "a:b@0.0.0:0", "--json", cwd=tmp_path).stdout)["error"]
    assert error["type"] == "AgentError"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere", "a:0"], "run='nowhere': no such folder; use the folder of a run or an evaluation"),
        ([None, "b:0"], "episode='b:0' is not in"),
    ],
)
def test_missing_episode_is_reported(run, arguments, expected):
    done = here("explain", *(item or run for item in arguments), cwd=run)
    assert (done.returncode, expected in done.stderr) == (2, True), done.stderr
