"""The chunk-parallel scan: time split into segments, so that few heads still fill a GPU.

    1. summary   M and N of every segment but the last, all at once    S -> M S + N
    2. scan      the state before every segment, one after the other
    3. forward   every segment from its own state, all at once

Three launches. Steps 1 and 3 are the four-group kernel, and together do twice the work of walking
the chunks in order; that pays only while multiprocessors would be idle otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .families import (
    CHUNK,
    HEAD_DIM,
    VARIANT,
    Execute,
    Inputs,
    Kernel,
    LadderShape,
    Result,
    Settings,
    allocate,
    resolve,
)

# Without an O group there are registers enough for two groups of 128 state columns.
SUMMARY_SETTINGS = {"task": "summary", "block_dv": HEAD_DIM, "registers": (224, 224, 0, 48)}

STATES = Kernel(
    name="scan",
    summary="the state before every segment",
    module="gdn_ladder.scan",
    config_type="ScanConfig",
    builder="scan_kernel",
    arguments=lambda inputs, output, final_state: (),
)


@dataclass(frozen=True)
class Split:
    """segments of `chunks` chunks each, the last one of what is left."""

    segments: int
    chunks: int


def split_time(shape: LadderShape) -> Split:
    """As many segments as keep the summaries' CTAs within the GPU, one where that is not two."""
    total = -(-shape.tokens // CHUNK)
    summary_ctas = 2 * shape.batch * shape.heads_v
    wanted = min(1 + shape.multiprocessors // summary_ctas, total)
    chunks = -(-total // wanted)
    return Split(-(-total // chunks), chunks)


@dataclass(frozen=True)
class ChunkParallelScan:
    """The family of the version "scan"; its setting `split` gives the Split of a shape."""

    name: str = "scan"
    summary: str = "segments summarised, scanned and replayed: three launches"

    def bind(
        self, settings: Settings, shape: LadderShape, execute: Execute
    ) -> Callable[[Inputs], Result]:
        from .scan import ScanConfig

        options = resolve(settings, shape)
        split = options.pop("split")
        if split.segments == 1:
            return VARIANT.bind(options, shape, execute)
        summarise = execute(VARIANT, VARIANT.configure(SUMMARY_SETTINGS, shape))
        scan = execute(STATES, ScanConfig(shape.heads_v, shape.use_initial_state))
        replay = execute(VARIANT, VARIANT.configure({**options, "use_initial_state": True}, shape))

        def call(inputs: Inputs) -> Result:
            output, final_state = allocate(inputs)
            tensors = inputs.tensors()
            before = split.segments - 1
            summaries = _states(2 * shape.batch * before, final_state)
            states = _states(shape.batch * split.segments, final_state)
            summarise(*tensors, final_state, output, summaries, before, split.chunks)
            initial = final_state if inputs.initial_state is None else inputs.initial_state
            scan(summaries, initial, states, split.segments)
            replay(*tensors, states, output, final_state, split.segments, split.chunks)
            return output, final_state

        return call


def _states(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty((count, *like.shape[1:]), dtype=like.dtype, device=like.device)


CHUNK_PARALLEL_SCAN = ChunkParallelScan()
