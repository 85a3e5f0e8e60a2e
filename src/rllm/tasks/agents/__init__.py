"""Agents that work in sandboxes, by name.

Read `named.py` first: `AGENTS`, `open_agent`, and agents that are functions. `terminus.py` is a simple agent of our
own, and `programs.py` runs coding agents of others unedited.
"""
