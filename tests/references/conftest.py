"""Published implementations are loaded when a test needs them; tests of those not installed are skipped."""

from __future__ import annotations

from importlib.util import find_spec

if any(find_spec(name) is None for name in ("verl", "trl", "renderers")):
    collect_ignore_glob = ["test_*.py"]
