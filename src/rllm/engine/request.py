"""`RolloutRequest`: one rollout to make, and the conversion of tasks to requests."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rllm.capture import snapshot
from rllm.errors import ConfigError, RolloutError
from rllm.types import JSONMapping, Task, Trajectory, task_id_of


def new_session_id() -> str:
    """Return a random id that cannot be guessed."""
    return uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """One attempt at one task: everything that its rollout needs."""

    task: Task
    task_id: str
    """Identifies rows of the same task; may contain any characters."""
    source: str | None = None
    """Dataset of the task; `None` if there is only one."""
    index: int = 0
    """Index among the attempts at the task."""
    sampling: JSONMapping = field(default_factory=dict)
    """Sampling parameters imposed on every model call of this attempt."""
    trainable: bool = True
    """False for validation, where tokens need not be usable."""
    split: str = "train"
    training_step: int | None = None
    """Training step it is made for, or number of steps before an evaluation; `None` outside training."""
    run_id: str | None = None
    """Training run, since several may share a store; `None` outside training."""
    session_id: str = field(default_factory=new_session_id)
    """Session of the model calls; each retry gets a new one, so that no tokens of a failed attempt are kept."""
    tokens_required: bool = True
    """True if a trainable step without tokens is an error."""
    side_calls: bool = False
    """True if a trajectory that names no calls includes side calls, which are not part of the task."""
    trajectories: list[Trajectory] = field(default_factory=list, compare=False, repr=False)
    """Trajectories so far, extended by the rollout as it runs; the record of a failed rollout keeps them."""

    def own_task(self) -> Task:
        """Return a copy of the task, so that users' code can change neither the record nor other attempts.

        Raises:
            RolloutError: if the task is recursive or nested too deeply to be copied.
        """
        try:
            task: Task = snapshot(dict(self.task))
        except RecursionError as error:
            raise RolloutError(
                f"task {self.task_id!r} cannot be copied, because a list or dict in it contains itself or is nested "
                "hundreds deep: flatten it, or keep it in an object of your own"
            ) from error
        return task


def requests_of(tasks: Sequence[Task], task_ids: Sequence[str] | None = None) -> list[RolloutRequest]:
    """Return one request per task, in order; tasks of the same id are attempts 0, 1, ... of one task.

    Args:
        tasks: rows.
        task_ids: one for each; by default a task's own `task_id` or `id`, else its position.

    Raises:
        ConfigError: if a task is not a mapping, or the number of ids differs.
    """
    if task_ids is not None and len(task_ids) != len(tasks):
        raise ConfigError(f"{len(task_ids)} task_ids for {len(tasks)} tasks: pass one for each")
    seen: Counter[str] = Counter()
    attempts = []
    for place, task in enumerate(tasks):
        if not isinstance(task, Mapping):
            raise ConfigError(f"tasks[{place}]={task!r:.100}: use a mapping, such as {{'question': ...}}")
        task_id = task_id_of({"id": task_ids[place]} if task_ids is not None else task, place)
        attempts.append(RolloutRequest(task=dict(task), task_id=task_id, index=seen[task_id], tokens_required=False))
        seen[task_id] += 1
    return attempts
