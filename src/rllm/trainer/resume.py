"""Resuming runs: the starting point, settings that must not change, and records to delete as they are made again."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import orjson

from rllm.algorithms.base import Algorithm
from rllm.algorithms.from_config import name_of
from rllm.backends.verl.settings import weights_dtype
from rllm.config.schema import RoleConfig, TrainConfig
from rllm.config.yaml_file import leaves, read_settings
from rllm.data.dataset import Dataset
from rllm.engine.episode_log import EPISODES
from rllm.errors import ConfigError, counted
from rllm.evaluation.folder import dataset_identity
from rllm.inference.local.loading import choose_device, choose_dtype
from rllm.store.base import TraceStore, every_session
from rllm.store.codec import readable_json
from rllm.tracking.about import LOCK_FILE, STORE, forget_trackers
from rllm.tracking.base import forget_after, last_step
from rllm.trainer.checkpoint import Checkpoints, read_state, restore_generators
from rllm.types import JSONMapping, JSONObject

logger = logging.getLogger(__name__)

MAY_CHANGE = (
    "run_dir",
    "num_steps",
    "num_epochs",
    "save_every",
    "keep_checkpoints",
    "keep_best",
    "keep_batches",
    "store",
    "trackers",
    "project",
    "model.device",
    "model.gradient_checkpointing",
    "model.reference_offload",
    "rollout.max_concurrent",
    "rollout.timeout_s",
    "rollout.num_retries",
    "optim.micro_batch_tokens",
    "optim.offload",
    "rollout.runner",
    "ray.",
    "verl.timeout_s",
    "eval.",
    "gateway.",
    "model.engine",
    "vllm.",
    "teacher.device",
    "teacher.url",
    "teacher.max_concurrent",
    "teacher.timeout_s",
    "teacher.num_retries",
)
"""Settings, and whole sections (`eval.`), that may change on resume: they do not decide what is learned."""

VAL_DATASET = "val_dataset"
_NUM_PIECES, _PIECE = 256, 4096
"""Number of pieces of a weights file that are compared, and their bytes."""
_ROLES = "roles."


@dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """Beginning of a run: a checkpoint, or nothing."""

    checkpoint: Path | None = None
    state: JSONMapping = field(default_factory=dict)
    """State saved with the weights."""

    @property
    def steps_done(self) -> int:
        return int(self.state.get("step", 0))

    @property
    def evaluated_at(self) -> int:
        """Number of steps after which the policy was last evaluated; -1 for never."""
        return int(self.state.get("evaluated_at", self.state.get("step", -1)))

    def has_done(self, num_steps: int) -> bool:
        """Return whether a run of `num_steps` steps is complete, including its last evaluation."""
        return self.steps_done > num_steps or self.steps_done == num_steps <= self.evaluated_at

    def score(self, keep_best: str | None) -> float | None:
        """Return the score of the last evaluation, if it was by this metric."""
        score: float | None = self.state.get("score")
        return score if self.state.get("config", {}).get("keep_best") == keep_best else None

    def forget_metrics(self, run_dir: Path) -> None:
        """Drop the lines of `metrics.jsonl` that will be written again; a new run is also new to its trackers."""
        path = run_dir / "metrics.jsonl"
        if self.checkpoint is None:
            forget_after(path, -1)
            forget_trackers(run_dir)
        else:
            forget_after(path, self.steps_done, evaluated=self.evaluated_at == self.steps_done)

    def forget_sessions(self, store: TraceStore) -> int:
        """Delete the rollouts that will be repeated from the run's own store, and return their number.

        If the last session of the run is not in the store, it is another store, and nothing is deleted.
        """
        lost: list[str] = []
        last = self.state.get("last_session")
        for info in every_session(store):
            if info.id == last:
                break
            if (split := info.metadata.get("split")) is not None:  # a rollout
                done = self.evaluated_at if split == "eval" else self.steps_done - 1
                if info.metadata.get("training_step", done + 1) > done:
                    lost.append(info.id)
        else:
            if last is not None:
                logger.warning("the store has no session %s, so the traces of lost steps stay in it", last)
                return 0
        with ThreadPoolExecutor(max_workers=16) as pool:  # deletions of several threads share a commit
            list(pool.map(store.delete, lost))
        if lost:
            logger.info("the traces of %s of lost steps are deleted", counted(len(lost), "rollout"))
        return len(lost)

    def restore_rng(self) -> None:
        """Restore the state of random numbers."""
        if "rng" in self.state:
            restore_generators(self.state["rng"])


def starting_point(checkpoints: Checkpoints, run_dir: Path, *, resume: bool) -> StartingPoint:
    """Return where to begin; a run killed before its first checkpoint begins again.

    Raises:
        ConfigError: if there is nothing to resume; if there is a run and `resume` is false; or if its last checkpoint
            is damaged.
    """
    latest, begun = checkpoints.latest(), (run_dir / "config.yaml").exists()
    if latest is None:
        if resume and not begun:
            raise ConfigError(f"run_dir={str(run_dir)!r} has no checkpoint to resume from: start a new run")
        if not resume:
            # Files of something else, which a run would replace or extend.
            foreign = (STORE, EPISODES) if not begun else () if (run_dir / LOCK_FILE).exists() else ("config.yaml",)
            if found := next((name for name in foreign if (run_dir / name).exists()), None):
                raise ConfigError(f"run_dir={str(run_dir)!r} has {found}, but not from a run: choose another folder")
        if begun:  # starting over would delete what a run that has lost its checkpoints still has
            num_logged = last_step(run_dir / "metrics.jsonl")
            save_every = read_settings(run_dir / "config.yaml")[0].get("save_every")
            if isinstance(save_every, int) and 0 < save_every < num_logged:
                raise ConfigError(
                    f"run_dir={str(run_dir)!r} has metrics of {num_logged} steps (save_every={save_every}) but no "
                    "checkpoint, and starting over would delete them: restore checkpoints/, or choose another folder"
                )
        return StartingPoint()
    if not resume:
        raise ConfigError(
            f"run_dir={str(run_dir)!r} already has a run: to continue it, use --resume {run_dir} or "
            "AgentTrainer(..., resume=True); to start over, choose another folder, or delete this one"
        )
    try:
        return StartingPoint(checkpoint=latest, state=read_state(latest))
    except ConfigError as error:
        raise ConfigError(f"{error}; {checkpoints.way_back(latest)}") from error


def identity_of(
    config: TrainConfig, algorithm: Algorithm, train_data: Dataset, val_data: Dataset | None = None
) -> JSONObject:
    """Return everything that decides what a run learns, and the tasks it is evaluated on, by key."""
    settings = config.model_dump(mode="json")
    settings["algorithm"] = {"name": name_of(config.algorithm), **algorithm.settings()}
    identity = {key: value for key, value in leaves(settings) if not _may_change(key)}
    del identity["model.dtype"]  # `auto` may mean another format on another device
    dtype = choose_dtype(config.model.dtype, choose_device(config.model.device))
    own_format = weights_dtype(config) if config.backend == "verl" else str(dtype).removeprefix("torch.")
    identity["the weights' format (model.dtype)"] = own_format
    if config.optim.schedule != "constant":
        identity["num_steps"] = config.num_steps  # the schedule is stretched over them
    identity["train_dataset"] = " of ".join(
        [dataset_identity(train_data), *filter(None, ["+".join(train_data.sources)])]
    )
    if val_data is not None:
        identity[VAL_DATASET] = dataset_identity(val_data)
    # Weights that a resumed run does not read from its checkpoint: the base of an adapter, the reference and the
    # teacher. A hub id identifies its weights.
    read_again = {"teacher.path": config.teacher.path}
    if config.model.lora_rank or algorithm.needs_reference:
        read_again["model.path"] = config.model.path
    for key, path in read_again.items():
        if path is not None and (folder := Path(path).expanduser()).is_dir():
            identity[f"digest of the weights in {key}"] = digest_of_weights(folder)
    plain: JSONObject = orjson.loads(readable_json(identity))
    return plain


def digest_of_weights(folder: Path) -> str:
    """Return a digest of pieces all over the files; training changes every matrix, and whole files take minutes."""
    digest = sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]):
        if path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for start in range(0, size, max(size // _NUM_PIECES, _PIECE)):
                    file.seek(start)
                    digest.update(file.read(_PIECE))
    return digest.hexdigest()[:16]


def _may_change(key: str) -> bool:
    return key in MAY_CHANGE or f"{key.partition('.')[0]}." in MAY_CHANGE


def check_identity(before: JSONMapping, now: JSONMapping, checkpoint: Path) -> None:
    """Refuse to resume a different run. Settings missing in `before` had their defaults.

    Held-out tasks may be added if there were none. Raises `ConfigError` naming every changed key with both values.
    """
    defaults = dict(leaves(TrainConfig().model_dump(mode="json")))
    changed = [
        f"{key} was {one!r} and is {other!r}"
        for key in dict.fromkeys([*now, *(key for key in before if key.startswith(_ROLES) or key == VAL_DATASET)])
        if (one := before.get(key, _default(key, now, defaults)))
        != (other := now.get(key, _default(key, {}, defaults)))
    ]
    if changed:
        raise ConfigError(
            f"{str(checkpoint)!r} belongs to a run with other settings: {'; '.join(changed)}. Set them back, or start "
            f"a new run from these weights, with model.path={checkpoint} and another run_dir"
        )


def _default(key: str, now: JSONMapping, defaults: JSONMapping) -> object:
    """Return the value of a setting that a run does not record; the present one if unknown."""
    if key.startswith(_ROLES):
        field = RoleConfig.model_fields.get(key.rpartition(".")[2])
        return field.default if field else None
    if _may_change(key):
        return now.get(key)
    return defaults.get(key, now.get(key))
