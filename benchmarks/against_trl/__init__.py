"""Training with rllm and with TRL's GRPOTrainer, on the same model, prompts and settings, each in its own process.

Both Pythons import this package, and TRL's has no rllm: only `model.py` and `ours.py` may import that, and only `peer.py` TRL.
"""
