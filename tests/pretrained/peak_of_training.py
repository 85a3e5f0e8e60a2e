"""Train for two steps, and write the peak memory of this process to a file.

python peak_of_training.py FILE KEY=VALUE ...
"""

import sys
from pathlib import Path

from rllm._runtime.process import peak_memory
from rllm.demo.tasks import sum_tasks
from rllm.trainer import AgentTrainer
from rllm.workflows.simple_workflow import SimpleWorkflow


def is_even(task, answer):
    """Return a reward that differs within nearly every group."""
    return float(len(answer) % 2 == 0)


if __name__ == "__main__":
    AgentTrainer(
        workflow_class=SimpleWorkflow,
        workflow_args={"reward_function": is_even},
        train_dataset=sum_tasks(4, seed=0),
        config=sys.argv[2:],
    ).train()
    Path(sys.argv[1]).write_text(str(peak_memory()))
