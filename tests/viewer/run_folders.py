"""Run folders like those of a trainer, written without one: large ones, and one whose every text is an attack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from rllm.store.sqlite import SqliteTraceStore
from rllm.types import DRIFT_KEY, OUTCOME_KEY, StepCredit, Trace

ATTACK = "</pre></script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\"'><svg onload=hacked=1>{{7*7}}"
"""Attack that must be shown as text."""


def trace_of(session_id: str, number: int = 0, **fields: Any) -> Trace:
    """Return a call with three prompt tokens and two sampled ones by default."""
    found: dict[str, Any] = {
        "id": f"{session_id}-{number}",
        "call_id": f"{session_id}-{number}",
        "session_id": session_id,
        "model": "policy",
        "messages": [{"role": "user", "content": "How many figs?"}],
        "response": {"role": "assistant", "content": "Four"},
        "prompt_ids": [1, 2, 3],
        "response_ids": [4, 5],
        "logprobs": [-0.5, -0.25],
        "weight_version": 0,
        "finish_reason": "stop",
        "started_at": 1000.0 + number,
        "timings": {"total_s": 0.5},
    }
    return Trace(**{**found, **fields})


def outcome_of(trace: Trace, *, name: str = "agent", reward: float = 1.0, **fields: Any) -> dict[str, Any]:
    """Return the trainer's record of the outcome of a rollout of one call."""
    path = {"name": name, "reward": reward, "advantage": reward - 0.5, "dropped": None, "trainable": True, "tools": []}
    path |= {"num_tokens": len(trace.response_ids), "truncated": False, "steps": [{"id": trace.id}]}
    found = {"ended": None, "is_correct": reward > 0.5, "error": None, "warnings": [], "trajectories": [path]}
    return {**found, "metrics": {"timing/rollout_s": 0.75}, **fields}


def write_vocabulary(folder: Path, pieces: list[str]) -> None:
    """Write the file of a tokenizer, as in a checkpoint."""
    checkpoint = folder / "checkpoints/step-000001"
    checkpoint.mkdir(parents=True)
    vocab = {piece.replace(" ", "Ġ").replace("\n", "Ċ"): number for number, piece in enumerate(pieces)}
    found = {"model": {"type": "BPE", "vocab": vocab}, "decoder": {"type": "ByteLevel"}, "added_tokens": []}
    (checkpoint / "tokenizer.json").write_text(json.dumps(found))


def write_metrics(folder: Path, num_steps: int, **more: float) -> None:
    rows = [
        {"step": step, "rollout/reward": step / num_steps, "policy/entropy": 1 / step, "timing/step_s": 1.0, **more}
        for step in range(1, num_steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def large_run(folder: Path, *, num_episodes: int) -> Path:
    """Write a run with 100 rollouts per step, each of one short call."""
    folder.mkdir(parents=True)
    write_metrics(folder, max(num_episodes // 100, 1))
    with SqliteTraceStore(folder / "traces.db") as store:
        waiting = []
        for number in range(num_episodes):
            name, step = f"s{number:06d}", number // 100
            trace = trace_of(name)
            about = {"task_id": f"task {number // 4}@{step}.0.0", "index": number % 4, "split": "train"}
            outcome = outcome_of(trace, reward=float(number % 2))
            waiting.append(store.open_session(name, {**about, "training_step": step, OUTCOME_KEY: outcome}))
            waiting.append(store.add([trace]))
            if len(waiting) > 1000:
                for write in waiting:
                    write.result(60)
                waiting = []
        for write in waiting:
            write.result(60)
    return folder


def long_run(folder: Path, *, num_tokens: int) -> Path:
    """Write a run of one rollout of one call, with a very long answer."""
    folder.mkdir(parents=True)
    write_metrics(folder, 1)
    write_vocabulary(folder, [*(f" word{number}" for number in range(99)), ".\n"])
    ids = [99 if place % 17 == 16 else place % 99 for place in range(num_tokens)]
    trace = trace_of(
        "long",
        prompt_ids=ids[:200],
        response_ids=ids[200:],
        logprobs=[-(place % 40) / 10 for place in range(num_tokens - 200)],
    )
    credit = StepCredit(
        trace_id=trace.id,
        session_id="long",
        training_step=0,
        episode_id="long:0",
        trajectory_name="agent",
        reward=1.0,
        advantage=0.5,
        trainer_logprobs=[value - 0.001 for value in trace.logprobs],
    )
    about = {"task_id": "long@0.0.0", "index": 0, "split": "train", "training_step": 0, OUTCOME_KEY: outcome_of(trace)}
    with SqliteTraceStore(folder / "traces.db") as store:
        store.open_session("long", about).result(60)
        store.add([trace]).result(60)
        store.annotate([credit]).result(60)
    return folder


def segmented_calls() -> list[Trace]:
    """Return two calls, the second of which delegates; a sub-agent's; a summary without tools; two that continue it."""
    work, report = "Find the price of the café au lait.", "The café au lait costs 6.20 euro, says the menu."
    call = {"id": "c", "function": {"name": "task", "arguments": json.dumps({"prompt": work})}}
    summary = "The user wants two prices added; the crème brûlée costs 42.85 euro, and the other is on the menu."
    found = [{"role": "user", "content": "What do they cost?"}, {"role": "assistant", "content": "I look."}]
    delegated = {"role": "assistant", "content": None, "tool_calls": [call]}
    answers = [{"role": "assistant", "content": text} for text in (report, summary)]
    tools = [{"type": "function", "function": {"name": "task"}}]
    asked = [[{"role": "user", "content": text}] for text in (work, "Sum up.", f"So far: {summary}")]
    return [
        trace_of("s", messages=found[:1], response=found[1], tools=tools),
        trace_of(
            "s", 1, parent_id="s-0", messages=found, response=delegated, prompt_ids=[1, 2, 3, 4, 5, 6], tools=tools
        ),
        trace_of("s", 2, messages=asked[0], response=answers[0], prompt_ids=[7], tools=tools),
        trace_of("s", 3, messages=asked[1], response=answers[1], prompt_ids=[8]),
        trace_of("s", 4, messages=asked[2], prompt_ids=[9], tools=tools),
        trace_of("s", 5, parent_id="s-4", messages=found, prompt_ids=[9, 4, 5, 6], tools=tools),
    ]


def segmented_run(folder: Path) -> Path:
    """Write a run of one rollout that compacts its history and delegates."""
    folder.mkdir(parents=True)
    write_metrics(folder, 1)
    calls = segmented_calls()
    outcome = outcome_of(calls[0])
    outcome["trajectories"][0] |= {"steps": [{"id": call.id} for call in calls], "num_tokens": 12}
    about = {"task_id": "prices@0.0.0", "index": 0, "split": "train", "training_step": 0, OUTCOME_KEY: outcome}
    with SqliteTraceStore(folder / "traces.db") as store:
        store.open_session("s", about).result(60)
        store.add(calls).result(60)
    return folder


def hostile_run(parent: Path) -> Path:
    """Write a run in which every name and text of a model, an agent or a folder is an attack."""
    folder = parent / ATTACK.replace("/", "∕")
    folder.mkdir(parents=True)
    write_metrics(folder, 2, **{f"dropped/{ATTACK}": 1.0, f"signal/{ATTACK}": 1.0})
    write_vocabulary(folder, ["a", ATTACK, "b", "c", "d", "e"])
    settings = {"num_steps": 9, "model": {"path": ATTACK}, "algorithm": {"name": ATTACK}, "seed": ATTACK}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    task = {"split": "train", "task_id": ATTACK, "task": {ATTACK: ATTACK, "list": [ATTACK]}}
    (folder / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    tool = {"id": ATTACK, "type": "function", "function": {"name": ATTACK, "arguments": json.dumps({"x": ATTACK * 3})}}
    first = trace_of(
        "bad",
        messages=[{"role": ATTACK, "name": ATTACK, "content": ATTACK}, {"role": "user", "content": [{"type": ATTACK}]}],
        response={"role": "assistant", "content": ATTACK, "reasoning_content": ATTACK, "tool_calls": [tool, ATTACK]},
        finish_reason=ATTACK,
        prompt_ids=[1, 1, 2],
        response_ids=[1, 3],
    )
    again = [*first.messages, {**first.response, "content": "edited"}, {"role": "tool", "content": ATTACK}]
    second = trace_of("bad", 1, messages=again, prompt_ids=[1, 1, 2, 4, 1, 5], metadata={DRIFT_KEY: ATTACK})
    third = trace_of("bad", 2, response_ids=[], logprobs=[], error=ATTACK, messages=[{"content": {"odd": ATTACK}}])
    outcome = outcome_of(first, name=ATTACK, warnings=[ATTACK])
    outcome["error"] = {"type": ATTACK, "message": ATTACK, "traceback": ATTACK}
    outcome["ended"] = ATTACK
    outcome["trajectories"][0] |= {"tools": [ATTACK], "dropped": ATTACK}
    outcome["trajectories"].append({**outcome["trajectories"][0], "dropped": " "})
    outcome["trajectories"][0]["steps"] = [{"id": first.id, "reward": 1.0}, {"id": second.id, "drift": ATTACK}]
    with SqliteTraceStore(folder / "traces.db") as store:
        for name, task in (("bad", f"{ATTACK}@0.0.0"), ("worse", f"{ATTACK}@0.0.0")):
            about = {"task_id": task, "index": 0, "split": "train", "training_step": 0, OUTCOME_KEY: outcome}
            store.open_session(name, about).result(60)
        store.add([first, second, third]).result(60)
        store.add([trace_of("worse", response_ids=[1, 1])]).result(60)
    return folder
