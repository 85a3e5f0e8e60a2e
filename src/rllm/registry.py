"""Short names and import paths to objects: `resolve("grpo", ALGORITHMS)` or `resolve("my_pkg.mod:Class", ALGORITHMS)`.

No decorators and no import side effects, so a name means the same in every process, Ray workers included.
"""

from __future__ import annotations

import difflib
import importlib
import sysconfig
import traceback
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError, PluginError, RLLMError, needed_to_train

__all__ = ["closest", "did_you_mean", "load_object", "own_frames", "resolve"]

_LIBRARIES = [Path(__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))]
"""Where code lies that is not the user's: ours, Python's, and what is installed."""


def resolve(name: str, known: Mapping[str, str], *, kind: str = "name") -> Any:
    """The object behind a short name of `known`, or behind `pkg.mod:Attribute`.

    Raises:
        ConfigError: if it is neither, in which case the message lists what is known; or see `load_object`.
        PluginError: see `load_object`.
    """
    path = known.get(name, name)
    if ":" not in path:
        meant = did_you_mean(name, known)
        hint = f"{meant} " if meant else ""
        raise ConfigError(f"{kind}={name!r} is not known: {hint}use one of {sorted(known)} or 'package.module:Name'")
    return load_object(path, kind=kind)


def did_you_mean(name: str, known: Collection[str], section: str = "") -> str | None:
    """A question that names the closest of the known names, with the section they are in; `None` if none is close."""
    meant = closest(name, known)
    return None if meant is None else f"did you mean {'.'.join(filter(None, (section, meant)))!r}?"


def closest(name: str, known: Collection[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that is most like this one; `None` if none is as much alike as `cutoff`, where 1 is the same.

    One with the same letters comes first: the commonest slip swaps two of them.
    """
    swapped = [item for item in known if sorted(item) == sorted(name)]
    found = difflib.get_close_matches(name, swapped or known, n=1, cutoff=0.0 if swapped else cutoff)
    return found[0] if found else None


def load_object(path: str, *, kind: str = "name") -> Any:
    """Import `package.module:Attribute`.

    Raises:
        ConfigError: if the module is not found, is no Python, or lacks the attribute.
        PluginError: if it raises.
        MissingDependencyError: if it is ours, and to train is not installed.
    """
    module_name, _, attribute = path.partition(":")
    ours = module_name.startswith("rllm.")
    try:
        with needed_to_train(f"{kind}={path!r}") if ours else nullcontext():
            target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise _raised(path, kind, error) from error
        raise ConfigError(f"{kind}={path!r}: there is no module {module_name!r} on the Python path") from error
    except SyntaxError as error:
        raise ConfigError(
            f"{kind}={path!r}: {error.filename}, line {error.lineno}: SyntaxError: {error.msg}"
        ) from error
    except RLLMError:
        raise
    except (Exception, SystemExit) as error:
        raise _raised(path, kind, error) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ConfigError(f"{kind}={path!r}: module {module_name!r} has no {attribute!r}")
        target = getattr(target, part)
    return target


def _raised(path: str, kind: str, error: BaseException) -> PluginError:
    return PluginError(f"{kind}={path!r} cannot be imported:\n{own_frames(error)}")


def own_frames(error: BaseException) -> str:
    """The traceback without what lies in libraries, Python's or ours: how their code came to be called is no help."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith("<") and not _is_library(Path(frame.filename))]
    return "".join([*traceback.format_list(own), *traceback.format_exception_only(error)]).rstrip()


def _is_library(file: Path) -> bool:
    return any(file.is_relative_to(folder) for folder in _LIBRARIES)
