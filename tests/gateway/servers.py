"""Inference servers of raw sockets with scripted behaviour, for tests of their clients."""

import asyncio
import contextlib
import json

from ..ports import free_port

ANSWER = {
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi"},
            "logprobs": {"content": [{"token": "hi", "logprob": -0.5, "bytes": None, "top_logprobs": []}]},
            "finish_reason": "stop",
            "token_ids": [7],
        }
    ],
    "prompt_token_ids": [1, 2],
}


def http(status, body, *headers):
    """Return an HTTP answer; the body is bytes, or becomes JSON."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def refusal(status, *headers):
    return http(status, {"error": {"message": f"busy with {status}"}}, *headers)


GOOD = http(200, ANSWER)
CUT = GOOD[:-10]


def event_stream(*events, end=True):
    """Return server-sent events in HTTP chunks, without their end if the connection is to close there."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = [b"data: %s\n\n" % json.dumps(event).encode() for event in events]
    if end:
        chunks.append(b"data: [DONE]\n\n")
    return head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + (b"0\r\n\r\n" if end else b"")


STREAMED = event_stream(
    {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop", "token_ids": [7], "logprobs": None}]}
)


class RawServer:
    """Server that answers each call with the next of `answers`, repeating the last one; clear `hold` to delay answers.

    An answer that is not one whole HTTP message ends the connection.
    """

    def __init__(self, *answers):
        self.answers = list(answers or [GOOD])
        self.requests = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.num_broken_off = 0
        """Number of calls whose client disconnected before they were answered."""
        self.hangs = False
        """True to leave health checks unanswered."""
        self.models = http(200, {"data": [{"id": "m"}]})
        """Answer to a health check."""
        self._port = free_port()
        self._serving = set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._port}/v1"

    async def start(self):
        """Listen, on the same port each time."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        return self

    async def stop(self):
        """Stop listening, and break off calls in flight."""
        self._server.close()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await asyncio.sleep(0.01)  # Closed connections are removed in the next turns of the event loop.

    async def __aenter__(self):
        return await self.start()

    async def __aexit__(self, *exc_info):
        await self.stop()

    def _accept(self, reader, writer):
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(lambda task: (self._serving.discard(task), writer.close()))

    async def _serve(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
                if head.startswith(b"GET"):
                    if self.hangs:
                        await asyncio.sleep(3600)
                    writer.write(self.models)
                    continue
                self.requests.append(json.loads(body))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if not await self._held(reader):
                    self.num_broken_off += 1
                    return
                writer.write(answer)
                await writer.drain()
                if not answer.endswith((b"}", b"0\r\n\r\n")):
                    return

    async def _held(self, reader):
        """Wait until answers are allowed; return whether the client is still connected."""
        holding, leaving = asyncio.create_task(self.hold.wait()), asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait([holding, leaving], return_when=asyncio.FIRST_COMPLETED)
            return holding.done()
        finally:
            holding.cancel()
            leaving.cancel()
            await asyncio.gather(holding, leaving, return_exceptions=True)
