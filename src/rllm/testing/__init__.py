"""Tests of agents without a model, in milliseconds; see docs/testing.md.

* `scripted`: an inference engine that follows a script, with exact tokens. Read this first.
* `gateway`: a gateway in front of it, for agents that speak HTTP: `from rllm.testing import scripted_gateway`.
* `scripted_server`: an inference server with the same answers, which can fail on request.
* `tiny_policy`: a real model of a million parameters, trained in a minute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllm._runtime.lazy import lazy_names

if TYPE_CHECKING:
    from rllm.testing.gateway import ScriptedGateway as ScriptedGateway
    from rllm.testing.gateway import scripted_gateway as scripted_gateway
    from rllm.testing.scripted import ScriptedEngine as ScriptedEngine
    from rllm.testing.scripted_server import ScriptedServer as ScriptedServer

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "rllm.testing.gateway": "ScriptedGateway scripted_gateway",
        "rllm.testing.scripted": "ScriptedEngine",
        "rllm.testing.scripted_server": "ScriptedServer",
    },
)
