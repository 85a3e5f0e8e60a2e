"""The Berkeley Function-Calling Leaderboard, from its published files to a score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rllm.data.benchmark_rows import bfcl_task
from rllm.data.benchmarks import BENCHMARKS, messages_of, read_benchmark, read_benchmark_file
from rllm.errors import ConfigError
from rllm.rewards.function_call_reward import function_call_reward_fn

PROPERTIES = {
    "base": {"type": "integer", "description": "Base."},
    "ratio": {"type": "float", "description": "Ratio."},
    "units": {"type": "string", "default": "cm"},
    "points": {"type": "tuple", "items": {"type": "float"}},
    "options": {"type": "dict", "properties": {"name": {"type": "any"}}},
    "people": {"type": "array", "items": {"type": "dict", "properties": {"age": {"type": "integer"}}}},
}
FUNCTION = {
    "name": "shape.area",
    "description": "Area of a shape.",
    "parameters": {"type": "dict", "properties": PROPERTIES, "required": ["base"]},
}


def row(identity: str, *functions: dict[str, Any]) -> dict[str, Any]:
    question = [[{"role": "user", "content": "How large is it?"}]]
    return {"id": identity, "question": question, "function": list(functions or [FUNCTION])}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return path


def test_answers_are_joined_and_names_are_made_valid(tmp_path: Path) -> None:
    file = write(tmp_path / "BFCL_v4_parallel_multiple.json", row("parallel_multiple_0"), row("parallel_multiple_10"))
    accepted = [{"shape.area": {"base": [3], "units": ["", "cm"]}}]
    answers = [{"id": f"parallel_multiple_{number}", "ground_truth": accepted} for number in (10, 0)]
    write(tmp_path / "possible_answer" / file.name, *answers)
    task, other = read_benchmark_file("bfcl", file)
    assert (task["id"], task["category"], other["category"]) == ("parallel_multiple_0", *["parallel_multiple"] * 2)
    assert task["ground_truth"] == [{"shape_area": {"base": [3], "units": ["", "cm"]}}]
    [tool] = task["tools"]
    assert (tool["type"], tool["function"]["name"]) == ("function", "shape_area")
    parameters = tool["function"]["parameters"]
    assert (parameters["type"], parameters["required"]) == ("object", ["base"])
    kinds = {name: schema["type"] for name, schema in parameters["properties"].items()}
    assert list(kinds.values()) == ["integer", "number", "string", "array", "object", "array"]
    assert parameters["properties"]["options"]["properties"]["name"] == {"type": "string"}
    assert parameters["properties"]["people"]["items"]["type"] == "object"
    assert messages_of(BENCHMARKS["bfcl"], task) == [{"role": "user", "content": "How large is it?"}]


def test_hub_has_a_file_for_each_category(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def local(source: str, names: tuple[str, ...]) -> list[Path]:
        assert source == "gorilla-llm/Berkeley-Function-Calling-Leaderboard"
        for name in names:
            category = name.removesuffix(".json").rpartition("BFCL_v3_")[2]
            answer = {"id": f"{category}_0", "ground_truth": [{"shape.area": {"base": [3]}}]}
            write(tmp_path / name, answer if "/" in name else row(f"{category}_0"))
        return [tmp_path / name for name in names]

    monkeypatch.setattr("rllm.data.benchmarks.hub_files", local)
    tasks = read_benchmark("bfcl")
    counts = {task["category"]: len(task["ground_truth"]) for task in tasks}
    assert counts == {"simple": 1, "multiple": 1, "parallel": 1, "parallel_multiple": 1, "irrelevance": 0}
    assert len(read_benchmark("bfcl", limit=2)) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("simple_0")], "'simple_0' has no accepted calls"),
        ([{"question": []}], "each line is an object with an id"),
        ([{**row("multi_turn_0"), "question": [[], []], "ground_truth": [{"f": {}}]}], "has 2 turns"),
    ],
)
def test_files_in_another_format_are_rejected(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_benchmark_file("bfcl", write(tmp_path / "BFCL_v4_x.json", *rows))


ACCEPTED = {
    "base": [3],
    "ratio": ["", 0.5],
    "units": ["", "square cm"],
    "points": ["", [1.5, 2.5]],
    "options": ["", {"name": ["a b"], "size": ["", 1]}],
    "people": ["", [{"age": [7]}]],
}


@pytest.mark.parametrize(
    ("arguments", "is_correct"),
    [
        ({"base": 3}, True),
        ({"base": 4}, False),
        ({"base": 3.0}, False),  # of another type
        ({"base": True}, False),
        ({}, False),
        ({"base": 3, "other": 1}, False),
        ({"base": 3, "ratio": 0.5}, True),
        ({"base": 3, "ratio": 1}, False),
        ({"base": 3, "units": "Square-CM."}, True),
        ({"base": 3, "units": "m"}, False),
        ({"base": 3, "points": [1.5, 2.5]}, True),
        ({"base": 3, "points": [2.5, 1.5]}, False),
        ({"base": 3, "points": ["1.5", "2.5"]}, False),
        ({"base": 3, "points": []}, True),  # counts as left out
        ({"base": 3, "options": {"name": "A B"}}, True),
        ({"base": 3, "options": {"name": "a b", "size": 1}}, True),
        ({"base": 3, "options": {"size": 1}}, False),
        ({"base": 3, "options": {"name": "a b", "more": 1}}, False),
        ({"base": 3, "people": [{"age": 7}]}, True),
        ({"base": 3, "people": [{"age": 7}, {"age": 7}]}, False),
        ({"base": 3, "people": [7]}, False),
        ("{broken", False),
    ],
)
def test_arguments_are_compared_with_accepted_values(arguments: Any, is_correct: bool) -> None:
    task = bfcl_task({**row("simple_0"), "ground_truth": [{"shape.area": ACCEPTED}]})
    verdict = function_call_reward_fn(task, [{"name": "shape_area", "arguments": arguments}])
    assert (verdict.is_correct, verdict.metadata["simple"]) == (is_correct, float(is_correct))


def calls(*bases: float, name: str = "shape_area") -> list[dict[str, Any]]:
    return [{"name": name, "arguments": {"base": base}} for base in bases]


@pytest.mark.parametrize(
    ("accepted", "action", "is_correct"),
    [
        ([1, 2], calls(2, 1), True),
        ([1, 2], calls(1, 1), False),
        ([1, 2], calls(1), False),
        ([1], calls(1, 1), False),
        ([1], calls(1, name="area"), False),
        ([1], "The base is 1.", False),
        ([], "None of these functions helps.", True),
        ([], [], True),
        ([], calls(1), False),
    ],
)
def test_number_of_calls_matters_and_their_order_does_not(accepted: list[int], action: Any, is_correct: bool) -> None:
    truth = [{"shape.area": {"base": [base]}} for base in accepted]
    task = bfcl_task({**row("parallel_0"), "ground_truth": truth})
    assert function_call_reward_fn(task, action).is_correct is is_correct
