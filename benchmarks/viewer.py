"""CPU and memory of `rllm view` for the pages of a large run: 10,000 rollouts, and one trajectory of 32,000 tokens.

    python benchmarks/viewer.py [--rollouts 10000] [--tokens 32000] [--json]

The runs are made by the writers that training uses, and each is shown by its own server. A page is requested once
from a server with empty caches (the first page of the store pays for reading it), and then ten more times, of which
the fastest counts. The baseline is the same page of a run of 100 rollouts, or of a trajectory of 1,000 tokens: the
ratio of a page whose cost does not grow stays near 1. CPU seconds are those of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import yaml

from rllm.algorithms.batch import Batch, StepSpan, TokenSequence
from rllm.algorithms.grpo import GRPO
from rllm.backends.base import UpdateResult
from rllm.store import open_store
from rllm.store.base import TraceStore
from rllm.tracking.base import JSONLTracker
from rllm.trainer.batch_log import BatchLog
from rllm.trainer.episode_records import keep_outcomes
from rllm.types import Episode, Step, StepCredit, Trace, Trajectory

PER_STEP, GROUP = 100, 4
FEW_ROLLOUTS, FEW_TOKENS = 100, 1000
TOKENS = 60
"""Tokens of each rollout in the run of many rollouts."""
OF_TOKENS = ["episode", "tokens", "tokens by ratio", "tokens as table", "values of tokens", "group", "batch"]
"""Pages that show a whole trajectory."""
TARGET_S = 2.0
"""Seconds within which a page of 10,000 rollouts must open."""
REPEATS = 10


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one page."""

    first_s: float
    again_s: float
    first_cpu_s: float
    again_cpu_s: float
    num_bytes: int


def call_of(session_id: str, number: int, *, prompt: list[int], answer: list[int]) -> Trace:
    text = " ".join(f"word{token % 97}" for token in answer[:40])
    name = f"{session_id}-{number}"
    return Trace(
        id=name,
        call_id=name,
        session_id=session_id,
        model="policy",
        messages=[{"role": "user", "content": f"How many figs are in box {session_id}?"}],
        response={"role": "assistant", "content": text},
        prompt_ids=prompt,
        response_ids=answer,
        logprobs=[-(token % 40) / 10 for token in answer],
        finish_reason="stop",
        weight_version=0,
        started_at=time.time(),
        timings={"total_s": 0.5, "queue_s": 0.1},
    )


def episode_of(calls: list[Trace], *, task_id: str, index: int) -> Episode:
    steps = [
        Step(
            id=call.id,
            prompt_ids=call.prompt_ids,
            response_ids=call.response_ids,
            logprobs=call.logprobs,
            chat_completions=[*call.messages, call.response],
        )
        for call in calls
    ]
    path = Trajectory(name="agent", reward=float(index % 2), steps=steps)
    return Episode(
        task_id=task_id,
        index=index,
        session_id=calls[0].session_id,
        trajectories=[path],
        is_correct=bool(index % 2),
        metrics={"timing/rollout_s": 1.5},
    )


def roll_out(store: TraceStore, step: int, number: int, num_tokens: int) -> tuple[Episode, list[Trace]]:
    """Return two calls of one conversation, as the gateway and the join store them."""
    session_id, task_id, index = f"s{step:05d}-{number:03d}", f"task {number // GROUP}@{step}.0.0", number % GROUP
    prompt = [(number // GROUP * 7 + place) % 1000 for place in range(64)]
    first = call_of(session_id, 0, prompt=prompt, answer=[place % 900 for place in range(num_tokens // 2)])
    further = [*first.prompt_ids, *first.response_ids, 1, 2, 3]
    second = call_of(
        session_id, 1, prompt=further, answer=[place % 800 for place in range(num_tokens - num_tokens // 2)]
    )
    store.open_session(session_id, {"task_id": task_id, "index": index, "split": "train", "training_step": step})
    store.add([first])
    store.add([second])
    return episode_of([first, second], task_id=task_id, index=index), [first, second]


def credit_of(episode: Episode, call: Trace, step: int) -> StepCredit:
    return StepCredit(
        trace_id=call.id,
        session_id=call.session_id,
        training_step=step,
        episode_id=episode.id,
        trajectory_name="agent",
        reward=1.0,
        advantage=0.5,
        trainer_logprobs=[value - 0.001 for value in call.logprobs],
    )


async def write_step(
    store: TraceStore, tracker: JSONLTracker, log: BatchLog, *, step: int, num_rollouts: int, num_tokens: int
) -> None:
    """Write one training step like the trainer: traces, credits, outcomes, metrics and the batch."""
    made = [roll_out(store, step, number, num_tokens) for number in range(num_rollouts)]
    decided = [credit_of(episode, call, step) for episode, calls in made for call in calls]
    await asyncio.wrap_future(store.annotate(decided))
    await keep_outcomes(store, [episode for episode, _ in made], decided)
    batch = Batch.of([sequence_of(calls) for _, calls in made])
    batch.advantages = torch.full((batch.num_tokens,), 0.5)
    numbers = torch.rand(batch.num_tokens)
    log.write(step + 1, batch, UpdateResult(entropies=numbers, ratios=1 + numbers / 10), GRPO())
    tracker.log(step + 1, {"rollout/reward": step / 100, "policy/entropy": 1.0, "timing/step_s": 1.0})


def sequence_of(calls: list[Trace]) -> TokenSequence:
    last = calls[-1]
    spans = [
        StepSpan(step_id=call.id, start=len(call.prompt_ids), stop=len(call.prompt_ids) + len(call.response_ids))
        for call in calls
    ]
    logprobs = [value for call in calls for value in call.logprobs]
    return TokenSequence(ids=[*last.prompt_ids, *last.response_ids], spans=spans, logprobs=logprobs)


def make_run(folder: Path, *, num_rollouts: int, num_tokens: int = 60) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"num_steps": 10**6}))
    tracker, log = JSONLTracker(folder), BatchLog(folder, steps_done=0, keep=3)
    with open_store(str(folder / "traces.db")) as store:
        for step in range(-(-num_rollouts // PER_STEP)):
            count = min(PER_STEP, num_rollouts - step * PER_STEP)
            asyncio.run(write_step(store, tracker, log, step=step, num_rollouts=count, num_tokens=num_tokens))
    tracker.close()
    return folder


def pages_of(num_rollouts: int) -> dict[str, str]:
    """Return the address of each page by name; pages of a step show the newest one, whose batch was kept."""
    step = -(-num_rollouts // PER_STEP)
    session = f"s{step - 1:05d}-000"
    return {
        "runs": "/",
        "run": "/run/large",
        "step": f"/run/large/step/{step}",
        "group": f"/run/large/group?task=task%200%40{step - 1}.0.0",
        "batch": f"/run/large/batch/{step}",
        "time": f"/run/large/time/{step}",
        "rollouts": "/run/large/rollouts",
        "rollouts by reward": "/run/large/rollouts?reward=%3E0.5&sort=reward",
        "rollouts by text": "/run/large/rollouts?text=word13",
        "drift": "/run/large/drift",
        "drift of one": f"/run/large/drift/{session}",
        "episode": f"/run/large/episode/{session}",
        "tokens": f"/run/large/tokens/{session}",
        "tokens by ratio": f"/run/large/tokens/{session}?overlay=ratio",
        "tokens as table": f"/run/large/tokens/{session}?view=table",
        "values of tokens": f"/run/large/tokens/{session}/data.json",
        "is it live": "/run/large/pulse.json",
    }


@contextlib.contextmanager
def viewer(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "rllm", "view", str(folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = re.match(r".*(http://[^/]+)/", server.stdout.readline())
        assert address is not None, "the viewer did not start"
        yield address[1], psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait()


def measure(folder: Path, pages: dict[str, str]) -> dict[str, Cost]:
    with viewer(folder) as (address, process):

        def opened(path: str) -> tuple[float, float, int]:
            times, started = process.cpu_times(), time.perf_counter()
            with urllib.request.urlopen(f"{address}{path}") as answer:
                size = len(answer.read())
            after = process.cpu_times()
            return time.perf_counter() - started, after.user + after.system - times.user - times.system, size

        costs = {}
        for name, path in pages.items():
            first_s, first_cpu_s, size = opened(path)
            again = [opened(path) for _ in range(REPEATS)]
            costs[name] = Cost(
                first_s=first_s,
                again_s=min(seconds for seconds, _, _ in again),
                first_cpu_s=first_cpu_s,
                again_cpu_s=sum(cpu_s for _, cpu_s, _ in again) / REPEATS,
                num_bytes=size,
            )
        return costs


def compare(folder: Path, sizes: dict[str, tuple[int, int]], pages: list[str]) -> dict[str, dict[str, Cost]]:
    """Return the cost of each page by name, for runs with these numbers of rollouts and tokens."""
    costs = {}
    for name, (num_rollouts, num_tokens) in sizes.items():
        run = make_run(folder / name / "large", num_rollouts=num_rollouts, num_tokens=num_tokens)
        known = pages_of(num_rollouts)
        costs[name] = measure(run, {page: known[page] for page in pages})
    return costs


def show(title: str, costs: dict[str, dict[str, Cost]]) -> None:
    print(f"\n{title}")
    print(f"{'page':20} {'first':>9} {'CPU':>9} {'again':>9} {'CPU':>9} {'baseline':>10} {'ratio':>6} {'size':>9}")
    for name, large in costs["large"].items():
        small = costs["small"][name]
        print(
            f"{name:20} {large.first_s:7.3f} s {large.first_cpu_s:7.3f} s {large.again_s:7.3f} s {large.again_cpu_s:7.3f} s "
            f"{small.again_s:8.3f} s {large.again_s / small.again_s:6.1f} {large.num_bytes / 1e3:6.0f} KB"
        )
    slowest = max(cost.first_s for cost in costs["large"].values())
    print(f"slowest page, first time: {slowest:.2f} s, {slowest / TARGET_S:.0%} of the target of {TARGET_S:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rollouts = compare(
            Path(folder, "rollouts"),
            {"small": (FEW_ROLLOUTS, TOKENS), "large": (options.rollouts, TOKENS)},
            list(pages_of(1)),
        )
        tokens = compare(Path(folder, "tokens"), {"small": (1, FEW_TOKENS), "large": (1, options.tokens)}, OF_TOKENS)
    if options.json:
        figures = {
            kind: {
                size: {
                    name: {key: round(value, 4) for key, value in vars(cost).items()} for name, cost in pages.items()
                }
                for size, pages in costs.items()
            }
            for kind, costs in (("rollouts", rollouts), ("tokens", tokens))
        }
        print(json.dumps(figures))
        return
    show(f"{options.rollouts:,} rollouts; baseline: {FEW_ROLLOUTS}", rollouts)
    show(f"a trajectory of {options.tokens:,} tokens; baseline: {FEW_TOKENS:,}", tokens)


if __name__ == "__main__":
    main()
