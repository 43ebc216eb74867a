"""Small helpers of the emulator's tests."""

import numpy as np
import torch

from tile_emulator import emulate

BF16, FP32, INT32 = "bfloat16", "float32", "int32"


def run(kernel, *tensors, **options):
    """emulate() that returns the report whatever was found; the first CTA is traced, too."""
    options = {"timeline": True, **options}
    return emulate(kernel, *tensors, raise_on_issue=False, **options)


def bf16(*shape, seed=0):
    """Random bf16 tensor."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(torch.bfloat16)


def fp32(*shape, seed=0):
    """Random fp32 array."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
