"""An MCP server without the SDK, so that it can violate the protocol: `python raw_mcp_server.py [PORT]`.

If `ONCE` names a file, it answers only when it is started for the first time.
"""

import itertools
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NUM_MEETING = 120
NAMES = ["pid", "hang", "die", "busy", "noise", "forget", "meet", "look.up", "look_up", "検索", "計算"]
TOOLS = [{"name": name, "inputSchema": {"type": "object"}} for name in NAMES]
sessions: set[str] = set()
numbers = itertools.count()
meeting = threading.Barrier(NUM_MEETING)


def answer(request: dict[str, Any]) -> dict[str, Any] | None:
    """Return the `result` or `error` of a request; `None` to leave it unanswered."""
    if request["method"] == "initialize":
        version = request["params"]["protocolVersion"]
        server = {"name": "raw", "version": "1"}
        return {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}}
    if request["method"] == "tools/list":
        return {"result": {"tools": TOOLS}}
    if request["method"] != "tools/call":
        return {"error": {"code": -32601, "message": "no such method"}}
    name = request["params"]["name"]
    if name == "hang":
        return None
    if name == "die":
        sys.stderr.write("dying words")
        sys.stderr.flush()
        os._exit(3)
    if name == "busy":
        return {"error": {"code": -32000, "message": "10 calls a minute are allowed"}}
    if name == "noise":
        sys.stdout.buffer.write(b"\xff\xfe\n")
    if name == "meet":
        meeting.wait()
    if name == "forget":
        sessions.clear()
    answers = name if name in ("look_up", "計算") else str(os.getpid())
    return {"result": {"content": [{"type": "text", "text": answers}]}}


def serve_stdio() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request and (text := answer(request)):
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": request["id"], **text}) + "\n")
            sys.stdout.flush()


class Server(ThreadingHTTPServer):
    request_queue_size = 2 * NUM_MEETING


class Handler(BaseHTTPRequestHandler):
    """Streamable HTTP with sessions, as of protocol version 2025-06-18."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(405)

    def do_DELETE(self) -> None:
        self.reply(200)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        session = self.headers.get("mcp-session-id")
        if self.headers.get("x-key") == "wrong":
            self.reply(401, request, {"jsonrpc": None, "message": "the key is wrong"})
            return
        if request["method"] == "initialize":
            request["params"]["protocolVersion"] = "2025-06-18"
            session = f"session-{next(numbers)}"
            sessions.add(session)
        if session not in sessions:
            status = 400 if session is None else int(os.environ["STATUS"])
            self.reply(status, request, {"error": {"code": -32000, "message": "no valid session"}})
        elif "id" not in request:
            self.reply(202)
        else:
            self.reply(200, request, answer(request), session)

    def reply(
        self,
        status: int,
        request: dict[str, Any] | None = None,
        expected: dict[str, Any] | None = None,
        session: str = "",
    ) -> None:
        body = json.dumps({"jsonrpc": "2.0", "id": request.get("id"), **(expected or {})}).encode() if request else b""
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        if session:
            self.send_header("mcp-session-id", session)
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    if "ONCE" in os.environ:
        with Path(os.environ["ONCE"]).open("a+") as starts:
            starts.write(f"{os.getpid()}\n")
            starts.seek(0)
            is_first = len(starts.readlines()) == 1
        if not is_first:
            sys.stdin.read()
    serve_stdio()
