"""`rllm eval NAME` and `rllm train NAME`, with rows from a file or generated."""

import json
import sys

import pytest

from rllm import cli
from rllm.testing.scripted import ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer

from .conftest import as_a_program

ROWS = [{"question": f"What is {n} + {n}?", "answer": f"Twice.\n#### {2 * n}"} for n in range(1, 5)]


@pytest.fixture
def server():
    with ScriptedServer(ScriptedEngine(lambda messages: r"It is \boxed{4}."), model="big") as server:
        yield server


def report_of(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rllm", "eval", *arguments, "--json"])
    with as_a_program(), pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    assert ended.value.code in (0, None), printed.err
    return json.loads(printed.out)


def test_data_file_replaces_the_hub(work, server, monkeypatch, capsys):
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    arguments = ["gsm8k", "--data", "rows.jsonl", "--base-url", server.base_url, "--out", "out", "--limit", "3"]
    report = report_of([*arguments, "sampling.max_tokens=50"], monkeypatch, capsys)
    assert (report["accuracy"]["value"], report["num_rollouts"]) == (pytest.approx(1 / 3), 3)
    assert {(asked["temperature"], asked["max_tokens"]) for asked in server.requests} == {(0.0, 50)}
    [asked] = [asked for asked in server.requests if "1 + 1" in asked["messages"][0]["content"]]
    assert asked["messages"][0]["content"].endswith("final answer in \\boxed{}.")
    assert json.loads((work / "out" / "evaluation.json").read_text())["agent"] == "gsm8k"


def test_instructions_are_counted_over_all_tasks(work, monkeypatch, capsys):
    pytest.importorskip("langdetect")
    kinds = ["punctuation:no_comma", "detectable_format:title", "startend:quotation"]
    rows = [
        {"key": number, "prompt": "Write.", "instruction_id_list": kinds[:number], "kwargs": [{}] * number}
        for number in (1, 3)
    ]
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ScriptedServer(ScriptedEngine(lambda messages: "*<<A title>>*"), model="big") as server:
        report = report_of(["ifeval", "--data", "rows.jsonl", "--base-url", server.base_url], monkeypatch, capsys)
    assert report["accuracy"]["value"] == 0.5
    assert report["metrics"]["accuracy of instructions"] == 3 / 4
    assert report["metrics"]["accuracy of instructions, loose"] == 3 / 4


def test_default_agent_offers_tools(work, monkeypatch, capsys):
    function = {"name": "area.of", "description": "", "parameters": {"type": "dict", "properties": {}, "required": []}}
    rows = [
        {
            "id": f"{category}_0",
            "question": [[{"role": "user", "content": category}]],
            "function": [function],
            "ground_truth": [] if category == "irrelevance" else [{"area.of": {}}],
        }
        for category in ("simple", "irrelevance")
    ]
    (work / "rows.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    call = [{"id": "1", "type": "function", "function": {"name": "area_of", "arguments": "{}"}}]
    with ScriptedServer(
        ScriptedEngine(lambda messages: {"role": "assistant", "content": None, "tool_calls": call}), model="big"
    ) as server:
        report = report_of(["bfcl", "--data", "rows.json", "--base-url", server.base_url], monkeypatch, capsys)
    assert report["metrics"] == {"irrelevance": 0.0, "simple": 1.0}
    assert [asked["tools"][0]["function"]["name"] for asked in server.requests] == ["area_of"] * 2


def test_reward_of_the_user_replaces_the_scorer(work, server, monkeypatch, capsys):
    (work / "mine.py").write_text("def judge(task, answer):\n    return 0.25, {'length': len(answer)}\n")
    arguments = ["arithmetic", "--reward", "mine.py:judge", "--base-url", server.base_url, "--limit", "2"]
    report = report_of(arguments, monkeypatch, capsys)
    assert report["mean_reward"] == 0.25
    assert report["metrics"] == {"length": len(r"It is \boxed{4}.")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "gsm8", "--model", "any"], "did you mean 'gsm8k'?"),
        (["train", "countdwn", "--model", "any"], "did you mean 'countdown'?"),
        (["train", "math500", "--model", "any"], "--split train: dataset 'math500' has the splits test"),
        (["eval", "gsm8k", "--data", "tasks.jsonl", "--model", "any"], "row 0 of tasks.jsonl: there is no '####'"),
        (["eval", "gsm8k", "--data", "tasks.jsonl", "--split", "test", "--model", "any"], "is a file, which has no"),
    ],
)
def test_errors_name_the_mistake(work, fails, arguments, message):
    code, errors = fails(*arguments)
    assert (code, message in errors) == (2, True), errors


def test_benchmark_can_be_trained_on(work, policy, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rllm", "train", "countdown", "--model", str(policy), "--dry-run"])
    with as_a_program(), pytest.raises(SystemExit):
        cli.main()
    assert "1000 tasks" in capsys.readouterr().out.replace(",", "")
