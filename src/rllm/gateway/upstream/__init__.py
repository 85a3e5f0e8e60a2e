"""Where answers come from."""

from rllm.gateway.upstream.base import Upstream, UpstreamCall
from rllm.gateway.upstream.engine import EngineUpstream
from rllm.gateway.upstream.http import HTTPUpstream, UpstreamKind
from rllm.gateway.upstream.pool import PoolConfig, UpstreamPool

__all__ = ["EngineUpstream", "HTTPUpstream", "PoolConfig", "Upstream", "UpstreamCall", "UpstreamKind", "UpstreamPool"]
