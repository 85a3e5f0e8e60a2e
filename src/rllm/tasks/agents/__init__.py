"""Agents that work in sandboxes, by name.

Read `named.py` first: `AGENTS` and `open_agent`. `terminus.py` is a simple agent of our own, `programs.py` runs coding
agents of others unedited, and `functions.py` makes an agent of a function.
"""
