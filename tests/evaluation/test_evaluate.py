import asyncio
import json

import pytest

from rllm.data import Dataset
from rllm.engine.episode_log import EpisodeLog
from rllm.engine.request import RolloutRequest
from rllm.engine.scoring import Scoring
from rllm.errors import AgentError, ConfigError, StoreError
from rllm.evaluation.evaluate import Evaluation, Progress
from rllm.rewards.scoring import group_reward
from rllm.types import Episode, Step, Trajectory

TASKS = Dataset([{"id": "a", "answer": 1}, {"id": "b", "answer": 2}])


class Answering:
    """Source of rollouts with the rewards or errors of a table; it records its calls."""

    def __init__(self, **rewards):
        self.rewards = rewards
        self.made: list[str] = []

    async def rollout(self, attempt: RolloutRequest) -> Episode:
        name = f"{attempt.task_id}{attempt.index}"
        self.made.append(name)
        assert not attempt.tokens_required
        outcome = self.rewards.get(name, 1.0)
        if isinstance(outcome, BaseException):
            raise outcome
        steps = [Step(prompt_ids=[1, 2], response_ids=[3])]
        return Episode(
            task=attempt.task,
            task_id=attempt.task_id,
            index=attempt.index,
            trajectories=[Trajectory(steps=steps, reward=outcome)],
            is_correct=outcome == 1.0,
        )


async def run(rollout, folder, dataset=TASKS, **settings):
    of_run = {
        name: settings.pop(name)
        for name in ("max_concurrent", "timeout_s", "num_retries", "on_progress")
        if name in settings
    }
    with Evaluation.opened(dataset, **{"folder": folder, "identity": {"model": "m"}, **settings}) as evaluation:
        await evaluation.run(rollout, **of_run)
        return evaluation.report()


async def test_every_task_is_rolled_out_n_times_and_reported(tmp_path):
    rollout = Answering(a1=0.0, b0=0.0, b1=0.0)
    report = await run(rollout, tmp_path, num_rollouts=2)
    assert sorted(rollout.made) == ["a0", "a1", "b0", "b1"]
    assert report.accuracy.value == 0.25
    assert report.pass_at_k[2].value == 0.5
    assert [task.task_id for task in report.tasks] == ["a", "b"]
    assert report.cost.sampled_tokens == 1.0
    assert json.loads((tmp_path / "report.json").read_text()) == report.to_dict()


async def test_list_of_rows_is_accepted_as_a_dataset(tmp_path):
    report = await run(Answering(b0=0.0), tmp_path, dataset=list(TASKS))
    assert report.accuracy.value == 0.5


async def test_each_rollout_has_its_own_seed(tmp_path):
    class Seeds(Answering):
        async def rollout(self, attempt: RolloutRequest) -> Episode:
            seen[attempt.task_id, attempt.index] = attempt.sampling["seed"]
            return await super().rollout(attempt)

    seen: dict[tuple[str, int], int] = {}
    await run(Seeds(), tmp_path / "one", num_rollouts=3, sampling={"seed": 7})
    first, seen = seen, {}
    assert len(set(first.values())) == 6
    await run(Seeds(), tmp_path / "other", num_rollouts=3, sampling={"seed": 7})
    assert seen == first


async def test_repeated_evaluation_runs_no_rollouts(tmp_path):
    first = await run(Answering(a1=0.0), tmp_path, num_rollouts=2)
    again = Answering()
    assert await run(again, tmp_path, num_rollouts=2) == first
    assert again.made == []


async def test_only_failed_and_missing_rollouts_are_repeated(tmp_path):
    failing = Answering(a1=AgentError("no"), b0=AgentError("no"), b1=None)
    first = await run(failing, tmp_path, num_rollouts=2)
    assert (first.num_failed, first.num_unscored, first.accuracy.value) == (2, 1, 0.25)
    again = Answering(b0=AgentError("still no"))
    second = await run(again, tmp_path, num_rollouts=2)
    assert sorted(again.made) == ["a1", "b0"]  # unscored is not failed
    assert [reason.text for reason in second.failures] == ["AgentError: still no"]
    more = Answering()
    third = await run(more, tmp_path, num_rollouts=3)
    assert sorted(more.made) == ["a2", "b0", "b2"]
    assert third.num_failed == 0


async def test_group_reward_evaluates_whole_groups(tmp_path):
    @group_reward
    def halved(task, answers, trajectories):
        return [path.info["said"] / 2 for path in trajectories]

    class Recording(Answering):
        async def rollout(self, attempt):
            episode = await super().rollout(attempt)
            episode.trajectories[0].info["said"] = episode.trajectories[0].reward
            return episode

    scoring = Scoring(group_reward=halved)
    first = await run(Recording(a0=2.0, a1=AgentError("no")), tmp_path, num_rollouts=2, scoring=scoring)
    assert (first.num_failed, first.accuracy.value) == (1, 0.25)
    again = Recording()
    await run(again, tmp_path, num_rollouts=2, scoring=scoring)
    assert again.made == ["a0", "a1"]
    [*_, last] = EpisodeLog.read(tmp_path / "episodes.jsonl")
    assert (last.id, last.trajectories[0].reward) == ("a:1", 0.5)


async def test_limit_selects_the_first_tasks_and_can_be_raised(tmp_path):
    assert (await run(Answering(), tmp_path, limit=1)).num_tasks == 1
    rest = Answering()
    assert (await run(rest, tmp_path, limit=5)).num_tasks == 2
    assert rest.made == ["b0"]
    assert (await run(Answering(), tmp_path, limit=1)).num_tasks == 1


async def test_finished_rollouts_survive_a_crash(tmp_path):
    with pytest.raises(StoreError):
        await run(Answering(b0=StoreError("disk full")), tmp_path, max_concurrent=1)
    rest = Answering()
    await run(rest, tmp_path)
    assert rest.made == ["b0"]


async def test_cancellation_keeps_finished_rollouts(tmp_path):
    class Stuck(Answering):
        async def rollout(self, attempt: RolloutRequest) -> Episode:
            if attempt.task_id == "b":
                asyncio.get_running_loop().call_soon(evaluating.cancel)
                await asyncio.Event().wait()
            return await super().rollout(attempt)

    evaluating = asyncio.ensure_future(run(Stuck(), tmp_path, max_concurrent=1))
    with pytest.raises(asyncio.CancelledError):
        await evaluating
    assert [episode.id for episode in EpisodeLog.read(tmp_path / "episodes.jsonl")] == ["a:0"]


async def test_logged_episodes_are_freed_from_memory(tmp_path):
    made: list[Episode] = []

    class Keeping(Answering):
        async def rollout(self, attempt: RolloutRequest) -> Episode:
            made.append(await super().rollout(attempt))
            return made[-1]

    await run(Keeping(), tmp_path)
    assert [episode.trajectories for episode in made] == [[], []]
    logged = list(EpisodeLog.read(tmp_path / "episodes.jsonl"))
    assert [len(episode.trajectories[0].steps) for episode in logged] == [1, 1]


async def test_progress_counts_stored_rollouts(tmp_path):
    await run(Answering(a0=0.0, b0=AgentError("no")), tmp_path)
    seen: list[Progress] = []
    await run(Answering(b0=AgentError("no")), tmp_path, on_progress=seen.append)
    assert seen == [
        Progress(num_planned=2, num_done=1, num_kept=1, num_correct=0, num_failed=0),
        Progress(num_planned=2, num_done=2, num_kept=1, num_correct=0, num_failed=1),
    ]


async def test_rows_with_the_same_id_are_one_task(tmp_path):
    rollout = Answering()
    report = await run(rollout, tmp_path, Dataset([{"id": "a"}, {"id": "b"}, {"id": "a"}]), num_rollouts=2)
    assert sorted(rollout.made) == ["a0", "a1", "a2", "a3", "b0", "b1"]
    assert [(task.task_id, task.num_rollouts) for task in report.tasks] == [("a", 4), ("b", 2)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"identity": {"model": "other"}}, "model was m, and is now other"),
        ({"identity": {"model": "m", "agent": "f"}}, "agent was not set, and is now f"),
        ({"dataset": Dataset([{"id": "a", "answer": 2}])}, r"dataset was 2 tasks \(sha256 \w+\), and is now 1 task "),
        ({"sampling": {"temperature": 0.5}}, r'sampling was {}, and is now {"temperature":0.5}'),
    ],
)
async def test_folder_of_another_evaluation_is_rejected(tmp_path, changed, message):
    await run(Answering(), tmp_path)
    rollout = Answering()
    with pytest.raises(ConfigError, match=f"holds another evaluation: {message}.*Name another folder"):
        await run(rollout, tmp_path, **changed)
    assert rollout.made == []


async def test_only_one_process_may_write_to_a_folder(tmp_path):
    class Nested(Answering):
        async def rollout(self, attempt: RolloutRequest) -> Episode:
            with pytest.raises(ConfigError, match="in use by another process"):
                await run(Answering(), tmp_path)
            return await super().rollout(attempt)

    assert (await run(Nested(), tmp_path)).num_failed == 0


async def test_folder_without_identity_is_rejected(tmp_path):
    await run(Answering(), tmp_path)
    (tmp_path / "evaluation.json").unlink()
    with pytest.raises(ConfigError, match=r"does not record .* \(evaluation.json"):
        await run(Answering(), tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_rollouts": 0}, "num_rollouts=0: use at least 1"),
        ({"limit": 0}, "limit=0: use at least 1 task"),
        ({"dataset": Dataset([])}, "the dataset is empty"),
        ({"dataset": Dataset([{"id": 1, "x": 1}, {"id": 2}, {"id": 1, "x": 2}])}, "rows 0 and 2 of the dataset have the same id '1'"),
        ({"timeout_s": 0}, "timeout_s=0"),
    ],
)  # fmt: skip
async def test_invalid_setting_is_reported(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        await run(Answering(), tmp_path, **settings)


async def test_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"out='.*file/out' cannot be used"):
        await run(Answering(), tmp_path / "file" / "out")
