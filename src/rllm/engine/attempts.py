"""Tasks, as a user hands them over, to attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rllm.engine.runner import Attempt
from rllm.errors import ConfigError
from rllm.types import Task, task_id_of


def attempts_of(tasks: Sequence[Task], task_ids: Sequence[str] | None = None) -> list[Attempt]:
    """One attempt a task, in their order; those of one id are attempts 0, 1, ... of one task.

    Args:
        tasks: rows.
        task_ids: one for each; by default a task's own `task_id` or `id`, else its place.

    Raises:
        ConfigError: if a task is no mapping, or there is not an id for each.
    """
    if task_ids is not None and len(task_ids) != len(tasks):
        raise ConfigError(f"{len(task_ids)} task_ids for {len(tasks)} tasks: give one for each")
    seen: Counter[str] = Counter()
    attempts = []
    for place, task in enumerate(tasks):
        if not isinstance(task, Mapping):
            raise ConfigError(f"tasks[{place}]={task!r:.100}: use a mapping, such as {{'question': ...}}")
        task_id = task_id_of({"id": task_ids[place]} if task_ids is not None else task, place)
        attempts.append(Attempt(task=dict(task), task_id=task_id, index=seen[task_id], tokens_required=False))
        seen[task_id] += 1
    return attempts
