"""Jobs of a `ProcessPoolExecutor` belong to the session that they are submitted in.

Its processes serve whoever comes: one that was forked in a rollout would go on calling in its name, and one that was spawned knows
no session.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context
from typing import Any

from rllm.capture.side_calls import OWN_KEY
from rllm.sdk.context import Session, current_frame
from rllm.sdk.recording import metadata_stamp, read_stamp


def submitting(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    """`submit`, with the session of the caller handed to the process."""

    def submit_with_session(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        frame = current_frame()
        if frame is None or frame.base_url is None:
            return submit(self, fn, *args, **kwargs)
        # The process that this job may start outlives the job, so that process itself must inherit nothing.
        place = frame.name, frame.base_url, metadata_stamp(frame)
        return Context().run(submit, self, _in_session, place, fn, *args, **kwargs)

    return submit_with_session


def _in_session(place: tuple[str, str, str], fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    from rllm.sdk.propagation import installed  # which imports this module

    name, base_url, stamp = place
    metadata = read_stamp(stamp)
    uids = metadata.pop(OWN_KEY)
    with installed(), Session(metadata, name=name, base_url=base_url, uids_around=uids):
        return fn(*args, **kwargs)
