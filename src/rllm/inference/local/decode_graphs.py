"""CUDA graphs of decode steps.

A step of a small model starts more than a thousand kernels, which takes a GPU's host several times as long as the GPU
takes to run them. A graph starts all of them at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from rllm.errors import first_line

logger = logging.getLogger(__name__)


class DecodeGraphs:
    """Forward passes of one device, recorded by shape.

    The first pass of a shape runs as usual, which chooses and loads its kernels. The second one is recorded, and later
    ones replay it. So a pass may only read tensors that stay where they are, and `clear` must be called when they move.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._can_record = device.type == "cuda"

    def run(self, shape: Hashable, forward: Callable[[], Tensor]) -> Tensor:
        """Return what `forward` returns; the next pass may overwrite it."""
        if not self._can_record:
            return forward()
        if shape not in self._seen:
            self._seen.add(shape)
            return forward()
        if shape not in self._recorded:
            try:
                self._recorded[shape] = self._record(forward)
            except Exception as error:  # the model reads values back from the device, for example to choose its experts
                logger.info(
                    "decode steps cannot be recorded as a CUDA graph, so they take longer: %s", first_line(error)
                )
                self._can_record = False
                return forward()
        graph, output = self._recorded[shape]
        graph.replay()
        return output

    def _record(self, forward: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        pool = next((graph.pool() for graph, _ in self._recorded.values()), None)
        random_state = torch.cuda.get_rng_state(self._device)
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                # Other threads, such as the one that trains, may use the device meanwhile.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    output = forward()
                finally:
                    graph.capture_end()
        except Exception:
            # A recording that fails leaves the generator unusable.
            generator = torch.Generator(self._device)
            generator.set_state(random_state)
            torch.cuda.default_generators[current.device_index].graphsafe_set_state(generator)
            raise
        current.wait_stream(stream)
        return graph, output

    def clear(self) -> None:
        """Forget all graphs."""
        self._seen.clear()
        self._recorded.clear()
