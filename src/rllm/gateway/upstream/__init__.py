"""Upstreams: the servers and engines that answer the gateway's calls.

`base.Upstream` is the interface. `http.HTTPUpstream` is one server (`connection` has HTTP/1.1), `pool.UpstreamPool`
several replicas, `engine.EngineUpstream` an engine of this process, and `policy_server.ServedEngine` the trained policy
on a server. `answers` parses and checks whole and streamed answers, `token_prompts` converts prompts and completions.
"""

from rllm.gateway.upstream.base import Upstream, UpstreamCall
from rllm.gateway.upstream.engine import EngineUpstream
from rllm.gateway.upstream.http import HTTPUpstream, UpstreamKind
from rllm.gateway.upstream.pool import UpstreamPool

__all__ = ["EngineUpstream", "HTTPUpstream", "Upstream", "UpstreamCall", "UpstreamKind", "UpstreamPool"]
