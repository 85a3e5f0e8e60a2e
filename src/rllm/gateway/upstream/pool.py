"""Several replicas of one inference server as one upstream: calls go where they are answered soonest, and wait rather than fail.

A session stays with the replica that has its prompts in its cache; a new one goes where least is under way. While nobody can
take a call it is held: clients wait for minutes, and some end for good at the first 429 or 5xx. An attempt that gave no answer
is made again, on another replica first, unless some of its answer has been passed on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from rllm.capture import PriorAnswer
from rllm.errors import InferenceError
from rllm.gateway.errors import UpstreamError
from rllm.gateway.upstream.base import UpstreamCall
from rllm.gateway.upstream.http import HTTPUpstream
from rllm.gateway.upstream.replica import Replica
from rllm.gateway.upstream.replicas import PoolConfig, ReplicaSet
from rllm.gateway.upstream.route import Route
from rllm.inference.engine import lost_in_prompt
from rllm.types import Message

_MAX_BROKEN_OFF = 2
"""How often a call may be made again that a replica had when it died: it may be what kills them."""
_MAX_RETRIES = 16
"""How often a call may be made again in all; what `hold_timeout_s` bounds is each wait for another try."""


class UpstreamPool:
    """An `Upstream` of several HTTP upstreams. Belongs to the event loop that first uses it, until it is closed."""

    def __init__(
        self,
        urls: Sequence[str],
        connect: Callable[[str], HTTPUpstream] = HTTPUpstream,
        config: PoolConfig | None = None,
    ) -> None:
        """Nothing is sent before the first call.

        Args:
            urls: of the replicas, which must serve the same model.
            connect: makes the upstream of a URL, with what all of them have in common.

        Raises:
            ConfigError: if there is no URL, one twice, or one that is not a web address.
        """
        self.replicas = ReplicaSet(urls, connect, config or PoolConfig())
        self._any = next(iter(self.replicas)).upstream

    def prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return self._any.prepare(request)

    def ignored(self, request: Mapping[str, Any]) -> Sequence[str]:
        return self._any.ignored(request)

    def continued_prompt(self, request: Mapping[str, Any], prior: PriorAnswer) -> list[int] | None:
        return self._any.continued_prompt(request, prior)

    def lost(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> tuple[str, ...]:
        """See `ChatTemplate.lost`."""
        return lost_in_prompt(self._any, messages, tools)

    async def complete(self, call: UpstreamCall) -> dict[str, Any]:
        route = call.route
        while True:
            replica = await self.replicas.acquire(route)
            began = time.monotonic()
            try:
                answer = await replica.upstream.complete(call)
            except UpstreamError as error:
                if not self._tries_again(replica, route, error, began):
                    raise
            else:
                self._answered(replica, route)
                return answer
            finally:
                self.replicas.release(replica)

    async def stream(self, call: UpstreamCall) -> AsyncGenerator[list[dict[str, Any]], None]:
        route = call.route
        while True:
            replica = await self.replicas.acquire(route)
            began, passed_on = time.monotonic(), False
            try:
                async with aclosing(replica.upstream.stream(call)) as batches:
                    async for batch in batches:
                        passed_on = True
                        yield batch
            except UpstreamError as error:
                if not self._tries_again(replica, route, error, began, passed_on=passed_on):
                    raise
            else:
                self._answered(replica, route)
                return
            finally:
                self.replicas.release(replica)

    async def models(self) -> list[dict[str, Any]]:
        """Those of the first replica that says; they all serve the same."""
        problem = InferenceError("all upstreams were removed: add one with POST /upstreams", status_code=503)
        for replica in sorted(self.replicas, key=lambda replica: not replica.up):
            try:
                return await replica.upstream.models()
            except InferenceError as error:
                problem = error
        raise problem

    async def check(self) -> None:
        """Return as soon as one replica answers, else raise `InferenceError`."""
        self.replicas.watch()
        if self.replicas.all_paused:
            raise InferenceError(
                "the upstreams are paused: calls are held until POST /upstreams/resume", status_code=503
            )
        checks = [asyncio.create_task(replica.check()) for replica in self.replicas if not replica.paused]
        problems = []
        try:
            for check in asyncio.as_completed(checks):
                try:
                    return await check
                except InferenceError as error:
                    problems.append(str(error))
        finally:
            for task in checks:
                task.cancel()
            await asyncio.gather(*checks, return_exceptions=True)
        raise InferenceError("; ".join(problems) or "all upstreams were removed: add one with POST /upstreams")

    async def close(self) -> None:
        await self.replicas.close()

    def _tries_again(
        self, replica: Replica, route: Route, error: UpstreamError, began: float, *, passed_on: bool = False
    ) -> bool:
        """Note what a failure says about the replica, and in the trace; returns whether to make the call again.

        Args:
            passed_on: whether the agent has some of the answer already.
        """
        self.replicas.failed(replica, error)
        num_broken_off = sum(retry["fault"] == "broke_off" for retry in route.retries)
        if error.fault == "call" or passed_on or len(route.retries) >= _MAX_RETRIES:
            return False
        if error.fault == "broke_off" and num_broken_off >= _MAX_BROKEN_OFF:
            return False
        lost_s = time.monotonic() - began
        attempt = {"replica": replica.address, "fault": error.fault, "status": error.status_code}
        route.retries.append({**attempt, "error": str(error), "lost_s": lost_s})
        return True

    def _answered(self, replica: Replica, route: Route) -> None:
        replica.answered()
        if replica.weight_version != route.weight_version:
            route.updated_to = replica.weight_version
