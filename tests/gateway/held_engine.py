"""An engine whose answers, and a store whose writes, are released by the test, so that tests do not depend on timing."""

import asyncio
import threading
from concurrent.futures import Future

from rllm.inference.engine import SamplingParams
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine


class HeldEngine(ScriptedEngine):
    """Engine that answers nothing before `go` is set, except for the first `num_pieces` of each stream."""

    def __init__(self, script=("hello",), *, num_pieces=0):
        super().__init__(script)
        self.go = threading.Event()
        self.num_cancelled = 0
        self._num_pieces = num_pieces

    async def get_model_response(self, messages, *, tools=None, **params):
        output = self._answer(list(messages), tools, SamplingParams.from_request(params))
        await self._wait()
        self.outputs.append(output)
        return output

    async def stream_model_response(self, messages, *, tools=None, **params):
        number = 0
        async for piece in super().stream_model_response(messages, tools=tools, **params):
            if number == self._num_pieces:
                await self._wait()
            number += 1
            yield piece

    async def _wait(self):
        try:
            while not self.go.is_set():  # noqa: ASYNC110  (set by another thread)
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


class HeldStore(MemoryTraceStore):
    """Store that finishes no write before it is released."""

    def __init__(self):
        super().__init__()
        self.release = threading.Event()
        self.asked = threading.Event()

    def add(self, traces, *, session=None):
        super().add(traces, session=session)
        held = Future()
        held.set_running_or_notify_cancel()
        self.asked.set()

        def finish():
            self.release.wait(600)
            held.set_result(None)

        threading.Thread(target=finish, daemon=True).start()
        return held
