"""Sessions in other processes of a program: of `multiprocessing` and its pools, forks, and functions sent to a worker.

A process that is started in a session makes its calls there, and so do those that it starts in turn. Workers of pools
serve several sessions and belong to none: each job is sent together with the session that it is submitted in.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any

from rllm.capture.side_calls import OWN_KEY
from rllm.errors import ConfigError, shown
from rllm.sdk.context import Session, current_frame, in_no_session
from rllm.sdk.recording import metadata_stamp, read_stamp
from rllm.sdk.variables import beside_own_keys, gateway_variables, led_to

_SERVE_SEVERAL = {
    "concurrent.futures.process",
    "joblib.externals.loky.process_executor",
    "loky.process_executor",
    "multiprocessing.managers",
    "multiprocessing.pool",
    "torch.multiprocessing.pool",
}
"""Modules of the functions run by processes that serve several sessions."""


@dataclass(frozen=True, slots=True)
class Place:
    """A session as another process needs it."""

    name: str
    base_url: str
    stamp: str
    """Metadata and uids of the session, as in the header of a call."""

    @property
    def gateway_url(self) -> str:
        """URL of the gateway without the session, for a process that serves several."""
        return self.base_url.rpartition("/sessions/")[0] or self.base_url

    def session(self) -> Session:
        """Return a session for this process, whose calls are stored as those of the original are."""
        metadata = read_stamp(self.stamp)
        uids = metadata.pop(OWN_KEY)
        return Session(metadata, name=self.name, base_url=self.base_url, uids_around=uids)


def _here() -> Place | None:
    frame = current_frame()
    if frame is None or frame.base_url is None:
        return None
    return Place(frame.name, frame.base_url, metadata_stamp(frame))


def bind(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as one that runs in the current session, in whichever process or thread it is called.

    For workers that outlive a rollout and receive functions, by a queue for example, and for pools of other libraries
    such as joblib. Jobs of `ProcessPoolExecutor` and `multiprocessing.Pool` are bound already. The result can be
    pickled if the function can. Outside of a session with a gateway it is the function itself.

    Raises:
        ConfigError: if the function is async.
    """
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"bind({shown(function)}): this function is async: bind one that calls asyncio.run")
    place = _here()
    return function if place is None else partial(_in_session, place, function)


def _in_session(place: Place, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    from rllm.sdk.propagation import installed  # which imports this module

    # Not the URL of the session: a client that the worker keeps for its next job must not take this session along.
    with in_no_session(), installed(), led_to(place.gateway_url), place.session():
        return function(*args, **kwargs)


def submitting(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    """Wrap `ProcessPoolExecutor.submit` so that jobs run in the session of their caller."""

    def submit_with_session(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        # The process that this job may start outlives the job, so that process itself must inherit nothing.
        return Context().run(submit, self, bind(fn), *args, **kwargs)

    return submit_with_session


def starting(start: Callable[..., None]) -> Callable[..., None]:
    """Wrap `multiprocessing.Process.start` so that the process is in the session of its starter."""

    def start_with_session(self: Any) -> None:
        place = _here()
        if getattr(getattr(self, "_target", None), "__module__", None) in _SERVE_SEVERAL:
            _start_with(self, partial(Context().run, start), _Arrival(None, _gateway_of_this_process()))
        elif place is None:
            start(self)
        else:
            _start_with(self, start, _Arrival(place, {}))
            frame = current_frame()
            assert frame is not None
            frame.note_process(self)

    return start_with_session


def _start_with(process: Any, start: Callable[..., None], arrival: _Arrival) -> None:
    # Before all else, since what the process runs may belong to a module that makes a client when it is imported.
    process.__dict__ = {"_rllm_arrival": arrival, **process.__dict__}
    try:
        start(process)
    finally:
        process.__dict__.pop("_rllm_arrival", None)


def _gateway_of_this_process() -> dict[str, str]:
    """Return the variables that lead to a gateway here; a fork server has those of the moment at which it began."""
    url = os.environ.get("OPENAI_BASE_URL", "")
    names = gateway_variables(url) if url.startswith(("http://", "https://")) else {}
    return {name: os.environ[name] for name in names if name in os.environ}


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Preparation of a new process, done where it is unpickled; a fork needs none of it."""

    place: Place | None
    variables: Mapping[str, str]

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.place, self.variables)


def _arrive(place: Place | None, variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    if place is not None:
        from rllm.sdk.propagation import installed  # which imports this module

        _lead_to_session(place.base_url)
        installed().install()
        place.session().__enter__()


def _lead_to_session(base_url: str) -> None:
    variables = gateway_variables(base_url, inherited=os.environ)
    os.environ.update(beside_own_keys(variables, os.environ))


def _in_fork() -> None:
    """Lead the clients of a fork to the session that it was made in, those too that no patch reaches."""
    frame = current_frame()
    if frame is not None and frame.base_url is not None:
        _lead_to_session(frame.base_url)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_fork)
