"""A LiteLLM proxy that stores its calls with our callback, for `benchmarks/gateway.py --litellm`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

CONFIG = """
model_list:
  - model_name: scripted
    litellm_params: {{model: hosted_vllm/scripted, api_base: "http://127.0.0.1:{upstream_port}/v1", api_key: none}}
litellm_settings:
  callbacks: rllm.integrations.litellm.handler
  num_retries: 0
"""
START_S = 300


def start(libraries: Path, folder: Path, upstream_port: int, port: int) -> subprocess.Popen[str]:
    """Start a proxy, and return it once it is ready.

    Args:
        libraries: folder of LiteLLM; `make test-litellm` installs it in `.litellm`.
        folder: folder for its configuration, its store and its log.
    """
    (folder / "litellm.yaml").write_text(CONFIG.format(upstream_port=upstream_port))
    environment = {
        **os.environ,
        "PYTHONPATH": str(libraries.absolute()),
        "RLLM_STORE": str(folder / "litellm.db"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        "LITELLM_LOG": "ERROR",
    }
    command = [sys.executable, "-c", "from litellm import run_server; run_server()"]
    command += ["--config", "litellm.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "litellm.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True
        )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=2):
                return process
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    process.kill()
    sys.exit(f"LiteLLM did not start:\n{(folder / 'litellm.log').read_text()[-2000:]}")
