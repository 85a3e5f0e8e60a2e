"""Environment in which the agent acts by calling tools."""
