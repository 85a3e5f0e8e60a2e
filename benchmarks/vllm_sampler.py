"""vLLM's side of `sampler.py`: one process that reads each workload as a line of JSON, samples it, and writes its costs.

It runs in vLLM's own environment, which has no rllm.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import redirect_stdout


def main() -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="2"
    )
    model, dtype, threads = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = threads
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's workers print to stdout
    with redirect_stdout(sys.stderr):
        from vllm import LLM, SamplingParams

        engine = LLM(model, dtype=dtype, max_model_len=2048, max_num_seqs=64, enforce_eager=True, seed=0)
        print("ready", file=out, flush=True)
        for line in sys.stdin:
            prompts, lengths = json.loads(line)
            params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=1.0, logprobs=0) for n in lengths]
            wall, cpu = time.perf_counter(), time.process_time()
            outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            print(json.dumps([tokens, wall, cpu]), file=out, flush=True)


if __name__ == "__main__":
    main()
