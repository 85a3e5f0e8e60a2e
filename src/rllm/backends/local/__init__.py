"""Training with torch on one machine, on CPU or CUDA.

`backend.py` puts the parts together. `policy.py` turns a batch into log-probabilities, by way of `forward.py` (hidden
states over a prefix tree, cut by `tree_rows.py`, attention within it by `tree_attention.py`) and `logprobs.py`
(hidden states to log-probabilities). `summed_gradients.py` adds gradients in place, `optimizer.py` updates weights,
`critic.py` holds the value model.
"""
