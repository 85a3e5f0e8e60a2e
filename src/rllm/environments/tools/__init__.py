"""Environment in which the agent acts by calling tools: `tool_env.py`."""
