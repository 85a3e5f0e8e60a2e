"""A wire format needs a module and a row: its paths, streams, errors and lists of models follow from these."""

import subprocess
import sys

DIALECT = """
import orjson

from rllm.gateway.dialects.base import wire_format
from rllm.gateway.dialects.chat import ChatDialect


class Lines(ChatDialect):
    wire = wire_format("lines")
    stream_type = "application/x-ndjson"

    def render_models(self, models):
        return orjson.dumps({"names": [model["id"] for model in models]})

    def render_error(self, error):
        return orjson.dumps({"problem": str(error)})
"""
PROGRAM = """
from rllm.capture import wire_formats

row = wire_formats.WireFormat(name="lines", dialect="lines:Lines", calls=("/ask",), version="v9")
wire_formats.WIRE_FORMATS += (row,)

import httpx
from rllm.testing import scripted_gateway

asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
with scripted_gateway(["hello"]) as gateway, httpx.Client(base_url=f"{gateway.url}/sessions/test") as client:
    assert client.post("/v9/ask", json=asked).headers["content-type"] == "application/x-ndjson"
    assert client.post("/v1/chat/completions", json=asked).headers["content-type"] == "text/event-stream"
    assert client.get("/v9/models").json() == {"names": ["scripted"]}
    assert client.post("/v9/ask", json={"messages": 5}).json().keys() == {"problem"}
    assert [trace.response["content"] for trace in gateway.traces() if not trace.error] == ["hello"] * 2
"""


def test_dialect_needs_only_a_module_and_a_row(tmp_path):
    (tmp_path / "lines.py").write_text(DIALECT)
    (tmp_path / "program.py").write_text(PROGRAM)
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=True, timeout=60)
