"""Tasks that agents work on in sandboxes: folders in Harbor's format, with a verifier that rewards the result.

Read `task.py` first: a `TaskFolder`, a `SandboxAgent` and the `TaskOutcome` of a rollout. `folder.py` reads
them, from repositories too (`task_toml.py` has the fields of `task.toml`), `run.py` makes a rollout, `verifier.py`
rewards it, `changes.py` describes what the agent changed, and `check.py` checks tasks with their own solution;
`shell_tasks.py` generates small ones.
`rollouts.py` has the rollouts of a run, and brings task folders to the nodes of a cluster.
"""

from rllm.tasks.task import FileChange, SandboxAgent, TaskFolder, TaskOutcome

__all__ = ["FileChange", "SandboxAgent", "TaskFolder", "TaskOutcome"]
