"""Objects by short name or import path: `resolve("grpo", ALGORITHMS)` or `resolve("my_pkg.mod:Class", ALGORITHMS)`.

There are no decorators and no import side effects, so a name means the same in every process, including Ray workers.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rllm.errors import ConfigError, PluginError, RLLMError, needed_to_train

__all__ = [
    "closest",
    "did_you_mean",
    "field_docs",
    "load_function",
    "load_object",
    "own_frames",
    "resolve",
    "suggestion",
]

_LIBRARIES = [Path(__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))]
"""Folders of code that is not the user's: this package, the standard library, and installed packages."""


def resolve(name: str, known: Mapping[str, str], *, kind: str = "name") -> Any:
    """Return the object that a short name in `known`, or an import path `pkg.mod:Attribute`, stands for.

    Raises:
        ConfigError: if the name is neither; the message lists the known names. Also see `load_object`.
        PluginError: see `load_object`.
    """
    path = known.get(name, name)
    if ":" not in path:
        hint = did_you_mean(name, known) or f"use one of {', '.join(sorted(known))}, or 'package.module:Name'"
        raise ConfigError(f"{kind}={name!r} is not known: {hint}")
    return load_object(path, kind=kind)


def did_you_mean(name: str, known: Collection[str], section: str = "") -> str | None:
    """Return a question that names the closest known name, with its section; `None` if none is close."""
    meant = closest(name, known)
    return None if meant is None else f"did you mean {'.'.join(filter(None, (section, meant)))!r}?"


def suggestion(name: str, known: Collection[str], section: str = "") -> str:
    """Return a question that names the closest known name, or else a list of the known ones."""
    return did_you_mean(name, known, section) or f"use one of {', '.join(known)}"


def closest(name: str, known: Collection[str], *, cutoff: float = 0.6) -> str | None:
    """Return the most similar known name; `None` if its similarity is below `cutoff`, where 1 means equal.

    A name with the same letters comes first: the most common typing error swaps two of them.
    """
    swapped = [item for item in known if sorted(item) == sorted(name)]
    found = difflib.get_close_matches(name, swapped or known, n=1, cutoff=0.0 if swapped else cutoff)
    return found[0] if found else None


def load_object(path: str, *, kind: str = "name") -> Any:
    """Import `package.module:Attribute`.

    Raises:
        ConfigError: if the module is not found, has a syntax error, or does not have the attribute.
        PluginError: if its import raises.
        MissingDependencyError: if it belongs to this package and needs the extra `train`.
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


def search_current_folder() -> None:
    """Add the current folder to the import path, as `python -m` does."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)


def load_function(
    spec: str, *, what: str = "agent", reload: bool = True, or_class: bool = False
) -> Callable[..., object]:
    """Import a function.

    Args:
        spec: `FILE.py:function` or `package.module:function`.
        what: its role, for error messages.
        reload: run its file even if it was imported before.
        or_class: accept a class, too.
    """
    place, separator, name = spec.rpartition(":")
    if not separator or not place or not name:
        raise ConfigError(f"{what}={spec!r}: use FILE.py:function or package.module:function")
    if not place.endswith(".py"):
        search_current_folder()
        found = load_object(spec, kind=what)
    else:
        module = _module_of(Path(place).expanduser().resolve(), what, reload=reload)
        if not hasattr(module, name):
            own = (key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
            raise ConfigError(f"{what}={spec!r}: {place} defines no {name!r}; it has {', '.join(own) or 'nothing'}")
        found = getattr(module, name)
    if not callable(found) or (isinstance(found, type) and not or_class):
        kind = "a class" if isinstance(found, type) else type(found).__name__
        way = (
            "; classes are trained from Python: AgentTrainer(agent_class=..., env_class=...) or (workflow_class=...), "
            "or with --env"
        )
        is_of_agent = isinstance(found, type) and what == "agent"
        raise ConfigError(f"{what}={spec!r} is {kind}, not a function{way if is_of_agent else ''}")
    function: Callable[..., object] = found
    return function


def _module_of(path: Path, what: str, *, reload: bool) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{what} file {str(path)!r} does not exist: run this in its folder, or give its whole path")
    known = sys.modules.get(path.stem)
    if not reload and known is not None and getattr(known, "__file__", None) == str(path):
        return known
    sys.path.insert(0, str(path.parent.resolve()))  # modules next to it are importable, as when it is run
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        kind = ConfigError if isinstance(error, SyntaxError) else PluginError
        raise kind(f"{path} cannot be imported:\n{own_frames(error)}") from error
    return module


def _raised(path: str, kind: str, error: BaseException) -> PluginError:
    return PluginError(f"{kind}={path!r} cannot be imported:\n{own_frames(error)}")


def own_frames(error: BaseException) -> str:
    """Return the traceback without frames of libraries, which do not help the user."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith("<")
        and not any(Path(frame.filename).is_relative_to(folder) for folder in _LIBRARIES)
    ]
    return "".join([*traceback.format_list(own), *traceback.format_exception_only(error)]).rstrip()


@cache
def field_docs(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class and of its bases, each in one line."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                docs[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
    return docs
