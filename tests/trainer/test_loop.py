"""The loop with a backend that learns nothing: the order of its work, and its state after each way to end."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from transformers import Qwen3Config

from rllm._runtime.threads import in_thread
from rllm.algorithms.batch import Batch
from rllm.config.schema import DataConfig
from rllm.data.dataset import Dataset
from rllm.data.sampling import TaskSampler
from rllm.engine.event_loop import GC_THRESHOLDS
from rllm.errors import CheckpointError, ConfigError, RolloutError, TokenMismatchError, WeightSyncError, WorkerError
from rllm.store import open_store
from rllm.tracking.about import run_id_of
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.checkpoint import damage_of, read_state
from rllm.trainer.config import TrainConfig
from rllm.trainer.episode_records import stored_episodes
from rllm.types import Episode

from .conftest import BACKEND, TASKS, RunTrainer, ScriptedBackend, ask


class At:
    """A tracker that runs a function when a step's metrics arrive."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step, self.act = step, act

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.step and "timing/step_s" in metrics:
            self.act()

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None: ...

    def progress(self, phase: str, done: int, total: int) -> None: ...

    def close(self) -> None: ...


class Progress(At):
    """A tracker that records the progress of each phase."""

    def __init__(self) -> None:
        super().__init__(0, lambda: None)
        self.calls: list[tuple[str, int, int]] = []

    def progress(self, phase: str, done: int, total: int) -> None:
        self.calls.append((phase, done, total))


def interrupt() -> None:
    """Send Ctrl-C to this process."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def step_words(step: int) -> set[str]:
    sampler = TaskSampler(Dataset(TASKS), DataConfig(), seed=0, per_step=2)
    return {TASKS[row]["word"] for row in sampler.tasks_of_step(step)}


def test_run_updates_publishes_and_evaluates_in_order(run_trainer: RunTrainer) -> None:
    run = run_trainer(val=True)
    assert run.backend.events == ["update", "publish", "update", "publish", "close"]
    assert [(line["step"], "eval/accuracy" in line) for line in run.lines] == [
        (0, True),
        (1, False),
        (2, False),
        (2, True),
    ]
    assert [line["policy/weight_version"] for line in run.lines if "timing/step_s" in line] == [1.0, 2.0]
    assert run.result is not None
    assert (run.result.num_steps, run.result.checkpoint.name) == (2, "step-000002")
    assert set(run.words[2:8]) == step_words(0)
    assert set(run.words[8:14]) == step_words(1)
    assert json.loads((run.result.checkpoint / "trainer_state.json").read_text())["step"] == 2


def test_trackers_get_the_progress_of_a_step(run_trainer: RunTrainer) -> None:
    tracker = Progress()
    run_trainer({"num_steps": 1}, trackers=[tracker])
    assert list(dict.fromkeys(tracker.calls)) == [
        *(("roll out", done, 6) for done in range(7)),
        ("assemble", 0, 1),
        ("update", 0, 1),
        ("save", 0, 1),
    ]


def test_training_imposes_its_sampling_and_evaluation_its_own(run_trainer: RunTrainer) -> None:
    def greedy(word: str, base_url: str) -> float:
        ask(base_url, word, temperature=0.0, top_p=0.1, top_k=3)
        return float(len(base_url) % 2)

    run = run_trainer({"eval": {"temperature": 0.5}}, agent=greedy, val=True)
    kinds = {(params["temperature"], params["top_p"], params["top_k"]) for params in run.params}
    assert kinds == {(0.5, 0.1, 3), (1.0, 1.0, -1)}, "training samples from the whole distribution"


def test_hanging_agents_do_not_delay_training_or_its_end(
    run_trainer: RunTrainer,
) -> None:
    release = threading.Event()

    async def agent(word: str, base_url: str) -> float:
        for _ in range(10):
            asyncio.get_running_loop().run_in_executor(None, release.wait)
        await in_thread(lambda: ask(base_url, word), name="client")
        return float(len(base_url) % 2)

    rescue = threading.Timer(60.0, release.set)
    rescue.start()
    run = run_trainer(agent=agent)
    assert not release.is_set()
    rescue.cancel()
    release.set()
    assert run.result is not None
    assert run.result.num_steps == 2


def test_store_explains_every_gradient(run_trainer: RunTrainer) -> None:
    run = run_trainer({"num_steps": 1})
    with open_store(str(run.trainer.run_dir / "traces.db"), read_only=True) as store:
        sessions = [info.id for info in store.sessions()]
        traces = {trace.id: trace for session in sessions for trace in store.by_session(session)}
        credits_ = [credit for session in sessions for credit in store.credits(session)]
    assert {credit.trace_id for credit in credits_} == traces.keys()
    assert {credit.training_step for credit in credits_} == {0}
    for credit in credits_:
        assert credit.trainer_logprobs == pytest.approx([value - 0.5 for value in traces[credit.trace_id].logprobs])
        assert credit.reward is not None
        assert credit.baseline is not None
        assert (credit.advantage or 0) * (credit.reward - credit.baseline) > 0


def test_batch_contains_the_sampled_tokens(run_trainer: RunTrainer) -> None:
    run = run_trainer({"num_steps": 1})
    sampled = sorted((output.prompt_ids, output.completion_ids) for output in run.backend.inference.outputs)
    trained = [
        (sequence.ids[: sequence.spans[0].start], sequence.ids[sequence.spans[0].start :])
        for sequence in run.backend.batches[0].sequences
    ]
    assert sorted(trained) == sampled


def test_turns_of_a_conversation_are_trained_as_one_sequence(run_trainer: RunTrainer) -> None:
    def talk(word: str, base_url: str) -> float:
        messages = [{"role": "user", "content": word}]
        for _ in range(3):
            messages.append({"role": "assistant", "content": ask(base_url, messages)})
            messages.append({"role": "user", "content": f"{word}?"})
        return float(sum(map(ord, base_url)) % 2)

    run = run_trainer({"rollout": {"group_size": 8}, "num_steps": 1}, agent=talk)
    assert {len(sequence.spans) for sequence in run.backend.batches[0].sequences} == {3}
    assert run.lines[0]["tokens/drift"] == 0
    assert run.lines[0]["rollout/calls_per_episode"] == 3


def test_interrupted_run_is_saved_and_resumed(run_trainer: RunTrainer) -> None:
    config = {"num_steps": 4, "save_every": 0}
    first = run_trainer(config, raises=KeyboardInterrupt, trackers=[At(2, interrupt)])
    assert first.steps == [1, 2]
    assert first.backend.saved_at == [2]
    [found] = getattr(first.error, "__notes__", [])
    assert "step-000002); resume=True with this run_dir continues from it" in found
    second = run_trainer(config, resume=True)
    assert second.steps == [1, 2, 3, 4]
    assert second.backend.saved_at == [4], "weights and version were restored"
    assert set(second.words[:6]) == step_words(2)


class InterruptWhileUpdating(ScriptedBackend):
    """Backend that is interrupted by Ctrl-C during its second update."""

    presses = 1

    def begin_update(self, batch: Batch) -> Any:
        if len(self.batches) == 1:
            for _ in range(self.presses):
                interrupt()
                time.sleep(0.1)  # the event loop handles it before the update ends
        return super().begin_update(batch)


class InterruptTwiceAtOnceWhileUpdating(InterruptWhileUpdating):
    """The same with two signals at once, as `timeout -s INT` sends them."""

    presses = 2


@pytest.mark.parametrize("backend", [InterruptWhileUpdating, InterruptTwiceAtOnceWhileUpdating])
def test_ctrl_c_during_an_update_finishes_the_step(
    run_trainer: RunTrainer, caplog: pytest.LogCaptureFixture, backend: type[ScriptedBackend]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    config = {"num_steps": 4, "save_every": 0, "backend": f"{__name__}:{backend.__name__}"}
    run = run_trainer(config, raises=KeyboardInterrupt)
    assert run.backend.events == ["update", "publish", "update", "publish", "close"]
    assert run.steps == [1, 2]
    assert run.backend.saved_at == [2]
    printed = [record.getMessage() for record in caplog.records if record.name == "rllm.trainer.loop"]
    assert printed == [
        "stopping when step 2 is finished; Ctrl-C again discards it",
        "stopping when step 2 is saved",
    ]
    assert signal.getsignal(signal.SIGINT) is before


class InterruptWhileLoading(ScriptedBackend):
    """Backend that is interrupted by Ctrl-C while it loads."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        interrupt()
        time.sleep(0.1)
        self.events.append("loaded")


def test_ctrl_c_while_loading_a_model_does_not_wait_for_it(run_trainer: RunTrainer) -> None:
    run = run_trainer({"backend": f"{__name__}:InterruptWhileLoading"}, raises=KeyboardInterrupt)
    assert run.backend.events == []
    assert not (run.trainer.run_dir / "config.yaml").exists()


class InterruptTwiceWhileSaving(ScriptedBackend):
    """Backend that is interrupted by Ctrl-C twice during a save."""

    def save(self, folder: Path) -> None:
        for _ in range(2):
            interrupt()
            time.sleep(0.5)  # the event loop handles it before the save ends
        super().save(folder)


def test_second_ctrl_c_during_a_save_does_not_damage_it(run_trainer: RunTrainer) -> None:
    config = {"num_steps": 4, "save_every": 1, "backend": f"{__name__}:InterruptTwiceWhileSaving"}
    before = signal.getsignal(signal.SIGINT)
    run = run_trainer(config, raises=KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is before
    [checkpoint] = (run.trainer.run_dir / "checkpoints").iterdir()
    assert damage_of(checkpoint) is None
    assert (run.steps, run.backend.saved_at) == ([1], [1])


def wait_until_closed() -> None:
    """Wait until the run has ended, which abandons this thread."""
    deadline = time.monotonic() + 60
    while "close" not in ScriptedBackend.latest.events and time.monotonic() < deadline:
        time.sleep(0.01)


def test_ctrl_c_during_rollouts_keeps_the_previous_step(run_trainer: RunTrainer) -> None:
    presses = iter([interrupt])

    def interrupted(word: str, base_url: str) -> float:
        if ScriptedBackend.latest.weight_version == 1:
            for press in presses:
                press()
            wait_until_closed()
        ask(base_url, word)
        return 1.0

    run = run_trainer({"num_steps": 3, "save_every": 0}, agent=interrupted, raises=KeyboardInterrupt)
    assert (run.steps, run.backend.saved_at) == ([1], [1])


class NonFinite(ScriptedBackend):
    """Backend whose second update gives non-finite weights."""

    def publish(self) -> int:
        if len(self.batches) == 2:
            raise WeightSyncError("the update made x NaN")
        return super().publish()


def test_non_finite_weights_are_not_saved(run_trainer: RunTrainer) -> None:
    run = run_trainer({"num_steps": 3, "save_every": 1, "backend": f"{__name__}:NonFinite"}, raises=WeightSyncError)
    assert run.backend.saved_at == [1]
    assert [path.name for path in (run.trainer.run_dir / "checkpoints").iterdir()] == ["step-000001"]


class DeadWorkers(ScriptedBackend):
    """Backend whose workers die after the first update: they cannot save it, nor score the next batch."""

    def score_reference(self, batch: Batch) -> Any:
        if self.batches:
            raise WorkerError("a worker died when it was to score a batch with the reference")
        return super().score_reference(batch)

    def save(self, folder: Path) -> None:
        super().save(folder)
        raise WorkerError("a worker died when it was to write a checkpoint")


def test_failed_checkpoint_is_not_retried(run_trainer: RunTrainer) -> None:
    run_trainer({"save_every": 1, "backend": f"{__name__}:DeadWorkers"}, raises=CheckpointError)
    assert ScriptedBackend.latest.saved_at == [1]


def test_original_error_is_raised_instead_of_the_failed_save(
    run_trainer: RunTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"save_every": 0, "backend": f"{__name__}:DeadWorkers", "algorithm": {"kl_coef": 0.1}}
    run = run_trainer(config, raises=WorkerError)
    assert "to score a batch with the reference" in str(run.error)
    assert "checkpoint of step 1 cannot be written" in caplog.text
    assert not list((run.trainer.run_dir / "checkpoints").iterdir()), "no partial checkpoint is left"


def test_killed_run_writes_repeated_steps_once(run_trainer: RunTrainer) -> None:
    run = run_trainer({"num_steps": 2, "save_every": 1}, val=True)
    with (run.trainer.run_dir / "metrics.jsonl").open("a") as file:  # as if it had continued without saving
        file.write('{"step":3,"timing/step_s":1.0}\n{"step":4,"timi')
    second = run_trainer({"num_steps": 4}, val=True, resume=True)
    assert second.steps == [1, 2, 3, 4]


def test_run_that_failed_at_once_can_be_restarted(run_trainer: RunTrainer) -> None:
    def broken(word: str, base_url: str) -> float:
        raise LookupError("no such word")

    run_trainer(agent=broken, val=True, raises=RolloutError)
    again = run_trainer(val=True, resume=True)
    assert [line["step"] for line in again.lines] == [0, 1, 2, 2]


def test_stopped_event_loop_is_an_error_after_a_save(run_trainer: RunTrainer) -> None:
    async def agent(word: str, base_url: str) -> float:
        if ScriptedBackend.latest.weight_version == 1:
            asyncio.get_running_loop().stop()
        return await asyncio.to_thread(lambda: float(bool(ask(base_url, word))))

    run = run_trainer({"rollout": {"max_concurrent": 1}}, agent=agent, raises=RolloutError)
    assert "loop.stop()" in str(run.error)
    assert run.backend.saved_at == [1]


def test_run_without_successful_rollouts_reports_the_reasons(run_trainer: RunTrainer) -> None:
    def broken(word: str, base_url: str) -> float:
        if word in ("fig", "apple"):
            raise LookupError("no such word")
        return 1.0  # without a model call

    run = run_trainer({"tasks_per_step": 4}, agent=broken, raises=RolloutError)
    text = str(run.error)
    assert "roll out: all 12 rollouts failed" in text
    assert "6 x AgentError: run_trainer.run.echo raised LookupError: no such word" in text
    assert "6 x CaptureError: run_trainer.run.echo made no model call that reached the gateway" in text
    assert text.splitlines()[-1] == f"Details of each: rllm explain {run.trainer.run_dir}"


def test_calls_without_session_are_counted(
    run_trainer: RunTrainer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def agent(word: str, base_url: str) -> float:
        ask(base_url, word)
        if word == min(step_words(0)):
            root = f"{base_url.partition('/sessions/')[0]}/v1"
            ask(root, "lost", api_key=os.environ["OPENAI_API_KEY"])
            with pytest.raises(HTTPError) as refused:
                ask(root, "lost", api_key="somebody's")
            with refused.value:
                assert refused.value.code == 401
        return 1.0

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    run = run_trainer({"num_steps": 2}, agent=agent)
    assert [line.get("dropped/unattributed_call") for line in run.lines] == [6, None]
    with open_store(str(run.trainer.run_dir / "traces.db"), read_only=True) as store:
        assert len(store.by_session(f"unattributed-{run_id_of(run.trainer.run_dir)}")) == 3
    assert len([line for line in caplog.messages if "without a session" in line]) == 1


def test_evaluation_without_successful_rollouts_does_not_stop_the_run(
    run_trainer: RunTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    def agent(word: str, base_url: str) -> float:
        if word in ("lime", "plum") and ScriptedBackend.latest.weight_version == 2:
            raise ConnectionError("the search is down")
        ask(base_url, word)
        return 1.0

    config = {"num_steps": 3, "save_every": 1, "keep_checkpoints": 3, "keep_best": "eval/accuracy"}
    run = run_trainer({**config, "eval": {"every": 1, "at_start": False}}, agent=agent, val=True)
    assert run.steps == [1, 2, 3]
    assert "evaluate: all 2 rollouts failed" in caplog.text
    assert "2 x AgentError: run_trainer.run.echo raised ConnectionError: the search is down" in caplog.text
    failed = next(line for line in run.lines if line["step"] == 2 and "timing/eval_s" in line)
    assert failed["eval/num_failed"] == failed["eval/num_episodes"] == 2
    assert "eval/accuracy" not in failed
    checkpoints = sorted((run.trainer.run_dir / "checkpoints").iterdir())
    assert [read_state(path)["score"] for path in checkpoints] == [1.0, None, 1.0]


def test_run_without_rewards_reports_the_remedy(run_trainer: RunTrainer) -> None:
    def silent(word: str, base_url: str) -> Any:
        ask(base_url, word)

    run = run_trainer(agent=silent, raises=RolloutError)
    assert (
        "6 x not scored: no reward was returned for 'agent': return a number, give the trajectory a reward, or name the "
        "function that judges it (--reward)" in str(run.error)
    )


def test_siblings_of_failed_rollouts_are_trained(run_trainer: RunTrainer) -> None:
    def mixed(word: str, base_url: str) -> Any:
        number = count()
        if number % 3 == 1:
            raise ValueError("unlucky")
        if number % 3 == 2 and number > 6:
            return 1.0  # no call
        ask(base_url, word)
        return None if number == 3 else float(number % 2)

    lock, numbers = threading.Lock(), iter(range(1000))

    def count() -> int:
        with lock:
            return next(numbers)

    run = run_trainer({"num_steps": 1, "tasks_per_step": 4}, agent=mixed)
    (line,) = run.lines
    assert line["rollout/num_failed"] == 4 + 2
    assert line["rollout/num_unscored"] == 1
    assert (line["dropped/error"], line["dropped/unscored"]) == (6, 1)
    assert line["rollout/accuracy"] == sum(n % 2 for n in range(12) if (n % 3 == 0 and n != 3) or n in (2, 5)) / 11


def test_step_without_advantages_updates_nothing_and_continues(run_trainer: RunTrainer) -> None:
    def alike(word: str, base_url: str) -> float:
        ask(base_url, word)
        return 0.1

    run = run_trainer(agent=alike)
    assert run.backend.batches == []
    assert [line["batch/zero_variance"] for line in run.lines] == [1.0, 1.0]


def test_failing_tracker_does_not_stop_the_run(run_trainer: RunTrainer, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ConnectionError("the server is gone")

    run = run_trainer(trackers=[At(1, fail)])
    assert run.steps == [1, 2]
    assert "tracker At failed" in caplog.text


def test_garbage_collection_is_less_frequent_during_training(run_trainer: RunTrainer) -> None:
    before, seen = gc.get_threshold(), []
    gc.set_threshold(700, 10, 10)
    try:
        run_trainer(trackers=[At(1, lambda: seen.append(gc.get_threshold()))])
        assert (seen, gc.get_threshold()) == ([GC_THRESHOLDS], (700, 10, 10))
    finally:
        gc.set_threshold(*before)


def test_zero_means_evaluate_and_save_only_at_the_ends(run_trainer: RunTrainer) -> None:
    run = run_trainer({"num_steps": 3, "eval": {"every": 0}, "save_every": 0}, val=True)
    assert [line["step"] for line in run.lines if "eval/accuracy" in line] == [0, 3]
    assert run.backend.saved_at == [3]


def test_eval_rollouts_are_not_trained_on(run_trainer: RunTrainer) -> None:
    run = run_trainer({"eval": {"every": 1}}, val=True)
    trained = {
        bytes(token for token in item.ids if token < 256) for batch in run.backend.batches for item in batch.sequences
    }
    assert not any(b"lime" in text or b"plum" in text for text in trained)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_dataset": []}, "train_dataset is empty: give it at least one task"),
        ({"val_dataset": []}, "val_dataset is empty"),
        ({"val_dataset": "absent.jsonl"}, "val_dataset: 'absent.jsonl': no such file"),
        ({"val_dataset": [{"tone": 1}]}, "val_dataset: row 0 of the dataset: .* needs 'word'"),
        ({"train_dataset": [{"question": "?"}]}, "word"),
        (
            {"train_dataset": [{"id": 1, "word": "fig"}, {"id": 1, "word": "lime"}]},
            "train_dataset: rows 0 and 1 of the dataset have the same id '1': make ids unique",
        ),
        ({"train_dataset": "absent.jsonl"}, "absent.jsonl"),
        ({"agent_run_func": 7}, "agent_run_func=7: use a function"),
        ({"config": ["model.path=x", "trackers=[jsnl]"]}, "did you mean 'jsonl'"),
        ({"config": ["model.path=x", "backend=locl"]}, "did you mean 'local'"),
        ({"config": ["optim.lr=0"]}, "optim.lr=0"),
        ({"config": []}, "model.path is not set"),
        ({"config": ["model.path=x", "eval.every=5"]}, "eval.every=5 would have no effect without held-out tasks"),
        ({"config": ["model.path=x", "eval.top_k=5"]}, "eval.top_k=5 would have no effect without held-out tasks"),
    ],
)
def test_invalid_arguments_are_rejected_before_the_run(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    def agent(word: str) -> float:
        return 1.0

    settings = {"agent_run_func": agent, "train_dataset": TASKS, "config": ["model.path=x", f"run_dir={tmp_path}"]}
    with pytest.raises(ConfigError, match=message):
        AgentTrainer(**{**settings, **change})
    assert list(tmp_path.iterdir()) == []


LENGTHS = ["data.max_prompt_length=60", "data.max_response_length=40"]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (["model.max_length=100"], r"model\.max_length=100: .* context of 64 tokens; use 2 to 64"),
        (LENGTHS, r"data\.max_prompt_length, here model\.max_length=100: .* context of 64 tokens"),
        ({"data": {"max_prompt_length": 60, "max_response_length": 40}}, r"data\.max_prompt_length, here model\.max_"),
        (["actor_rollout_ref.rollout.max_model_len=99"], r"max_model_len, here model\.max_length=99: "),
        (["actor_rollout_ref.rollout.n=1"], r"actor_rollout_ref\.rollout\.n, here rollout\.group_size=1"),
    ],
)
def test_error_in_a_published_key_names_it(tmp_path: Path, config: Any, named: str) -> None:
    model = tmp_path / "model"
    Qwen3Config(max_position_embeddings=64).save_pretrained(model)
    own = {"model": {"path": str(model)}, "run_dir": str(tmp_path / "run")}
    source = {**own, **config} if isinstance(config, dict) else [f"model.path={model}", *config]

    def agent(word: str) -> float:
        return 1.0

    with pytest.raises(ConfigError, match=named):
        AgentTrainer(agent_run_func=agent, train_dataset=TASKS, config=source)


def test_folder_with_a_run_is_not_overwritten(run_trainer: RunTrainer) -> None:
    run_trainer()
    with pytest.raises(
        ConfigError,
        match=r"already has a run: .*--resume .* or AgentTrainer\(\.\.\., resume=True\); to start",
    ):
        run_trainer()


def test_second_call_of_train_does_not_overwrite_the_first(run_trainer: RunTrainer) -> None:
    run = run_trainer(val=True)
    before = (run.trainer.run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"already has a run: .*--resume"):
        run.trainer.train()
    assert (run.trainer.run_dir / "metrics.jsonl").read_bytes() == before


def test_second_call_of_train_resumes_an_interrupted_run(run_trainer: RunTrainer) -> None:
    run_trainer({"num_steps": 1})
    second = run_trainer({"num_steps": 4}, resume=True, raises=KeyboardInterrupt, trackers=[At(2, interrupt)])
    assert second.trainer.train().num_steps == 4
    assert ScriptedBackend.latest.saved_at == [4], "weights and version were those of step 2"


def test_resuming_without_a_checkpoint_is_rejected(run_trainer: RunTrainer) -> None:
    with pytest.raises(ConfigError, match="has no checkpoint to resume from"):
        run_trainer(resume=True)


def test_resuming_a_finished_run_is_reported(run_trainer: RunTrainer) -> None:
    run_trainer()
    run = run_trainer(raises=ConfigError, resume=True)
    assert "num_steps=2: the run in" in str(run.error)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"run_dir": "taken/run"}, "run_dir='{here}/taken/run' cannot be created: '{here}/taken' is a file"),
        ({"run_dir": "/proc/run"}, "run_dir='/proc/run' cannot be written to ("),
        ({"run_dir": "project"}, "run_dir='{here}/project' has config.yaml"),
        ({"run_dir": "evaluated"}, "run_dir='{here}/evaluated' has traces.db"),
        ({"store": "folder"}, "store='folder' is a folder: name a file in it, such as 'folder/traces.db'"),
        ({"store": "redis://there"}, "store='redis://there': 'redis'"),
    ],
)
def test_unwritable_paths_are_rejected_at_once(
    settings: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    (tmp_path / "folder").mkdir()
    for folder, file in (("project", "config.yaml"), ("evaluated", "traces.db")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("# not to be lost\n")
    with pytest.raises(ConfigError) as caught:
        AgentTrainer(
            agent_run_func=lambda word: 1.0,
            train_dataset=TASKS,
            config={"backend": BACKEND, "model": {"path": "scripted"}, **settings},
        )
    assert expected.format(here=tmp_path) in str(caught.value)


def test_agent_that_changes_the_folder_does_not_move_the_run(
    run_trainer: RunTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "begun")

    def agent(word: str, base_url: str) -> float:
        ask(base_url, word)
        monkeypatch.chdir(tmp_path / "elsewhere")
        return float(len(word))

    run = run_trainer({"run_dir": "run"}, agent=agent)
    assert run.result is not None
    assert run.result.checkpoint == tmp_path / "begun" / "run" / "checkpoints" / "step-000002"
    assert run.result.checkpoint.is_dir()
    assert not any((tmp_path / "elsewhere").iterdir())


def test_run_with_its_own_store_can_be_read_from_any_folder(
    run_trainer: RunTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = run_trainer({"store": "calls.db"})
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert list(stored_episodes(run.trainer.run_dir))


class Misaligned(ScriptedBackend):
    """Backend that reports fewer log-probabilities than there are tokens."""

    def step(self, role: str, part: Batch, algorithm: Any, *, scale: float) -> Any:
        result = super().step(role, part, algorithm, scale=scale)
        return replace(result, logprobs=torch.zeros(part.num_tokens - 1))


def test_misaligned_logprobs_stop_the_run(run_trainer: RunTrainer) -> None:
    run_trainer({"backend": f"{__name__}:Misaligned"}, raises=TokenMismatchError)


async def test_train_may_be_called_inside_a_running_loop(run_trainer: RunTrainer, tmp_path: Path) -> None:
    assert asyncio.get_running_loop().is_running()
    assert run_trainer().steps == [1, 2]
    failed = run_trainer(
        {"backend": f"{__name__}:NonFinite", "run_dir": str(tmp_path / "other"), "num_steps": 3}, raises=WeightSyncError
    )
    assert failed.result is None


def test_each_task_of_a_step_is_a_separate_group(run_trainer: RunTrainer) -> None:
    run = run_trainer({"tasks_per_step": 8, "num_steps": 1})
    assert run.lines[0]["batch/num_groups"] == 8, "each of the four words twice"


def test_configuration_is_stored_with_the_run(run_trainer: RunTrainer) -> None:
    run = run_trainer({"optim": {"lr": 0.125}})
    assert "lr: 0.125" in (run.trainer.run_dir / "config.yaml").read_text()
    assert run.result is not None
    assert read_state(run.result.checkpoint)["config"]["backend"] == BACKEND
