import json
import shlex
import signal
import socket
import subprocess
import sys

import pytest

from rllm.store import open_store

from .conftest import here, rllm

FAST = ["num_steps=1", "tasks_per_step=2", "rollout.group_size=4", "run_dir=run"]


def test_run_writes_metrics_traces_and_a_model(work, policy):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = here(
        "train", "my_agent.py:agent", "--data", "tasks.jsonl", "--val", "tasks.jsonl", "--model", policy, "--json", *FAST,
        cwd=work,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome.keys() == {"accuracy_before", "accuracy_after", "seconds", "run_dir"}
    assert done.stderr.count("Run folder: run\n") == 1
    run = work / outcome["run_dir"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 1]
    assert lines[1]["rollout/num_failed"] == 0
    checkpoint = run / "checkpoints" / "step-000001"
    assert AutoModelForCausalLM.from_pretrained(checkpoint).config.hidden_size == 32
    assert AutoTokenizer.from_pretrained(checkpoint).chat_template
    with open_store(str(run / "traces.db"), read_only=True) as store:
        assert len(store.sessions()) == 2 + 8 + 2  # before, the step, after


def test_dry_run_prints_the_plan_and_does_nothing(work, policy):
    arguments = ["my_agent.py:agent", "--data", "tasks.jsonl", "--model", policy, *FAST, "algorithm.clip_high=0.3"]
    done = here("train", *arguments, "--dry-run", cwd=work)
    assert done.returncode == 0, done.stderr
    printed = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line}
    assert printed["algorithm.clip_high"] == ["0.3", "key=value"]
    assert printed["algorithm.clip_low"] == ["0.2", "default"]
    assert printed["model.path"] == [str(policy), "key=value"]
    assert "2 tasks x 4 rollouts = 8 episodes a step, 1 update" in done.stdout
    assert "LoRA" not in done.stdout
    adapted = here("train", *arguments, "model.lora_rank=2", "--dry-run", cwd=work).stdout
    assert "LoRA adapts" in adapted
    assert "without an adapter: embed_tokens (" in adapted
    assert not (work / "run").exists()


def test_dry_run_shows_the_shares_of_several_datasets(work, policy):
    (work / "more.jsonl").write_text((work / "tasks.jsonl").read_text())
    given = ["my_agent.py:agent", "--data", "tasks.jsonl", "--data", "more.jsonl", "--model", policy, *FAST]
    done = here("train", *given, "data.weights=[3,1]", "data.sampling=difficulty", "--dry-run", cwd=work)
    assert done.returncode == 0, done.stderr
    assert "tasks by source: 75% tasks, 25% more" in done.stdout
    assert "data.sampling=difficulty; no outcomes are recorded yet" in done.stdout
    assert "tasks of step 1: " in done.stdout
    wrong = here("train", *given, "data.weights=[1]", "--dry-run", cwd=work)
    assert (wrong.returncode, wrong.stderr.count("data.weights=[1.0]: there are 2 datasets (tasks, more)")) == (2, 1)


def test_data_file_may_name_environments(work, fails, policy):
    lake = "gymnasium:FrozenLake-v1?size=2&max_steps=3"
    (work / "mixed.jsonl").write_text(f'{{"env": "{lake}"}}\n{{"env": "gymnasium:CartPole-v1?max_steps=3"}}\n')
    (work / "held_out.jsonl").write_text(f'{{"env": "{lake}&seed=1"}}\n')
    given = ["--data", "mixed.jsonl", "--val", "held_out.jsonl", "--model", str(policy), *FAST, "--dry-run"]
    done = here("train", *given, "data.weights=[3,1]", cwd=work)
    assert done.returncode == 0, done.stderr
    assert "tasks by source: 75% FrozenLake-v1, 25% CartPole-v1" in done.stdout
    (work / "mixed.jsonl").write_text(f'{{"env": "{lake}", "weight": 3}}\n')
    code, errors = fails("train", *given)
    assert code == 2
    assert "weight" in errors
    code, errors = fails("train", "--env", lake, *given[2:], "sampling.max_tokens=8")
    assert code == 2
    assert "rollout.max_tokens" in errors


def test_reward_is_added_to_that_of_an_environment(work, policy):
    (work / "rewards.py").write_text("def brief(task, answer):\n    return {'brief': 3.0}\n")
    env = ["--env", "gymnasium:CliffWalking-v1?size=2&max_steps=2", "--reward", "rewards.py:brief"]
    done = here("train", *env, "--model", policy, *FAST, "rollout.max_tokens=8", "reward.weights={env: 0.5}", cwd=work)
    assert done.returncode == 0, done.stderr
    [line] = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["rollout/part/brief"] == 3.0
    assert line["rollout/part/env"] <= 0.0
    assert line["rollout/reward"] == pytest.approx(3.0 + 0.5 * line["rollout/part/env"])


def test_dry_run_prints_the_plan_of_online_learning(work, fails, policy):
    given = ["train", "--from-sessions", "sessions.db", "--model", str(policy), "gateway.port=8080", "run_dir=run"]
    done = here(*given, "--dry-run", cwd=work)
    assert done.returncode == 0, done.stderr
    printed = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines() if line}
    assert (printed["algorithm.name"], printed["algorithm.correction"]) == ("online", "truncate")
    assert printed["rollout.group_size"] == "1"
    assert not (work / "run").exists()
    code, errors = fails(*given, "--data", "tasks.jsonl")
    assert (code, errors.count("leave out --data")) == (2, 1)
    code, errors = fails(*given, "rollout.max_tokens=9")
    assert (code, errors.count("rollout.max_tokens=9")) == (2, 1)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("optim.rl=1", "optim.rl is not a setting"),
        ("model.path=./nowhere", "'./nowhere': no such folder"),
        ("critic.lr=1", "critic.lr=1.0 would have no effect because grpo has no critic"),
        ("optim.num_minibatches=9", "does not divide the 8 episodes of a step"),
    ],
)
def test_dry_run_finds_what_would_stop_the_run(work, fails, policy, setting, expected):
    arguments = ["my_agent.py:agent", "--data", "tasks.jsonl", f"model.path={policy}", *FAST, setting]
    for dry in (["--dry-run"], []):
        code, errors = fails("train", *arguments, *dry)
        assert (code, errors.count(expected)) == (2, 1)
        assert not (work / "run").exists()


def test_dry_run_reads_the_chat_template(work, fails, policy):
    arguments = ["train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", str(policy), *FAST, "--dry-run"]
    (work / "no_tools.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    done = here(*arguments, "model.chat_template=no_tools.jinja", cwd=work)
    assert "prints no tools, tool calls" in done.stdout
    assert "model.tool_prompt=hermes" in done.stdout
    (work / "nothing.jinja").write_text("{{ messages | length }}")
    code, errors = fails(*arguments, "model.chat_template=nothing.jinja")
    assert (code, errors.count("model.chat_template='nothing.jinja'")) == (2, 1)


@pytest.mark.slow
def test_free_port_is_not_reserved_for_the_next_process(work, policy):
    done = rllm("train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", policy, *FAST, cwd=work)
    assert done.returncode == 0, done.stderr
    assert "port: 0\n" in (work / "run" / "config.yaml").read_text()


@pytest.mark.slow
def test_agent_is_resumed_from_its_checkpoint(work, policy):
    first = ["train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", policy]
    assert rllm(*first, *FAST, cwd=work).returncode == 0
    again = rllm("train", "--resume", "run", "num_steps=2", cwd=work)
    assert again.returncode == 0, again.stderr
    steps = [json.loads(line)["step"] for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "my_agent.py"], "use FILE.py:function"),
        (["train", "no_agent.py:agent"], "no_agent.py' does not exist: run this in its folder"),
        (["train", "my_agent.py:agnet"], "defines no 'agnet'; it has agent"),
        (
            ["train", "my_agent.py:agent", "optim.weight_deca=1"],
            "optim.weight_deca is not a setting; did you mean 'optim.weight_decay'?",
        ),
        (["train", "my_agent.py:agent", "optim.lr=fast"], "optim.lr='fast'"),
        (["train", "my_agent.py:agent", "rollout.group_size=1"], "rollout.group_size=1"),
        (["train", "my_agent.py:agent", "algorithm.name=grp0"], "did you mean 'grpo'?"),
        (["train", "my_agent.py:agent", "lr"], "use key=value"),
        (["train", "my_agent.py:agent", "optim.lr=.inf"], "optim.lr=inf"),
        (["train", "my_agent.py:agent", "gateway.port=99999"], "gateway.port=99999"),
        (["train", "my_agent.py:agent", "gateway.host=0.0.0.0"], "gateway.host='0.0.0.0'"),
        (
            ["train", "my_agent.py:agent", "model.path=m", "gateway.host=nohost.invalid"],
            "gateway.host='nohost.invalid'",
        ),
        (["train", "my_agent.py:agent"], "model.path is not set"),
        (["train", "my_agent.py:agent", "--model", "./no-model"], "no-model"),
    ],
)
def test_errors_are_reported_before_anything_starts(work, fails, arguments, message):
    code, errors = fails(*arguments, "--data", "tasks.jsonl")
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors


def test_error_in_an_environment_variable_is_attributed_to_it(work, fails, monkeypatch):
    monkeypatch.setenv("RLLM__ROLLOUT__GROUP_SIZE", "1")
    code, errors = fails("train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", "any")
    assert code == 2
    assert errors.startswith("rllm: environment: rollout.group_size=1: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"question": "a", "answer": "b"}\n{"question": \n', "tasks.jsonl, line 2, column"),
        ('{"question": "a"}\n', "agent needs 'answer', which is not a column"),
        ('{"question": "a", "answer": "b", "hint": "c"}\n', "does not take the column 'hint'"),
        ('{"question": "a", "answer": "b"}\n\n{"question": "a"}\n', "row 1 of tasks: agent needs 'answer'"),
        ('{"question": ' + "1" * 5000 + "}\n", "tasks.jsonl, line 1 cannot be read"),
        ("[1]\n", "tasks.jsonl, line 1 is a list"),
    ],
)
def test_invalid_data_error_names_the_file_and_line(work, fails, content, message):
    (work / "tasks.jsonl").write_text(content)
    code, errors = fails("train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", "any")
    assert code == 2
    assert message in errors


def test_missing_data_is_reported(work, fails):
    assert "--data is missing" in fails("train", "my_agent.py:agent")[1]
    code, errors = fails("train", "my_agent.py:agent", "--data", "none.jsonl")
    assert code == 2
    assert "'none.jsonl': no such file" in errors


@pytest.mark.slow
def test_invalid_data_is_reported_before_heavy_imports(work):
    (work / "my_agent.py").write_text("def agent(question, answer):\n    return 1.0\n")
    program = (
        "import sys\nfrom rllm.cli import main\n"
        "sys.argv = ['rllm', 'train', 'my_agent.py:agent', '--data', 'nowhere.jsonl']\n"
        "try:\n    main()\nfinally:\n    print({'torch', 'openai'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=work, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "set()\n")
    assert "'nowhere.jsonl': no such file" in done.stderr


def test_errors_distinguish_held_out_from_training_data(work, fails):
    (work / "held_out.jsonl").write_text('{"question": "a"}\n')
    code, errors = fails(
        "train", "my_agent.py:agent", "--data", "tasks.jsonl", "--val", "held_out.jsonl", "--model", "any"
    )
    assert code == 2
    assert errors.startswith("rllm: --val: row 0 of held_out: agent needs 'answer'")


def test_error_in_an_agent_file_shows_only_its_own_lines(work, fails):
    (work / "my_agent.py").write_text("import json\n\nvalue = json.loads('{')\n")
    code, errors = fails("train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", "any")
    assert code == 1
    assert "line 3, in <module>" in errors
    assert "JSONDecodeError" in errors
    assert "agent_file.py" not in errors


def test_syntax_error_in_an_agent_file_names_the_line(work, fails):
    (work / "my_agent.py").write_text(
        "import math\n\ndef agent(question, answer):\n    return float(answer in (question\n"
    )
    code, errors = fails("train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", "any")
    assert code == 2
    [head, place, *_, found] = errors.splitlines()
    assert head == f"rllm: {work / 'my_agent.py'} cannot be imported:"
    assert place == f'  File "{work / "my_agent.py"}", line 4'
    assert found == "SyntaxError: '(' was never closed"


def test_error_in_an_agent_module_shows_only_user_frames(work, fails):
    (work / "shop").mkdir()
    (work / "shop" / "prices.py").write_text("import json\n\ndef read():\n    return json.loads('{')\n")
    (work / "shop" / "agent.py").write_text("from shop import prices\n\nPRICES = prices.read()\n")
    code, errors = fails("train", "shop.agent:agent", "--data", "tasks.jsonl", "--model", "any")
    assert code == 1
    assert [line.split(", line ")[1] for line in errors.splitlines() if ", line " in line] == [
        "3, in <module>",
        "4, in read",
    ]
    assert errors.splitlines()[-1].startswith("json.decoder.JSONDecodeError")


def test_agent_may_be_in_a_package_of_the_current_folder(work, fails):
    (work / "shop").mkdir()
    (work / "shop" / "agent.py").write_text("def agent(question, answer):\n    return 1.0\n")
    code, errors = fails("train", "shop.agent:agent", "--data", "tasks.jsonl")
    assert (code, errors) == (
        2,
        "rllm: model.path is not set: name a model folder or hub id, such as model.path=Qwen/Qwen3-0.6B\n",
    )


def test_folder_without_a_run_cannot_be_resumed(work, fails):
    code, errors = fails("train", "my_agent.py:agent", "--data", "tasks.jsonl", "--resume", ".")
    assert code == 2
    assert errors == (
        "rllm: --resume .: there is no run (no config.yaml); "
        f"there are no runs in {work / 'runs'}; name one by its path, such as /path/to/runs/NAME\n"
    )


def test_class_is_rejected_as_an_agent_function(work, fails):
    (work / "my_agent.py").write_text("class Agent:\n    def __call__(self, question, answer):\n        return 1.0\n")
    code, errors = fails("train", "my_agent.py:Agent", "--data", "tasks.jsonl", "--model", "any")
    assert code == 2
    assert errors.startswith(
        "rllm: agent='my_agent.py:Agent' is a class, not a function; classes are trained from Python: "
    )


def test_agent_that_returns_text_requires_a_reward(work, fails, policy):
    (work / "my_agent.py").write_text("def agent(question, answer) -> str:\n    return answer\n")
    arguments = ["train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", str(policy), *FAST]
    code, errors = fails(*arguments)
    assert code == 2
    assert "my_agent.py:agent returns text (-> str)" in errors
    (work / "my_agent.py").write_text("def agent(question, answer):\n    return answer\n")
    code, errors = fails(*arguments)
    assert code == 1
    assert "8 x AgentError: agent returned '4'" in errors


def test_agent_file_that_exits_does_not_create_a_run(work, fails):
    (work / "my_agent.py").write_text("import sys\n\nsys.exit(0)\n")
    code, errors = fails("train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", "any")
    assert code == 1
    assert "SystemExit: 0" in errors


def test_full_disk_fails_without_a_traceback(work, fails, policy):
    (work / "run").mkdir()
    (work / "run" / "config.yaml.new").symlink_to("/dev/full")
    code, errors = fails("train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", str(policy), *FAST)
    assert code == 1
    assert "rllm: a file cannot be written or read: No space left on device" in errors
    assert "Traceback" not in errors


def test_run_folder_is_locked_by_one_process(work, fails, policy):
    from rllm.tracking.about import in_use

    (work / "run").mkdir()
    with in_use(work / "run"):
        code, errors = fails("train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", str(policy), *FAST)
    assert code == 2
    assert "in use by another process" in errors


def test_model_without_chat_template_is_rejected(work, fails, policy):
    from transformers import AutoTokenizer

    bare = work / "bare"
    bare.mkdir()
    for file in policy.iterdir():
        (bare / file.name).write_bytes(file.read_bytes())
    (bare / "chat_template.jinja").unlink()
    tokenizer = AutoTokenizer.from_pretrained(bare)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    code, errors = fails("train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", str(bare), *FAST)
    assert code == 2
    assert "has no chat template" in errors


def test_port_in_use_is_reported(work, fails, policy):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, errors = fails(
            "train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", str(policy), f"gateway.port={port}", *FAST
        )
    assert code == 2
    assert str(port) in errors


def test_run_folder_is_not_overwritten(work, fails, policy):
    (work / "run" / "checkpoints" / "step-000003").mkdir(parents=True)
    (work / "run" / "checkpoints" / "step-000003" / "trainer_state.json").write_text('{"step": 3}')
    code, errors = fails("train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", str(policy), *FAST)
    assert code == 2
    assert "already has a run: to continue it" in errors


def test_run_stops_with_the_reason_if_all_agents_fail(work, fails, policy):
    (work / "my_agent.py").write_text("def agent(question, answer):\n    raise ValueError('no idea')\n")
    code, errors = fails("train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", str(policy), *FAST)
    assert code == 1
    assert errors[errors.index("rllm: ") :].splitlines() == [
        "rllm: roll out: all 8 rollouts failed, so there is nothing to learn from:",
        "  8 x AgentError: agent raised ValueError: no idea (at my_agent.py:2)",
        f"Details of each: rllm explain {work / 'run'}",
        "No step is saved, so nothing is learned; run keeps its settings.",
        "Fix the code, then run the same command again.",
    ]


def test_command_can_be_repeated_after_an_agent_error(work, fails, policy):
    agent = (work / "my_agent.py").read_text()
    given = ["train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", str(policy), *FAST]
    (work / "my_agent.py").write_text("def agent(question, answer):\n    raise ValueError('no idea')\n")
    assert fails(*given)[0] == 1
    (work / "my_agent.py").write_text(agent)
    assert here(*given, cwd=work).returncode == 0


def test_resuming_with_other_tasks_is_rejected(work, fails, policy):
    given = ["my_agent.py:agent", "--data", "tasks.jsonl", "--val", "tasks.jsonl", "--model", policy, *FAST]
    assert here("train", *given, cwd=work).returncode == 0
    with (work / "tasks.jsonl").open("a") as file:
        file.write('{"question": "How many plums?", "answer": "4"}\n')
    errors = fails("train", "--resume", "run", "num_steps=2")[1]
    assert "--data was '2 tasks" in errors
    assert "--val was '2 tasks" in errors
    assert "_dataset" not in errors


@pytest.mark.slow
def test_ctrl_c_saves_the_last_complete_step_and_prints_resume_command(work, policy):
    many = ["num_steps=500", *FAST[1:]]
    arguments = ["train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", str(policy), *many]
    command = [sys.executable, "-m", "rllm", *arguments]
    with subprocess.Popen(command, cwd=work, stderr=subprocess.PIPE, text=True) as process:
        printed = []
        for line in process.stderr:
            printed.append(line)
            if line.startswith("step 2/500:"):
                process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    answer = "".join(printed)
    assert "Traceback" not in answer
    again = answer.split("Resume with: ")[1].splitlines()[0]
    [saved] = (work / "run" / "checkpoints").iterdir()
    steps_done = int(saved.name.removeprefix("step-"))
    assert steps_done >= 2
    resumed = here(*shlex.split(again.partition("rllm ")[2]), f"num_steps={steps_done + 1}", cwd=work)
    assert resumed.returncode == 0, resumed.stderr
    steps = [json.loads(line)["step"] for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, steps_done + 2))


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["train", "my_agent.py:agent", "--reward", "a.py:f", "--reward=b.py:f"], "--reward"),
        (["train", "my_agent.py:agent", "--val", "a.jsonl", "--data", "tasks.jsonl", "--val", "b.jsonl"], "--val"),
        (["eval", "my_agent.py:agent", "--n", "2", "-n4"], "--n"),
        (["sft", "tasks.jsonl", "--model", "a", "--model", "b"], "--model"),
        (["traces", "list", "--store", "a.db", "--store", "b.db"], "--store"),
    ],
)
def test_repeated_option_is_rejected(work, fails, command, option):
    code, errors = fails(*command)
    assert code == 2
    assert f"{option} is given 2 times" in errors


def test_options_that_take_several_values_may_be_repeated(work, fails):
    _, errors = fails("gateway", "--upstream", "http://127.0.0.1:1/v1", "--upstream", "nonsense://x")
    assert "times" not in errors


def test_held_out_tasks_that_are_trained_on_are_counted(work, policy, caplog):
    (work / "held_out.jsonl").write_text(
        '{"id": "7", "question": "How many figs?", "answer": "4"}\n{"question": "How many kiwis?", "answer": "4"}\n'
    )
    given = ["--data", "tasks.jsonl", "--val", "held_out.jsonl", "--model", policy]
    assert here("train", "my_agent.py:agent", *given, *FAST, "--dry-run", cwd=work).returncode == 0
    assert "1 of 2 held-out tasks" in caplog.text
    caplog.clear()
    row = {"question": "How many figs?", "answer": "4"}
    for name, number in (("train", 0), ("test", 7)):
        (work / f"{name}.jsonl").write_text(
            json.dumps({**row, "split": name, "extra_info": {"index": number, "split": name}})
        )
    named = ["--data", "train.jsonl", "--val", "test.jsonl", "--model", policy]
    (work / "any.py").write_text("def agent(**task):\n    return 1.0\n")
    assert here("train", "any.py:agent", *named, *FAST, "--dry-run", cwd=work).returncode == 0
    assert "1 of 1 held-out task " in caplog.text
    caplog.clear()
    for name, number in (("train", 0), ("test", 7)):  # as reasoning-gym does, generating one task from two seeds
        (work / f"{name}.jsonl").write_text(json.dumps({**row, "generated_by": {"seed": number}}))
    assert here("train", "any.py:agent", *named, *FAST, "--dry-run", cwd=work).returncode == 0
    assert "1 of 1 held-out task " in caplog.text
    caplog.clear()
    (work / "held_out.jsonl").write_text('{"question": "How many kiwis?", "answer": "4"}\n')
    assert here("train", "my_agent.py:agent", *given, *FAST, "--dry-run", cwd=work).returncode == 0
    assert "held-out" not in caplog.text
