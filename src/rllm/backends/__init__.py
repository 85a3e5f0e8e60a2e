"""Training backends: where the weights are held, updated and published to the sampler.

Read `base.py` first (the protocol `TrainingBackend`), then `update.py` (one update of any backend, minibatch by
minibatch).

- `local/`: a torch model in this process. `local/backend.py`, then `local/forward.py`.
- `verl/`: verl's workers on Ray. `verl/backend.py`, then `verl/settings.py`.
- `sampler.py`: where the policy is sampled from, and how new weights get there. `server_launch.py` starts or joins the
  vLLM server; `weight_sync_check.py` proves that an update arrived.
- `lora.py`: LoRA adapters, and which weights they cover.
"""
