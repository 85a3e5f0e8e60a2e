"""Where answers come from."""

from rllm.gateway.upstream.base import Upstream
from rllm.gateway.upstream.engine import EngineUpstream
from rllm.gateway.upstream.http import HTTPUpstream, UpstreamKind

__all__ = ["EngineUpstream", "HTTPUpstream", "Upstream", "UpstreamKind"]
