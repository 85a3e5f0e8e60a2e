"""Cost of rollouts on Ray, and saturation of a gateway in front of many inference replicas.

    python benchmarks/scaling.py [--json] [--gateway-ms 0.7 --stream-ms 1.3] [--runner-ms 1.0]

The first part is measured: rollouts that take no time, on 1, 2 and 4 processes of Ray on this machine. It prints
rollouts per second, and the CPU milliseconds of a rollout in the trainer and in the process that makes it. The target
is 2 ms for both together; the baseline, `here`, is the runner without Ray. Without Ray, or with --runner-ms, this
part is left out.

The second part is simulated from these costs and those that benchmarks/gateway.py measures: agents that call without
pause, as many as 1, 8, 64 and 512 replicas have room for. A call passes a gateway process twice, each time for half
of its cost there, and each process handles one call at a time; every third answer ends a rollout, which costs time in
the single process of the runner. It prints the share of the replicas' time that is used with one gateway process, the
number of processes needed to use 95 % of it, and the share that is used with those and the runner. If the last share
is lower, the runner is the bottleneck, and its process takes a whole CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import random
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from rllm.engine.request import RolloutRequest
from rllm.engine.runner import RolloutRunner
from rllm.types import Episode, Step, Trajectory

NUM_ACTORS = (1, 2, 4)
NUM_ROLLOUTS = 2000
CONCURRENT = 256
NUM_STEPS = 3
REPLICAS = (1, 8, 64, 512)
SLOTS = 64
"""Concurrent answers of a replica."""
ANSWER_S = 8.0
"""Mean seconds of an answer: 400 tokens at 50 per second."""
ENOUGH = 0.95
ROUNDS = 4
"""Simulated answers of each agent."""


class Instant:
    """Source of rollouts with three steps and no model calls."""

    async def rollout(self, attempt: RolloutRequest) -> Episode:
        steps = [
            Step(prompt_ids=list(range(64)), response_ids=list(range(16)), logprobs=[-0.5] * 16)
            for _ in range(NUM_STEPS)
        ]
        path = Trajectory(reward=1.0, steps=steps, info={"pid": os.getpid()})
        return Episode(
            task=attempt.task,
            task_id=attempt.task_id,
            index=attempt.index,
            session_id=attempt.session_id,
            trajectories=[path],
        )


def opening() -> Any:
    return nullcontext(Instant())


def attempts(number: int) -> list[RolloutRequest]:
    return [RolloutRequest(task={"question": "What is 6 x 7?"}, task_id=f"task-{index}") for index in range(number)]


def cpu_of(pids: set[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(item.user + item.system for item in times)


async def measured(runner: RolloutRunner, kind: str) -> dict[str, Any]:
    warm = await runner.run(attempts(200))
    pids = {episode.trajectories[0].info["pid"] for episode in warm} - {os.getpid()}
    wall, here, there = time.perf_counter(), time.process_time(), cpu_of(pids)
    episodes = await runner.run(attempts(NUM_ROLLOUTS))
    wall, here, there = time.perf_counter() - wall, time.process_time() - here, cpu_of(pids) - there
    assert len({episode.task_id for episode in episodes if not episode.failed}) == NUM_ROLLOUTS, "a rollout was lost"
    return {
        "kind": kind,
        "rollouts_per_s": NUM_ROLLOUTS / wall,
        "trainer_ms": 1e3 * here / NUM_ROLLOUTS,
        "actors_ms": 1e3 * there / NUM_ROLLOUTS,
    }


def measure() -> list[dict[str, Any]]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    rows = [asyncio.run(measured(RolloutRunner(Instant(), max_concurrent=CONCURRENT), "here"))]
    if find_spec("ray") is None:
        return rows
    from rllm.config.schema import RayConfig
    from rllm.engine.ray_actors import RayRolloutRunner
    from rllm.engine.ray_cluster import joined

    sys.path.insert(0, str(Path(__file__).parent))  # so that Ray's processes can import this module
    import scaling

    with joined("local", num_cpus=max(NUM_ACTORS)):
        for number in NUM_ACTORS:
            spread = RayConfig(num_actors=number, start_timeout_s=600)
            with RayRolloutRunner(scaling.opening, spread=spread, max_concurrent=CONCURRENT) as runner:
                rows.append(asyncio.run(measured(runner, f"{number} on Ray")))
    return rows


@dataclass(frozen=True, kw_only=True)
class Costs:
    """CPU seconds of a call and of a rollout."""

    call: float
    """CPU seconds of a gateway process per call."""
    rollout: float
    """CPU seconds of the runner's process per rollout."""


def simulate(num_replicas: int, num_gateways: int, costs: Costs, seed: int = 0) -> float:
    """Return the share of the replicas' slots in use, with agents that call again as soon as they have an answer."""
    chance = random.Random(seed)
    num_agents = num_replicas * SLOTS
    free_at = [0.0] * num_gateways
    runner_free_at = 0.0
    # Next events: the time, the agent, and whether its request (0) or its answer (1) arrives at its gateway.
    events = [(chance.random() * ANSWER_S, agent, 0) for agent in range(num_agents)]
    heapq.heapify(events)
    begin, end = ANSWER_S, ANSWER_S * (1 + ROUNDS)
    at_work, answers = 0.0, [0] * num_agents
    while events[0][0] < end:
        now, agent, is_answer = heapq.heappop(events)
        gateway = agent % num_gateways
        done = free_at[gateway] = max(now, free_at[gateway]) + costs.call / 2
        if not is_answer:
            finished = done + chance.expovariate(1 / ANSWER_S)
            at_work += max(0.0, min(finished, end) - max(done, begin))
            heapq.heappush(events, (finished, agent, 1))
            continue
        answers[agent] += 1
        if answers[agent] % NUM_STEPS == 0:
            done = runner_free_at = max(done, runner_free_at) + costs.rollout
        heapq.heappush(events, (done, agent, 0))
    return at_work / (num_agents * (end - begin))


def gateways_needed(num_replicas: int, call: float) -> int:
    """Return the fewest gateway processes that keep the replicas busy, with a runner that costs nothing."""
    number = max(1, int(num_replicas * SLOTS / ANSWER_S * call))
    while simulate(num_replicas, number, Costs(call=call, rollout=0.0)) < ENOUGH:
        number += 1
    return number


def saturation(call_ms: dict[str, float], runner_ms: float) -> list[dict[str, Any]]:
    rows = []
    for num_replicas in REPLICAS:
        row: dict[str, Any] = {"replicas": num_replicas, "calls_per_s": num_replicas * SLOTS / ANSWER_S}
        row["runner_cpu"] = row["calls_per_s"] / NUM_STEPS * runner_ms / 1e3
        for kind, milliseconds in call_ms.items():
            costs = Costs(call=milliseconds / 1e3, rollout=runner_ms / 1e3)
            row[f"{kind}_busy"] = simulate(num_replicas, 1, costs)
            row[f"{kind}_gateways"] = gateways_needed(num_replicas, costs.call)
            row[f"{kind}_busy_then"] = simulate(num_replicas, row[f"{kind}_gateways"], costs)
        rows.append(row)
    return rows


def show_measured(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(
            f"{row['kind']:>10}: {row['rollouts_per_s']:7,.0f} rollouts/s, CPU per rollout: {row['trainer_ms']:.2f} ms in the "
            f"trainer, {row['actors_ms']:.2f} ms in its process"
        )


def show_simulated(rows: list[dict[str, Any]], call_ms: dict[str, float], runner_ms: float) -> None:
    costs = ", ".join(f"{value:g} ms per call ({kind})" for kind, value in call_ms.items())
    print(
        f"\nsimulated: {SLOTS} answers at a time per replica, {ANSWER_S:g} s each, {costs}, {runner_ms:.2f} ms per rollout"
    )
    for row in rows:
        shares = "; ".join(
            f"{kind}: {row[f'{kind}_busy']:4.0%} busy with 1 gateway process, {ENOUGH:.0%} takes "
            f"{row[f'{kind}_gateways']}, {row[f'{kind}_busy_then']:.0%} with the runner"
            for kind in call_ms
        )
        print(
            f"{row['replicas']:4} replicas, {row['calls_per_s']:5,.0f} calls/s, runner {row['runner_cpu']:.2f} CPUs; {shares}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--gateway-ms", type=float, default=0.7, help="CPU milliseconds of a call, see benchmarks/gateway.py"
    )
    parser.add_argument("--stream-ms", type=float, default=1.3, help="CPU milliseconds of a streamed call")
    parser.add_argument(
        "--runner-ms", type=float, help="CPU milliseconds of a rollout in the trainer, instead of measuring it"
    )
    arguments = parser.parse_args()
    measured_rows = measure() if arguments.runner_ms is None else []
    on_ray = [row for row in measured_rows if row["kind"] != "here"] or measured_rows
    runner_ms = arguments.runner_ms if arguments.runner_ms is not None else max(row["trainer_ms"] for row in on_ray)
    call_ms = {"JSON": arguments.gateway_ms, "streams": arguments.stream_ms}
    simulated = saturation(call_ms, runner_ms)
    if arguments.json:
        print(json.dumps({"measured": measured_rows, "simulated": simulated}))
        return
    show_measured(measured_rows)
    show_simulated(simulated, call_ms, runner_ms)


if __name__ == "__main__":
    main()
