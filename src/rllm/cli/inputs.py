"""Inputs that a user names: agent and reward functions, and tasks."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rllm.data.dataset import PREPARED, Dataset, DatasetRegistry
from rllm.data.sources import READERS
from rllm.engine.signature import check_rows
from rllm.errors import ConfigError, PluginError, concerning
from rllm.registry import load_object, own_frames


def load_agent(agent: str, reward: str | None = None) -> Callable[..., Any]:
    """Import an agent function, and wrap it with a reward function if one is given.

    Raises:
        ConfigError: see `load_function`; or if the reward cannot be called with a task and an answer.
        PluginError: see `load_function`.
    """
    function = load_function(agent)
    if reward is None:
        from rllm.engine.validation import check_promise

        check_promise(function, agent)
        return function
    from rllm.rewards.scoring import with_reward

    return with_reward(function, load_function(reward, what="reward", reload=False))


def load_function(spec: str, *, what: str = "agent", reload: bool = True) -> Callable[..., Any]:
    """Import a function.

    Args:
        spec: `FILE.py:function` or `package.module:function`.
        what: its role, for error messages.
        reload: run its file even if it was imported before.

    Raises:
        ConfigError: if the file or the function does not exist, or the file is not Python.
        PluginError: if the file raises on import.
    """
    place, separator, name = spec.rpartition(":")
    if not separator or not place or not name:
        raise ConfigError(f"{what}={spec!r}: use FILE.py:function or package.module:function")
    if not place.endswith(".py"):
        found = _imported(spec, what)
    else:
        module = _module_of(Path(place).expanduser().resolve(), what, reload=reload)
        if not hasattr(module, name):
            raise ConfigError(
                f"{what}={spec!r}: {place} defines no {name!r}; it has {_functions(module) or 'no functions'}"
            )
        found = getattr(module, name)
    if not callable(found) or isinstance(found, type):
        kind = "a class" if isinstance(found, type) else type(found).__name__
        way = "; classes are trained from Python: AgentTrainer(agent_class=..., env_class=...) or (workflow_class=...)"
        is_of_agent = isinstance(found, type) and what == "agent"
        raise ConfigError(f"{what}={spec!r} is {kind}, not a function{way if is_of_agent else ''}")
    function: Callable[..., Any] = found
    return function


def _module_of(path: Path, what: str, *, reload: bool) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{what} file {str(path)!r} does not exist: run this in its folder, or give its whole path")
    known = sys.modules.get(path.stem)
    if not reload and known is not None and getattr(known, "__file__", None) == str(path):
        return known
    sys.path.insert(0, str(path.parent.resolve()))  # modules beside it are importable, as when it is run
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(_not_importable(path, error)) from error
    except (Exception, SystemExit) as error:
        raise PluginError(_not_importable(path, error)) from error
    return module


def _not_importable(path: Path, error: BaseException) -> str:
    return f"{path} cannot be imported:\n{own_frames(error)}"


def _imported(spec: str, what: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as with `python -m`
    return load_object(spec, kind=what)


def _functions(module: ModuleType) -> str:
    own = [name for name, value in vars(module).items() if callable(value) and value.__module__ == module.__name__]
    return ", ".join(own)


_NAME = re.compile(r"[\w.+-]+")


def tasks_for(function: Callable[..., Any], source: str, split: str | None, *, option: str) -> Dataset:
    """Read tasks for an agent function; see `read_tasks`.

    Raises:
        ConfigError: as `read_tasks`; or if the function cannot be called with one of them.
    """
    data = read_tasks(source, split, option=option)
    with concerning(option):
        check_rows(function, data)
    return data


def read_tasks(source: str, split: str | None, *, option: str) -> Dataset:
    """Read the tasks of a registered dataset, or of any source of `Dataset.load`.

    Args:
        source: file, registered name or hub id.
        split: split to use, if there are several.
        option: command-line option that gave the source, for error messages.

    Raises:
        ConfigError: if there are none, or the split is unknown.
        MissingDependencyError: see `Dataset.load`.
    """
    split_option = "--val-split" if option == "--val" else "--split"
    path = Path(source).expanduser()
    if split is not None and path.is_file():
        raise ConfigError(f"{split_option} {split}: {source!r} is a file, which has no splits")
    if path.exists() or path.suffix.lower() in READERS or not _NAME.fullmatch(source):
        with concerning(option):
            return Dataset.load(source, split=split)
    with concerning(option):
        splits = DatasetRegistry.get_dataset_splits(source)
    if not splits:
        made_by = f"; `python -m rllm.data.prepare {source}` registers it" if source in PREPARED else ""
        names = ", ".join(DatasetRegistry.get_dataset_names()) or "none"
        raise ConfigError(f"{option} {source}: it is neither a file nor registered{made_by}; registered: {names}")
    chosen = splits[0] if split is None and len(splits) == 1 else split
    data = DatasetRegistry.load_dataset(source, chosen) if chosen in splits else None
    if data is None:
        raise ConfigError(
            f"{split_option} {split or 'is missing'}: dataset {source!r} has the splits {', '.join(splits)}"
        )
    return data
