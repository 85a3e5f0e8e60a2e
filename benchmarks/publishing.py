"""Cost of sending new weights to a running vLLM: CPU seconds per gigabyte of each method, beside a plain copy and a plain file.

    python benchmarks/publishing.py --vllm .vllm/bin/vllm [--layers 10] [--rounds 3] [--json]

A random Qwen3 (by default of 0.4 GB in float32) is served by a real vLLM on the CPU, and changed before every
publish. `transfer` is in place, from a safetensors file, through rllm's extension; `reload` has vLLM read the folder
again, as for servers without the extension; `lora` loads an adapter, whose gigabytes are those of the model that it
changes. With each method the file is written, the server loads it while its generation is paused, and then proves
that it has the weights. Baselines, on the same bytes in the same run, are a copy of all tensors in memory, and a file
that safetensors writes into the same folder. The output has the CPU seconds of this process and the server together,
as medians of the rounds. The two wait for each other, so on an idle machine this is also the elapsed time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

from rllm.backends.lora import Adapter, LoraSettings
from rllm.backends.sampler import ServerSampler
from rllm.inference.servers.command import ServeOptions
from rllm.inference.servers.control import FileTransfer, Handover, LoraLoad, Reload, VLLMControl
from rllm.inference.servers.vllm_server import VLLMServer, free_port
from rllm.testing.tiny_policy import TinyPolicyRecipe, new_model, train_tokenizer

LORA_RANK = 16
SHARED_MEMORY = Path("/dev/shm")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


class Timed:
    """Method of transferring weights that records the seconds of its last transfer."""

    def __init__(self, real: Handover, pid: int) -> None:
        self.real, self.name, self.shows_bits = real, real.name, real.shows_bits
        self.pid = pid
        self.seconds = 0.0

    def send(self, control: VLLMControl, folder: Path, served_name: str) -> None:
        self.seconds = seconds(lambda: self.real.send(control, folder, served_name), self.pid)


def seconds(work: Callable[[], object], pid: int | None = None) -> float:
    """Return the CPU seconds of some work in this process, and in another one with its children."""
    started = time.process_time() + cpu_of(pid)
    work()
    return time.process_time() + cpu_of(pid) - started


def cpu_of(pid: int | None) -> float:
    if pid is None:
        return 0.0
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(item.user + item.system for item in times)


def build(folder: Path, num_layers: int) -> tuple[Any, Any]:
    """Save a random model, whose head is a separate tensor, and its tokenizer."""
    tokenizer = train_tokenizer(["the user asks the assistant, and the assistant answers\n"] * 50, vocab_size=600)
    recipe = TinyPolicyRecipe(
        hidden_size=768, num_layers=num_layers, num_heads=12, num_key_value_heads=6, intermediate_size=3072
    )
    model = new_model(tokenizer, recipe).eval()
    untie(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def untie(model: Any) -> None:
    """Untie the head, since vLLM's own reload does not update one that is tied to the embedding, on CPUs."""
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


def change(model: Any, round_: int) -> None:
    generator = torch.Generator().manual_seed(round_)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(1e-3 * torch.randn(weight.shape, generator=generator))


@contextmanager
def serving(command: str, folder: Path, *, lora_rank: int) -> Iterator[VLLMServer]:
    options = ServeOptions(
        model=str(folder),
        port=free_port(),
        dtype="float32",
        lora_rank=lora_rank,
        on_cpu=True,
        extra_args=("--enforce-eager",),
    )
    server = VLLMServer.start(options, command=[command], log=folder / "vllm.log", start_timeout_s=900.0)
    try:
        yield server
    finally:
        server.close()


def published(
    server: VLLMServer, way: Handover, model: Any, tokenizer: Any, scratch: Path, num_rounds: int
) -> dict[str, float]:
    """Return the median CPU seconds of a publish, and of its parts."""
    adapter = Adapter(model, LoraSettings(rank=LORA_RANK, alpha=32.0)) if isinstance(way, LoraLoad) else None
    assert server.pid is not None
    timed = Timed(way, server.pid)
    sampler = ServerSampler(
        VLLMServer.join(server.url),
        timed,
        model,
        tokenizer,
        adapter=adapter,
        served_name="policy",
        scratch=scratch / way.name,
    )
    rows = []
    try:
        sampler.sync_weights(0)
        for version in range(1, num_rounds + 1):
            change(model, version)
            whole = seconds(lambda version=version: sampler.sync_weights(version), server.pid)
            write = seconds(lambda version=version: sampler._write(version))
            rows.append({"write": write, "take": timed.seconds, "prove": whole - write - timed.seconds, "whole": whole})
    finally:
        sampler.close()
    return {name: median(row[name] for row in rows) for name in rows[0]}


def baselines(model: Any, scratch: Path, num_rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of copying all weights in memory, and of writing them to a file."""
    state = {name: weight.detach() for name, weight in model.named_parameters()}
    copies = {name: torch.empty_like(weight) for name, weight in state.items()}

    def copy() -> None:
        for name, weight in state.items():
            copies[name].copy_(weight)

    scratch.mkdir(parents=True, exist_ok=True)
    timings = {"copy": copy, "file": lambda: save_file(state, scratch / "plain.safetensors")}
    return {name: median(seconds(work) for _ in range(num_rounds + 1)) for name, work in timings.items()}


def measure(options: argparse.Namespace, folder: Path, scratch: Path) -> dict[str, Any]:
    model, tokenizer = build(folder, options.layers)
    gigabytes = sum(weight.nbytes for weight in model.parameters()) / 1e9
    found = {"gigabytes": gigabytes, "baselines": baselines(model, scratch, options.rounds), "ways": {}}
    with serving(options.vllm, folder, lora_rank=0) as server:
        for way in (FileTransfer(), Reload()):
            found["ways"][way.name] = published(server, way, model, tokenizer, scratch, options.rounds)
    model.load_state_dict(type(model).from_pretrained(folder).state_dict())
    with serving(options.vllm, folder, lora_rank=LORA_RANK) as server:
        found["ways"]["lora"] = published(server, LoraLoad(), model, tokenizer, scratch, options.rounds)
    return found


def show(found: dict[str, Any]) -> None:
    size, plain = found["gigabytes"], found["baselines"]
    print(f"{size:.2f} GB of weights; CPU seconds per GB:")
    print(f"  {'copy in memory':16} {plain['copy'] / size:6.2f}   ({size / plain['copy']:.1f} GB/s)")
    print(f"  {'safetensors file':16} {plain['file'] / size:6.2f}   ({size / plain['file']:.1f} GB/s)")
    for name, row in found["ways"].items():
        parts = ", ".join(f"{part} {row[part] / size:.2f}" for part in ("write", "take", "prove"))
        print(
            f"  {name:16} {row['whole'] / size:6.2f}   ({parts}); {row['whole'] / plain['file']:.1f} x the plain file"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of sending new weights to a running vLLM.")
    parser.add_argument("--vllm", default=".vllm/bin/vllm", help="the program; `make test-vllm` installs one")
    parser.add_argument("--layers", type=int, default=10, help="layers of the model; each has 8.8 million parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if not Path(options.vllm).exists():
        raise SystemExit(f"--vllm={options.vllm}: no such program; `make test-vllm` installs it")
    torch.set_num_threads(1)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    in_memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=in_memory) as scratch:
        found = measure(options, Path(folder), Path(scratch))
    if options.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()
