"""The training loop, from a configuration to a trained policy. Read `loop.py` first."""
