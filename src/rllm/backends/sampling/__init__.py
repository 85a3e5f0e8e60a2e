"""Where a policy is sampled from, for every backend: the embedded sampler, or a vLLM server that is given the weights."""
