from __future__ import annotations

from typing import Any

from rllm.store.memory import MemoryTraceStore
from rllm.trainer.selection import credits_of_failed
from rllm.types import Episode, Step, Trace, Trajectory

ERROR = {"error": {"type": "AgentError", "message": "", "traceback": ""}}


def trace(name: str, session_id: str) -> Trace:
    found: dict[str, Any] = {"model": "policy", "messages": [], "response": {}, "prompt_ids": [1], "response_ids": [2]}
    return Trace(id=name, call_id=name, session_id=session_id, logprobs=[-1.0], **found)


def test_every_call_of_a_failed_rollout_is_recorded() -> None:
    store = MemoryTraceStore()
    store.add([trace("shared", "lost"), trace("own", "lost"), trace("stray", "lost"), trace("kept", "done")]).result()
    shared, own = Step(id="shared"), Step(id="own")
    paths = [Trajectory(name="planner", steps=[shared]), Trajectory(name="solver", steps=[own, shared])]
    failed = Episode(session_id="lost", trajectories=paths, info=ERROR)
    done = Episode(session_id="done", trajectories=[Trajectory(steps=[Step(id="kept")])])
    found = credits_of_failed([failed, done], store, step=3)
    assert [(item.trace_id, item.trajectory_index, item.trajectory_name) for item in found] == [
        ("shared", 0, "planner"),
        ("shared", 1, "solver"),
        ("own", 1, "solver"),
        ("stray", 0, ""),
    ]
    assert {(item.dropped, item.training_step, item.reward) for item in found} == {("error", 3, None)}
