"""An agent function out of a user's file: `FILE.py:function`, or out of an installed package: `package.module:function`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rllm.errors import ConfigError, PluginError
from rllm.registry import load_object, own_frames


def load_agent(agent: str, reward: str | None = None) -> Callable[..., Any]:
    """Import an agent function, and the reward that judges what it returns, if that is given.

    Raises:
        ConfigError: see `load_function`; or if the reward cannot be called with a task and an answer.
        PluginError: see `load_function`.
    """
    function = load_function(agent)
    if reward is None:
        from rllm.engine.returned import check_promise

        check_promise(function, agent)
        return function
    from rllm.rewards.scoring import with_reward

    return with_reward(function, load_function(reward, what="reward", anew=False))


def load_function(spec: str, *, what: str = "agent", anew: bool = True) -> Callable[..., Any]:
    """Import the function; `what` is what it is to be. With `anew` its file is run, also if it was before.

    Raises:
        ConfigError: if the file or the function is not there, or the file is no Python.
        PluginError: if the file raises on import.
    """
    place, separator, name = spec.rpartition(":")
    if not separator or not place or not name:
        raise ConfigError(f"{what}={spec!r}: use FILE.py:function or package.module:function")
    if not place.endswith(".py"):
        found = _imported(spec, what)
    else:
        module = _module_of(Path(place).expanduser().resolve(), what, anew=anew)
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


def _module_of(path: Path, what: str, *, anew: bool) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{what} file {str(path)!r} does not exist: run this in its folder, or give its whole path")
    known = sys.modules.get(path.stem)
    if not anew and known is not None and getattr(known, "__file__", None) == str(path):
        return known
    sys.path.insert(0, str(path.parent.resolve()))  # its neighbours are importable, as when it is run
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
