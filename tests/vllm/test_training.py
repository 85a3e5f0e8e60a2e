"""The demo's agent trained with a real vLLM as sampler: only `model.engine=vllm` differs from the embedded one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rllm.cli.training import lead_to_gateway
from rllm.demo.tasks import demo_policy, shop_tasks
from rllm.errors import WeightSyncError
from rllm.inference.local.loading import load_model
from rllm.store import open_store
from rllm.testing.tiny_policy import TinyPolicyRecipe
from rllm.trainer.agent_trainer import AgentTrainer, TrainResult
from rllm.trainer.config import load_config
from rllm.types import DRIFT_KEY, Episode, Trace

from .conftest import ARGUMENTS, START_S, Servers

pytestmark = pytest.mark.vllm
RECIPE = TinyPolicyRecipe(hidden_size=128, intermediate_size=384)
"""The demo's policy, with heads of 32."""
NUM_STEPS, KILLED_IN_STEP = 12, 4
ROUNDING = 1e-4


class Killer:
    """A tracker that kills the server in the middle of a step's rollouts, as a machine out of memory would."""

    def __init__(self, in_step: int) -> None:
        self.in_step = in_step
        self.num_steps = 0
        self.killed: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "timing/step_s" in metrics:
            self.num_steps = step

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        """Ignore episodes."""

    def progress(self, phase: str, done: int, total: int) -> None:
        if phase == "roll out" and self.num_steps == self.in_step - 1 and done == total // 2 and not self.killed:
            for child in psutil.Process().children(recursive=True):
                if "serve" in child.cmdline() and "supervisor.py" not in " ".join(child.cmdline()):
                    child.kill()
                    self.killed.append(child.pid)

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def own_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def trained(run_dir: Path, *settings: str, tracker: Any = None) -> tuple[AgentTrainer, TrainResult]:
    """Train the agent of the demo, with fewer steps."""
    config = load_config(
        [
            *(f"num_steps={NUM_STEPS}", "tasks_per_step=8", "rollout.group_size=8", "rollout.timeout_s=1800"),
            *("optim.lr=1e-3", "optim.schedule=linear", "eval.every=0", "save_every=0", "trackers=[jsonl]"),
            *(f"run_dir={run_dir}", *settings),
        ]
    )
    port = lead_to_gateway(config)
    from rllm.demo import agent  # creates its client on import

    config.model.path = str(demo_policy(agent.SYSTEM, agent.TOOLS, recipe=RECIPE))
    agent.client = agent.OpenAI()
    trainer = AgentTrainer(
        agent_run_func=agent.shop_assistant,
        train_dataset=shop_tasks(1000, seed=0),
        val_dataset=shop_tasks(100, seed=-1),
        config=config,
        trackers=[] if tracker is None else [tracker],
    )
    trainer.config.gateway.port = port
    return trainer, trainer.train()


def test_demo_agent_learns_as_well_as_with_the_embedded_sampler(
    servers: Servers, vllm_command: str, tmp_path: Path, own_environment: None
) -> None:
    servers.close()
    _, embedded = trained(tmp_path / "embedded")
    killer = Killer(KILLED_IN_STEP)
    trainer, served = trained(
        tmp_path / "served",
        *("model.engine=vllm", f"vllm.command={vllm_command}", f"vllm.args={json.dumps(ARGUMENTS)}"),
        f"vllm.start_timeout_s={START_S}",
        tracker=killer,
    )
    before, after = ([run.evaluations[place]["eval/accuracy"] for run in (embedded, served)] for place in (0, -1))
    assert max(before) < 0.45
    assert min(after) > 0.75, "both learned"
    assert abs(after[0] - after[1]) < 0.2, "equally well, within the chance of a hundred tasks"

    steps = [json.loads(line) for line in (tmp_path / "served" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in steps if "timing/step_s" in line]
    assert [line["policy/weight_version"] for line in steps] == list(range(1, NUM_STEPS + 1))
    assert max(line["policy/sampler_gap_max"] for line in steps if "policy/loss" in line) < ROUNDING
    assert sum(line["tokens/drift"] for line in steps) == 0
    assert sum(line.get("rollout/num_failed", 0) for line in steps) == 0, "calls waited for the server to come back"
    assert len(killer.killed) == 1
    assert (tmp_path / "served" / "vllm.log").read_text().count("$ ") == 2
    assert not psutil.Process().children(recursive=True), "nothing is left running"

    traces = first_traces(tmp_path / "served" / "traces.db")
    assert any(trace.response.get("tool_calls") for trace in traces)
    assert_exact(trainer.config.model.path, traces)


def test_run_stops_with_the_log_if_its_server_does_not_return(
    servers: Servers, vllm_command: str, tmp_path: Path, own_environment: None
) -> None:
    servers.close()
    killer = Killer(1)
    with pytest.raises(WeightSyncError, match=r"vllm\.max_restarts=0; the last time: it has ended\.") as message:
        trained(
            tmp_path / "run",
            *("model.engine=vllm", f"vllm.command={vllm_command}", f"vllm.args={json.dumps(ARGUMENTS)}"),
            *("vllm.max_restarts=0", f"vllm.start_timeout_s={START_S}", "eval.at_start=false", "rollout.num_retries=0"),
            tracker=killer,
        )
    assert f"The end of its log ({tmp_path / 'run' / 'vllm.log'}):" in str(message.value)
    assert len(killer.killed) == 1
    assert not psutil.Process().children(recursive=True), "nothing is left running"


def first_traces(path: Path) -> list[Trace]:
    """Return the traces of the first weights, which are those of the model's folder."""
    store = open_store(str(path), read_only=True)
    try:
        sessions = store.sessions(limit=40, oldest_first=True)
        traces = [trace for session in sessions for trace in store.by_session(session.id)]
    finally:
        store.close()
    return [trace for trace in traces if trace.weight_version == 0]


def assert_exact(path: str, traces: Sequence[Trace]) -> None:
    """Check that later turns hold the exact tokens of earlier ones, with the log-probabilities of a plain forward pass."""
    model = load_model(path, dtype="float32", device="cpu").model
    for trace in traces:
        assert DRIFT_KEY not in trace.metadata
        assert trace.logprobs_kind == "processed"
        ids = torch.tensor([[*trace.prompt_ids, *trace.response_ids]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, len(trace.prompt_ids) - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(trace.response_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(trace.logprobs), chosen, atol=ROUNDING, rtol=0)
