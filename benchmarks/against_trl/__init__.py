"""Training with rllm and with TRL's GRPOTrainer, on the same model, prompts and settings, each in its own process.

Both environments import this package, and TRL's has no rllm: only `model.py` and `ours.py` import rllm, and only
`peer.py` imports TRL.
"""
