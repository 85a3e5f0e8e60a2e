"""Inference: chat messages in, one sampled answer with its exact tokens out.

* `engine.py`: the protocols of engines, `SamplingParams` and `ModelOutput`. Read it first.
* `local/`: the embedded sampler, on the trainer's own weights.
* `servers/`: vLLM and SGLang as separate programs.
* `openai_engine.py`: any OpenAI-compatible endpoint as an engine.
* `model_folder.py`: checks of a model's files, calls of `from_pretrained`, and which models may run code of their own.
* `parameters.py`: effect of each request field on the embedded engine.
"""
