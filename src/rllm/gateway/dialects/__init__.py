"""The wire formats agents speak, one module each, all to and from the same chat request and answer."""

from rllm.gateway.dialects.base import Dialect, StreamEncoder

__all__ = ["Dialect", "StreamEncoder"]
