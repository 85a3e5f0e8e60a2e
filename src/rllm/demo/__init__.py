"""Demo: a shop assistant that learns to look things up instead of guessing.

`agent` is the agent as its author would write it, `tasks` its tasks, example conversations and tiny model.
"""
