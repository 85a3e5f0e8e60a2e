"""Stand-in for `vllm serve`: a program that takes its arguments, serves its routes, and has no model.

    python stand_in.py FOLDER serve MODEL --port N ...

`FOLDER/behaviour.json` sets the faults, and `FOLDER/calls` lists the requests, a line each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(sys.argv[1])
ROUTES = """/health /v1/models /weight_info /pause /resume /reset_prefix_cache /update_weight_version /sleep /wake_up
    /start_weight_update /update_weights /finish_weight_update /collective_rpc /v1/load_lora_adapter""".split()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    weight_version = "default"

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.answer(json.loads(body or b"{}"))

    def answer(self, body: dict[str, object]) -> None:
        path = self.path.partition("?")[0]
        with (FOLDER / "calls").open("a") as file:
            file.write(f"{self.command} {self.path}\n")
        text: object = {}
        if path == "/openapi.json":
            text = {"paths": {route: {} for route in ROUTES if route not in BEHAVIOUR.get("lacks", ())}}
        elif path == "/v1/models":
            text = {"data": [{"id": "policy"}]}
        elif path == "/weight_info":
            text = {"weight_version": Handler.weight_version}
        elif path == "/update_weight_version":
            Handler.weight_version = str(body["new_version"])
        elif path == "/collective_rpc":
            text = {"results": [{"backend": BEHAVIOUR.get("backend", "rllm_file")}]}
        elif path == "/die":
            self.server.socket.close()
            time.sleep(BEHAVIOUR.get("takes_s_to_end", 0.0))
            os._exit(9)
        key = os.environ.get("VLLM_API_KEY")
        is_open = not path.startswith("/v1/") or key is None or self.headers.get("authorization") == f"Bearer {key}"
        data = json.dumps(text).encode()
        self.send_response(200 if is_open else 401)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Log nothing."""


BEHAVIOUR = json.loads((FOLDER / "behaviour.json").read_text()) if (FOLDER / "behaviour.json").exists() else {}


def main(arguments: list[str]) -> None:
    with (FOLDER / "starts").open("a") as file:
        file.write(
            f"{os.getpid()} {json.dumps([*arguments, 'GPUs=' + os.environ.get('CUDA_VISIBLE_DEVICES', 'all')])}\n"
        )
    for line in BEHAVIOUR.get("prints", ()):
        print(line, flush=True)  # noqa: T201
    if "exits" in BEHAVIOUR:
        sys.exit(BEHAVIOUR["exits"])
    if BEHAVIOUR.get("hangs"):
        time.sleep(600)
    port = int(arguments[arguments.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[2:])
