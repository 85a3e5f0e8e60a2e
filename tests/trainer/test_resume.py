"""Runs that are killed with SIGKILL, and resume without a difference."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from rllm.data.dataset import Dataset
from rllm.errors import ConfigError, RolloutError
from rllm.store import open_store
from rllm.store.memory import MemoryTraceStore
from rllm.trainer.checkpoint import read_state
from rllm.trainer.config import TrainConfig, load_config
from rllm.trainer.resume import StartingPoint, check_identity, identity_of
from rllm.trainer.settings import make_algorithm

from . import mortal_run
from .conftest import RunTrainer, ScriptedBackend, ask
from .reproducible import reproducible
from .test_loop import At, interrupt

NUM_STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "DIES_AT"):
            patch.delenv(name, raising=False)
        patch.syspath_prepend(Path(mortal_run.__file__).parent)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(policies: Path) -> Path:
    return mortal_run.policy(policies)


class Lives:
    """A run in separate processes, one after the other."""

    def __init__(
        self, run_dir: Path, model: Path, num_steps: int = NUM_STEPS, data: Mapping[str, Any] | None = None
    ) -> None:
        self._program = subprocess.Popen(
            [sys.executable, mortal_run.__file__, str(run_dir), str(model), str(num_steps), json.dumps(data or {})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._program.communicate(timeout=600)

    def begin(self, dies_at: str = "") -> int:
        """Return the id of the next process, when it is about to train; it resumes the earlier run."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(f"{dies_at}\n")
        self._program.stdin.flush()
        word, process_id = self._program.stdout.readline().split()
        assert word == "begins"
        return int(process_id)

    def end(self) -> int:
        """Return the exit code of that process, once it has ended."""
        assert self._program.stdout is not None
        return int(self._program.stdout.readline())


def lines_of(run_dir: Path) -> list[list[tuple[str, float]]]:
    """Return every line of the metrics that must be the same, bit for bit and in the same order."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [list(reproducible(json.loads(line)).items()) for line in lines]


def rollouts_of(run_dir: Path) -> list[tuple[str, str, int, list[tuple[int, ...]]]]:
    """Return the contents of the store for every rollout, its sampled tokens included."""
    with open_store(str(run_dir / "traces.db"), read_only=True) as store:
        return sorted(
            (
                info.metadata["split"],
                info.metadata["task_id"],
                info.metadata["index"],
                [tuple(trace.response_ids) for trace in store.by_session(info.id)],
            )
            for info in store.sessions(limit=10_000)
        )


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def assert_the_same(run_dir: Path, uninterrupted: Path) -> None:
    for line, expected in zip(lines_of(run_dir), lines_of(uninterrupted), strict=True):
        assert line == expected
    assert rollouts_of(run_dir) == rollouts_of(uninterrupted), "every rollout once, with the same tokens"
    assert checkpoints(run_dir) == checkpoints(uninterrupted)
    weights = Path("checkpoints", checkpoints(run_dir)[-1], "model.safetensors")
    assert (run_dir / weights).read_bytes() == (uninterrupted / weights).read_bytes()


@pytest.mark.slow
def test_run_killed_twice_equals_the_uninterrupted_one(model: Path, tmp_path: Path) -> None:
    run_dir, uninterrupted = tmp_path / "killed", tmp_path / "uninterrupted"
    with Lives(run_dir, model) as run:
        run.begin("update:3")  # the checkpoint before is that of step 2
        mortal_run.trainer_of(uninterrupted, model, NUM_STEPS).train()
        assert run.end() == -signal.SIGKILL
        assert checkpoints(run_dir) == ["step-000002"]
        run.begin("save:1")
        assert run.end() == -signal.SIGKILL
    assert checkpoints(run_dir) == ["step-000002", "step-000004.partial"]
    mortal_run.trainer_of(run_dir, model, NUM_STEPS, resume=True).train()
    assert_the_same(run_dir, uninterrupted)
    assert len(lines_of(run_dir)) == NUM_STEPS + 4


@pytest.mark.slow
def test_killed_run_with_sampling_and_replay_equals_the_uninterrupted_one(model: Path, tmp_path: Path) -> None:
    run_dir, uninterrupted = tmp_path / "killed", tmp_path / "uninterrupted"
    data = {"sampling": "difficulty", "replay": 0.4, "replay_steps": 2}
    with Lives(run_dir, model, data=data) as run:
        run.begin("update:4")
        mortal_run.trainer_of(uninterrupted, model, NUM_STEPS, data=data).train()
        assert run.end() == -signal.SIGKILL
    mortal_run.trainer_of(run_dir, model, NUM_STEPS, data=data, resume=True).train()
    assert_the_same(run_dir, uninterrupted)
    assert [dict(line)["batch/replayed"] for line in lines_of(run_dir) if "batch/replayed" in dict(line)][-1] == 0.4


@pytest.mark.slow
def test_ten_kills_do_not_change_the_result(model: Path, tmp_path: Path) -> None:
    run_dir, uninterrupted, num_steps = tmp_path / "killed", tmp_path / "uninterrupted", 40
    mortal_run.trainer_of(uninterrupted, model, num_steps).train()
    moments = random.Random(0)
    with Lives(run_dir, model, num_steps) as run:
        # Before the first checkpoint, during it, and at the ends of the first two epochs.
        for dies_at in ("update:1", "save:1", "update:2", "publish:4"):
            run.begin(dies_at)
            assert run.end() == -signal.SIGKILL
        for _ in range(6):
            process_id = run.begin()
            time.sleep(moments.uniform(0.3, 1.3))
            os.kill(process_id, signal.SIGKILL)
            assert run.end() == -signal.SIGKILL  # it was still training
        run.begin()
        assert run.end() == 0
    assert_the_same(run_dir, uninterrupted)


def test_run_killed_before_its_first_checkpoint_starts_over(run_trainer: RunTrainer, tmp_path: Path) -> None:
    first = run_trainer({"num_steps": 1}, val=True)
    for file in (first.trainer.run_dir / "checkpoints" / "step-000001").iterdir():
        file.unlink()  # as if it had never been written
    second = run_trainer({"num_steps": 1}, val=True, resume=True)
    assert [line["step"] for line in second.lines] == [0, 1, 1]
    assert len(rollouts_of(second.trainer.run_dir)) == 2 + 2 * 3 + 2


@pytest.mark.parametrize("resume", [True, False])
def test_run_that_failed_at_once_can_be_restarted(run_trainer: RunTrainer, resume: bool) -> None:
    def broken(word: str, base_url: str) -> float:
        raise ValueError("no such tool")

    failed = run_trainer(agent=broken, val=True, raises=RolloutError)
    assert not (failed.trainer.run_dir / "checkpoints").exists()
    again = run_trainer({"rollout": {"group_size": 4}}, val=True, resume=resume)
    assert again.steps == [1, 2]
    assert len(rollouts_of(again.trainer.run_dir)) == 2 + 2 * 2 * 4 + 2


def test_first_evaluation_is_kept_if_the_first_step_failed(run_trainer: RunTrainer) -> None:
    def broken(word: str, base_url: str) -> float:
        if word not in ("lime", "plum") and not mended:
            raise ValueError("no such tool")
        ask(base_url, word)
        return 1.0

    mended: list[bool] = []
    run_trainer(agent=broken, val=True, raises=RolloutError)
    mended.append(True)
    again = run_trainer(agent=broken, val=True, resume=True)
    assert again.words.count("lime") == 1, "only the final evaluation is run"


@pytest.mark.parametrize("resume", [True, False])
def test_run_with_deleted_checkpoints_is_not_restarted(run_trainer: RunTrainer, resume: bool) -> None:
    folder = run_trainer({"save_every": 1}).trainer.run_dir
    shutil.rmtree(folder / "checkpoints")
    before = {name: (folder / name).read_bytes() for name in ("config.yaml", "metrics.jsonl", "traces.db")}
    with pytest.raises(ConfigError, match="has metrics of 2 steps"):
        run_trainer({"num_steps": 4}, resume=resume)
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_interrupted_evaluation_is_repeated(run_trainer: RunTrainer) -> None:
    def interrupted(word: str, base_url: str) -> float:
        if word == "plum" and next(visits, None) == "second":
            interrupt()
        ask(base_url, word)
        return 1.0 if word == "plum" else float(len(base_url) % 2)

    visits = iter(["first", "second"])
    config = {"num_steps": 2, "eval": {"every": 1}, "save_every": 0}
    first = run_trainer(config, agent=interrupted, val=True, raises=KeyboardInterrupt)
    assert [(line["step"], "eval/accuracy" in line) for line in first.lines] == [(0, True), (1, False)]
    second = run_trainer(config, agent=interrupted, val=True, resume=True)
    assert [(line["step"], "eval/accuracy" in line) for line in second.lines] == [
        (0, True),
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]


def test_random_numbers_of_an_interrupted_step_are_repeated(run_trainer: RunTrainer, tmp_path: Path) -> None:
    def drawing(word: str, base_url: str) -> float:
        drawn.append(random.random())
        ask(base_url, word)
        return float(len(drawn) % 2)

    drawn: list[float] = []
    run_trainer({"num_steps": 3}, agent=drawing)
    whole, drawn = sorted(drawn), []
    config = {"num_steps": 3, "save_every": 0, "run_dir": str(tmp_path / "again")}
    run_trainer(config, agent=drawing, raises=KeyboardInterrupt, trackers=[At(2, interrupt)])
    run_trainer(config, agent=drawing, resume=True)
    assert set(whole) <= set(drawn)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optim": {"lr": 0.5}}, "optim.lr was 1e-06 and is 0.5"),
        ({"rollout": {"group_size": 4}}, "rollout.group_size was 3 and is 4"),
        ({"algorithm": {"name": "grpo", "clip_high": 0.3}}, "algorithm.clip_high was 0.2 and is 0.3"),
        ({"algorithm": {"name": "rloo"}}, "algorithm.name was 'grpo' and is 'rloo'"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"roles": {"agent": {"weight": 2}}}, "agent.weight was 1.0 and is 2.0"),
        ({"optim": {"schedule": "linear"}}, "optim.schedule was 'constant' and is 'linear'"),
    ],
)
def test_resuming_another_run_is_rejected_before_anything_starts(
    run_trainer: RunTrainer, change: Mapping[str, Any], message: str
) -> None:
    folder = run_trainer().trainer.run_dir
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"new run from these weights, with model\.path=") as refused:
        run_trainer({"num_steps": 4, **change}, resume=True)
    assert message in str(refused.value)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_other_tasks_are_rejected(run_trainer: RunTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    run_trainer()
    monkeypatch.setattr("tests.trainer.conftest.TASKS", [{"word": "fig"}])
    with pytest.raises(ConfigError, match=r"train_dataset was '4 tasks \(sha256 \w+\)' and is '1 task "):
        run_trainer({"num_steps": 4}, resume=True)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        ({"num_steps": 2}, "num_steps=2: the run in .* has done 2 steps; raise num_steps"),
        ({"num_epochs": 1}, "num_epochs=1: the run in .* has done 2 steps; raise num_epochs"),
        ({"num_steps": 2, "optim": {"schedule": "linear"}}, "has done 2 steps; .* new run .* model.path=.*step-000002"),
    ],
)
def test_resuming_a_finished_run_names_the_remedy(
    run_trainer: RunTrainer, length: Mapping[str, Any], expected: str
) -> None:
    run_trainer(length)
    refused = run_trainer(length, resume=True, raises=ConfigError)
    assert re.search(expected, str(refused.error))


def test_other_held_out_tasks_are_rejected_and_new_ones_accepted(run_trainer: RunTrainer) -> None:
    run_trainer()
    run_trainer({"num_steps": 3}, val=True, resume=True)
    with pytest.raises(ConfigError, match=r"val_dataset was '2 tasks \(sha256 \w+\)' and is None"):
        run_trainer({"num_steps": 4}, resume=True)


def test_role_settings_are_kept(run_trainer: RunTrainer) -> None:
    run_trainer({"roles": {"agent": {"weight": 2}}})
    with pytest.raises(ConfigError, match=r"roles\.agent\.weight was 2\.0 and is 1\.0"):
        run_trainer({"num_steps": 4}, resume=True)


def test_failed_resume_changes_no_files(run_trainer: RunTrainer) -> None:
    folder = run_trainer().trainer.run_dir
    (folder / "checkpoints" / "step-000002" / "version").write_text("x")  # of the same length as before
    before = {name: (folder / name).read_bytes() for name in ("config.yaml", "metrics.jsonl", "traces.db")}
    run_trainer({"num_steps": 4, "save_every": 3}, resume=True, raises=ValueError)
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_settings_without_influence_on_training_may_change(run_trainer: RunTrainer) -> None:
    run_trainer()
    free = {"save_every": 1, "keep_checkpoints": 1, "eval": {"every": 1}, "rollout": {"max_concurrent": 2}}
    free |= {"model": {"gradient_checkpointing": True, "engine": "vllm"}, "optim": {"offload": True}}
    free |= {"vllm": {"url": "http://127.0.0.1:8000/v1"}}
    explicit = {"algorithm": {"name": "grpo", "clip_high": 0.2}}  # its default
    assert run_trainer({"num_steps": 4, **free, **explicit}, val=True, resume=True).steps == [1, 2, 3, 4]


def test_address_of_a_teacher_may_change_but_not_its_model(tmp_path: Path) -> None:
    def identity(**teacher: Any) -> dict[str, Any]:
        config = TrainConfig(model={"path": "m"}, algorithm={"name": "distill"}, teacher=teacher)
        return identity_of(config, make_algorithm(config), Dataset([{"word": "fig"}]))

    before = identity(url="http://127.0.0.1:8000/v1")
    moved = identity(url="http://127.0.0.1:9000/v1", timeout_s=600.0, max_concurrent=2, num_retries=9, device="cpu")
    check_identity(before, moved, tmp_path)
    with pytest.raises(ConfigError, match=r"teacher\.model was None and is 'other'"):
        check_identity(before, identity(url="http://127.0.0.1:8000/v1", model="other"), tmp_path)


def test_resumed_run_keeps_the_dtype_of_its_weights(tmp_path: Path) -> None:
    def identity(*settings: str) -> dict[str, Any]:
        config = load_config(["model.path=m", "model.device=cpu", *settings])
        return identity_of(config, make_algorithm(config), Dataset([{"word": "fig"}]))

    check_identity(identity("model.dtype=float32"), identity(), tmp_path)
    message = r"the weights' format \(model\.dtype\) was 'bfloat16' and is 'float32'"
    with pytest.raises(ConfigError, match=message):
        check_identity(identity("model.dtype=bfloat16"), identity(), tmp_path)


@pytest.mark.parametrize(
    ("settings", "read_again"),
    [
        (["model.lora_rank=4"], "model.path"),
        (["algorithm.kl_coef=0.1"], "model.path"),
        (["algorithm.teacher_coef=1", "teacher.path={folder}"], "teacher.path"),
    ],
)
def test_changed_base_weights_are_rejected(tmp_path: Path, settings: list[str], read_again: str) -> None:
    def identity(*settings: str) -> dict[str, Any]:
        config = load_config([f"model.path={folder}", *(setting.format(folder=folder) for setting in settings)])
        return identity_of(config, make_algorithm(config), Dataset([{"word": "fig"}]))

    (folder := tmp_path / "model").mkdir()
    weights = bytearray(3_000_000)
    (folder / "model.safetensors").write_bytes(weights)
    before, plain = identity(*settings), identity()
    check_identity(before, identity(*settings), tmp_path)
    weights[2_000_000:2_100_000] = b"x" * 100_000
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(ConfigError, match=rf"digest of the weights in {read_again} was '\w+' and is '\w+'"):
        check_identity(before, identity(*settings), tmp_path)
    check_identity(plain, identity(), tmp_path)  # a plain run reads only its checkpoint


def test_number_of_steps_cannot_change_with_a_decaying_schedule(run_trainer: RunTrainer) -> None:
    config = {"num_steps": 2, "optim": {"schedule": "linear"}}
    run_trainer(config)
    with pytest.raises(ConfigError, match="num_steps was 2 and is 4"):
        run_trainer({**config, "num_steps": 4}, resume=True)


def test_damaged_checkpoint_error_names_the_previous_one(run_trainer: RunTrainer) -> None:
    run = run_trainer({"save_every": 1})
    newest = run.trainer.run_dir / "checkpoints" / "step-000002"
    (newest / "version").write_text("")
    with pytest.raises(ConfigError, match="version has 0 bytes instead of 1; delete this folder"):
        run_trainer({"num_steps": 4, "save_every": 1}, resume=True)
    for file in newest.iterdir():
        file.unlink()
    assert run_trainer({"num_steps": 4, "save_every": 1}, resume=True).steps == [1, 2, 3, 4]


def test_best_checkpoint_outlives_newer_ones(run_trainer: RunTrainer) -> None:
    def peaking(word: str, base_url: str) -> float:
        ask(base_url, word)
        return float(ScriptedBackend.latest.weight_version == 2)

    config = {
        "num_steps": 5,
        "save_every": 0,
        "keep_checkpoints": 1,
        "keep_best": "eval/accuracy",
        "eval": {"every": 1},
    }
    run = run_trainer(config, agent=peaking, val=True)
    assert run.result is not None
    assert run.result.best == run.trainer.run_dir / "checkpoints" / "step-000002"
    assert checkpoints(run.trainer.run_dir) == ["step-000002", "step-000005"]
    assert read_state(run.result.best)["score"] == 1.0


BEST = {"num_steps": 4, "tasks_per_step": 4, "save_every": 1, "keep_checkpoints": 1, "eval": {"every": 1}}


@pytest.mark.parametrize("stops_at", ["plum", "fig"], ids=["its evaluation", "the rollouts after it"])
def test_best_checkpoint_survives_two_stops(run_trainer: RunTrainer, stops_at: str) -> None:
    def peaking(word: str, base_url: str) -> float:
        is_best = ScriptedBackend.latest.weight_version == 2
        if word == stops_at and is_best and stops:
            stops.pop()()
        ask(base_url, word)
        return float(is_best)

    stops: list[Callable[[], None]] = []
    config = {**BEST, "keep_best": "eval/accuracy"}
    for resume in (False, True):
        stops.append(interrupt)
        run_trainer(config, agent=peaking, val=True, raises=KeyboardInterrupt, resume=resume)
    run = run_trainer(config, agent=peaking, val=True, resume=True)
    assert run.result is not None
    assert run.result.best == run.trainer.run_dir / "checkpoints" / "step-000002"


def test_run_stopped_in_its_last_evaluation_can_be_resumed(run_trainer: RunTrainer) -> None:
    def agent(word: str, base_url: str) -> float:
        if word == "plum" and ScriptedBackend.latest.weight_version == 2 and stops:
            stops.pop()()
        ask(base_url, word)
        return 1.0

    stops = [interrupt]
    stopped = run_trainer(agent=agent, val=True, raises=KeyboardInterrupt)
    assert stopped.steps == [1, 2]
    run = run_trainer(agent=agent, val=True, resume=True)
    assert [line["step"] for line in run.lines if "eval/accuracy" in line] == [0, 2]
    assert run.steps == [1, 2]
    with pytest.raises(ConfigError, match="has done 2 steps"):
        run_trainer(agent=agent, val=True, resume=True)


def test_failed_evaluation_is_repeated(run_trainer: RunTrainer) -> None:
    def agent(word: str, base_url: str) -> float:
        if word in ("lime", "plum") and ScriptedBackend.latest.weight_version == 2 and not mended:
            raise ConnectionError("the search is down")
        ask(base_url, word)
        return 1.0

    mended: list[bool] = []
    failed = run_trainer({"eval": {"every": 1}}, agent=agent, val=True)
    assert failed.lines[-1]["eval/num_failed"] == 2
    mended.append(True)
    run = run_trainer({"eval": {"every": 1}, "num_steps": 3}, agent=agent, val=True, resume=True)
    assert [line["step"] for line in run.lines if line.get("eval/accuracy") == 1.0] == [0, 1, 2, 3]
    assert [line["step"] for line in run.lines if "eval/num_failed" in line] == [0, 1, 2, 3]
    with open_store(str(run.trainer.run_dir / "traces.db"), read_only=True) as store:
        evaluated = [info for info in store.sessions() if info.metadata.get("split") == "eval"]
    assert len(evaluated) == 4 * 2


def test_warnings_after_a_resume_consider_the_steps_before_it(run_trainer: RunTrainer) -> None:
    def agent(word: str, base_url: str) -> float:
        ask(base_url, word)
        return next(rewards) if ScriptedBackend.latest.weight_version == 0 else 1.0

    rewards = itertools.cycle([0.0, 1.0])
    run_trainer({"num_steps": 2}, agent=agent)
    run = run_trainer({"num_steps": 4}, agent=agent, resume=True)
    solved = [line["step"] for line in run.lines if line.get("batch/zero_variance") == 1.0]
    assert solved == [2, 3, 4]
    assert [line["step"] for line in run.lines if "signal/no_variance" in line] == [4], "solved for three steps"


def test_score_of_a_checkpoint_is_that_of_its_own_metric() -> None:
    start = StartingPoint(state={"score": 0.5, "config": {"keep_best": "eval/reward"}})
    assert (start.score("eval/reward"), start.score("eval/accuracy"), start.score(None)) == (0.5, None, None)


def test_scores_of_another_metric_are_not_compared(run_trainer: RunTrainer) -> None:
    def dipping(word: str, base_url: str) -> float:
        ask(base_url, word)
        return float(ScriptedBackend.latest.weight_version != 3 or word == "plum")

    run_trainer({**BEST, "num_steps": 2, "keep_best": "eval/accuracy"}, agent=dipping, val=True)
    run = run_trainer({**BEST, "keep_best": "-eval/reward"}, agent=dipping, val=True, resume=True)
    assert run.result is not None
    assert run.result.best == run.trainer.run_dir / "checkpoints" / "step-000003"
    assert read_state(run.result.best)["score"] == -0.5


@pytest.mark.parametrize(
    ("name", "val", "message"),
    [
        ("rollout/reward", True, "use a metric of evaluations"),
        ("eval/accuracy", False, "give held-out tasks"),
        ("eval/acuracy", True, "use one of .*eval/accuracy, eval/reward"),
    ],
)
def test_invalid_keep_best_is_rejected(run_trainer: RunTrainer, name: str, val: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_trainer({"keep_best": name}, val=val)


@pytest.mark.parametrize(("evaluated_at", "kept"), [(2, 3), (1, 2)])
def test_metrics_of_repeated_steps_are_dropped(tmp_path: Path, evaluated_at: int, kept: int) -> None:
    lines = [
        '{"step": 1, "eval/reward": 0.5}',
        '{"step": 2, "loss": 1}',
        '{"step": 2, "eval/reward": 1}',
        '{"step": 3}',
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(f"{line}\n" for line in lines))
    StartingPoint(checkpoint=tmp_path, state={"step": 2, "evaluated_at": evaluated_at}).forget_metrics(tmp_path)
    assert metrics.read_text().splitlines() == lines[:kept]


def after(last: str | None) -> StartingPoint:
    return StartingPoint(state={"step": 3, "evaluated_at": 3, "last_session": last})


def test_only_rollouts_after_the_last_session_are_dropped() -> None:
    store = MemoryTraceStore()
    for session_id in ("one", "two", "three"):
        store.open_session(session_id, {"split": "train"})
    store.open_session("a user's own", {})
    assert after("one").forget_sessions(store) == 2
    assert [info.id for info in store.sessions()] == ["a user's own", "one"]
    assert after("of another store").forget_sessions(store) == 0
    assert after(None).forget_sessions(store) == 1
    assert [info.id for info in store.sessions()] == ["a user's own"]


def test_rollouts_of_finished_steps_are_kept() -> None:
    store = MemoryTraceStore()
    for split in ("train", "eval"):
        for step in (2, 3, 4):
            store.open_session(f"{split} {step}", {"split": split, "training_step": step})
    assert after(None).forget_sessions(store) == 3
    assert sorted(info.id for info in store.sessions()) == ["eval 2", "eval 3", "train 2"]
