"""Exports of a run for other programs: its episodes, conversations to learn from, its model."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from rllm._runtime.files import new_file, whole_folder
from rllm.engine.episode_log import plain_task_id
from rllm.errors import ConfigError
from rllm.store.codec import readable_json
from rllm.tracking.about import check_contained, how_to_trust, is_own, way_to_a_run
from rllm.trainer.checkpoint import STATE_FILE, Checkpoints
from rllm.trainer.episode_records import TOOLS_KEY, was_learnable
from rllm.types import Episode, JSONObject

_OF_TRAINER = (STATE_FILE, "recovery.pt", "recovery.json", "critic.pt", "verl")
"""Files of a checkpoint that only a resumed run reads."""
_ADAPTER = "adapter_config.json"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def export_episodes(episodes: Iterable[Episode], path: Path) -> int:
    """Write one episode a line, as `Episode.to_dict` returns it, and return their number.

    Raises `ConfigError` if the file cannot be written or does not end in .jsonl.
    """
    return _write_lines(path, "episodes", map(Episode.to_dict, episodes))


def export_chat(episodes: Iterable[Episode], path: Path) -> int:
    """Write conversations in the chat format that `rllm sft` and others read, and return their number.

    A line has `messages`, `tools` if they were offered, and the `reward`. Raises `ConfigError` if the file cannot
    be written or does not end in .jsonl.
    """
    return _write_lines(path, "chat", chat_rows(episodes))


def chat_rows(episodes: Iterable[Episode]) -> Iterator[JSONObject]:
    """Yield a row for each trajectory that can be learned from.

    A trajectory that is not a single conversation has a row per call, in which only the last answer counts.
    """
    for episode in episodes:
        paths = [path for path in episode.trajectories if was_learnable(episode, path)]
        for path in paths if not episode.failed else ():
            about = {"task_id": plain_task_id(episode.task_id), "name": path.name, "reward": path.final_reward()}
            steps = [step for step in path.steps if step.chat_completions]
            is_one = path.is_cumulative()
            for step in steps[-1:] if is_one else steps:
                messages = step.chat_completions
                if not is_one:  # only the last answer counts
                    messages = [
                        {**message, "weight": 0} if message.get("role") == "assistant" else message
                        for message in messages[:-1]
                    ] + messages[-1:]
                tools = {"tools": step.info[TOOLS_KEY]} if TOOLS_KEY in step.info else {}
                yield {"messages": messages, **tools, **about}


def chosen_checkpoint(run: Path, name: str) -> Path:
    """Return a checkpoint of a run: `latest`, `best`, or a folder's name.

    Raises:
        ConfigError: if the run or the checkpoint does not exist; or if the run's folder is not the user's own, and the
            checkpoint leads outside of it, or is an adapter whose base model is a folder of this machine.
    """
    check_contained(run)
    checkpoints = Checkpoints(run, keep=1)
    found = {"latest": checkpoints.latest, "best": checkpoints.best}.get(name, lambda: run / "checkpoints" / name)()
    if found is not None and found.is_dir():
        if (found / _ADAPTER).is_file() and not is_own(run):
            from rllm.inference.local.loading import base_of

            base = base_of(found)
            if not _HUB_ID.fullmatch(base) or Path(base).exists():
                raise ConfigError(
                    f"run={str(run)!r}: its adapter names the folder {base!r} as its base model, and you did not begin "
                    f"this run here: {how_to_trust(run)}"
                )
        return found
    there = ", ".join(path.name for path in checkpoints.all())
    if not there:
        what = "it has no checkpoints" if run.exists() else "no such folder"
        raise ConfigError(f"run={str(run)!r}: {what}; use the folder of a training run: {way_to_a_run(run)}")
    lacks = "none has a score, which keep_best gives; " if name == "best" else ""
    raise ConfigError(f"checkpoint={name!r}: {lacks}{str(run)!r} has {there}; name one of them, or latest")


def export_model(checkpoint: Path, target: Path) -> None:
    """Write a Hugging Face folder that needs nothing else: an adapter is merged into the model that it was made for.

    Raises:
        ConfigError: if the folder is not empty, or the model cannot be loaded.
    """
    from rllm.inference.local.loading import load_model, save_model, save_tokenizer

    def write(new: Path) -> None:
        if not (checkpoint / _ADAPTER).is_file():
            _copy(checkpoint, new)
            return
        loaded = load_model(checkpoint, dtype="auto", device="cpu")
        save_model(loaded.model, new)
        save_tokenizer(loaded.tokenizer, new)

    _write_folder(target, "model", write)


def export_adapter(checkpoint: Path, target: Path) -> None:
    """Write the adapter alone, as peft reads it; raise `ConfigError` if there is none, or the folder is not empty."""
    if not (checkpoint / _ADAPTER).is_file():
        raise ConfigError(f"adapter={str(target)!r}: {str(checkpoint)!r} has all weights and no adapter; use --model")
    _write_folder(target, "adapter", lambda new: _copy(checkpoint, new))


def _copy(source: Path, target: Path) -> None:
    """Copy a checkpoint without the trainer's files, but with folders: a tokenizer keeps further templates in one."""
    shutil.copytree(source, target, ignore=lambda *_: _OF_TRAINER, dirs_exist_ok=True)


def _write_folder(target: Path, option: str, write: Callable[[Path], object]) -> None:
    """Let `write` fill a folder next to the target, then rename it, so that a failure leaves nothing."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{option}={str(target)!r} exists and is not empty: name another folder")
    try:
        with whole_folder(target) as new:
            new.mkdir()
            write(new)
    except (OSError, SafetensorError) as error:
        raise _unwritable(target, error) from error


def _write_lines(path: Path, option: str, rows: Iterable[JSONObject]) -> int:
    """Write the lines to a file next to the path, then rename it, and return their number."""
    if path.suffix != ".jsonl":
        raise ConfigError(f"{option}={str(path)!r}: name a file that ends in .jsonl")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as new, new.open("wb") as file:
            return sum(file.write(readable_json(row) + b"\n") > 0 for row in rows)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: Exception) -> ConfigError:
    why = getattr(error, "strerror", None) or error
    return ConfigError(f"{str(path)!r} cannot be written ({why}): choose another path")
