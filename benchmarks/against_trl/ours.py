"""Our side: the embedded sampler, `assemble` and the local backend, as the trainer uses them; no gateway and no store."""

from __future__ import annotations

import asyncio
from itertools import islice

from rllm.algorithms.grpo import GRPO
from rllm.backends.local.backend import LocalBackend
from rllm.backends.update import update_weights
from rllm.config.schema import OptimConfig
from rllm.engine.event_loop import rarely_collected
from rllm.inference.local.loading import load_model
from rllm.trainer.credit import assemble
from rllm.types import Episode, Step, Trajectory

from .jobs import Job
from .watch import Watch
from .workloads import END_OF_TURN, WORKLOADS, Workload, correctness, questions, vowels


@rarely_collected()
def train(job: Job, watch: Watch) -> None:
    """Train until the watch ends it."""
    workload, algorithm = WORKLOADS[job.workload], GRPO()
    backend = LocalBackend(
        load_model(job.model, dtype="float32", device=job.device),
        OptimConfig(lr=job.lr, autocast=job.autocast),
        max_concurrent=workload.num_rollouts,
        seed=job.seed,
    )
    reward = correctness if workload.warm or job.target is not None else vowels
    source = questions(workload, job.seed)
    watch.start(backend.model, backend.tokenizer)
    step, running = 0, True
    while running:
        tasks = list(islice(source, workload.num_prompts))
        episodes = asyncio.run(roll_out(backend, workload, tasks))
        for episode in episodes:
            (path,) = episode.trajectories
            path.reward = reward(episode.task[-1], path.steps[-1].model_response)
            watch.num_tokens += sum(len(item.response_ids) for item in path.steps)
        batch = assemble(episodes, algorithm, step=step, temperature=1.0).batch
        with watch.updating(len(batch.tree.ids), batch.num_tokens):
            update_weights(backend, batch, algorithm)
            backend.publish()
        step, running = step + 1, watch.step_done(backend.model, backend.tokenizer)
    backend.close()


async def roll_out(backend: LocalBackend, workload: Workload, tasks: list[list[str]]) -> list[Episode]:
    """Return every conversation `group_size` times."""
    end_of_turn = backend.tokenizer.encode(f"{END_OF_TURN}\n")

    async def converse(task_id: str, index: int, task: list[str]) -> Episode:
        steps = await speak(backend, workload, task, end_of_turn)
        return Episode(task_id=task_id, index=index, task=task, trajectories=[Trajectory(steps=steps)])

    return await asyncio.gather(
        *(
            converse(str(number), index, task)
            for number, task in enumerate(tasks)
            for index in range(workload.group_size)
        )
    )


async def speak(backend: LocalBackend, workload: Workload, task: list[str], end_of_turn: list[int]) -> list[Step]:
    """Sample one conversation: each turn's prompt is everything before it, to the token."""
    engine = backend.inference
    prompt: list[int] = []
    steps: list[Step] = []
    for question in task:
        prompt = [*prompt, *engine.template.render([{"role": "user", "content": question}])]
        output = await engine.complete(
            prompt, max_tokens=workload.answer_tokens, temperature=1.0, ignore_eos=not workload.warm
        )
        steps.append(Step(model_output=output))
        prompt = [*prompt, *output.completion_ids, *end_of_turn]
    return steps
