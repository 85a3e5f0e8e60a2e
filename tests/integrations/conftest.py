"""A real LiteLLM proxy is started from the folder that RLLM_LITELLM names; otherwise its tests are skipped."""

from __future__ import annotations

import os

if os.environ.get("RLLM_LITELLM") is None:
    collect_ignore_glob = ["test_litellm_proxy.py"]
