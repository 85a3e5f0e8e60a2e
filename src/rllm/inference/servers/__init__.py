"""Inference servers as programs of their own: vLLM, started here or joined, and SGLang, joined. Neither is imported.

* `vllm_server.py`: `VLLMServer`, a server that is started or joined, watched, and restarted when it dies, and its
process. Read it first.
* `command.py`: command line and environment of `vllm serve`.
* `control.py`: HTTP calls besides completions (health, pause, weight version), and the ways to transfer weights.
* `capabilities.py`: probes of any OpenAI-compatible server, for `rllm doctor` and before training.
* `plugin/`: the one file that vLLM's own processes import.
"""
