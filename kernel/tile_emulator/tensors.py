"""Tensors in and out: working arrays for numpy and torch CPU tensors, written back in place."""

from __future__ import annotations

import mmap

import numpy as np

from .dtypes import NARROW, storage


def dtype_name(tensor) -> str:
    """TIR name of the dtype of a numpy array or torch tensor."""
    return str(tensor.dtype).removeprefix("torch.")


def is_torch(tensor) -> bool:
    return type(tensor).__module__.partition(".")[0] == "torch" or hasattr(
        tensor, "untyped_storage"
    )


def check_tensor(name: str, tensor, dtype: str) -> None:
    """TypeError for what is no CPU tensor, ValueError for another dtype than the kernel's."""
    if is_torch(tensor):
        if tensor.device.type != "cpu":
            raise ValueError(f"{name}: device {tensor.device}; the emulator takes CPU tensors")
    elif not isinstance(tensor, np.ndarray):
        raise TypeError(
            f"{name}: {type(tensor).__name__}; a numpy array or torch CPU tensor is needed"
        )
    if dtype_name(tensor) != dtype:
        raise TypeError(f"{name}: dtype {dtype_name(tensor)}; the kernel takes {dtype}")


def working_copy(tensor, dtype: str) -> np.ndarray:
    """Array of the tensor's values in the storage dtype, in memory that forked workers share."""
    if is_torch(tensor):
        tensor = tensor.detach()
        source = (tensor.float() if dtype in NARROW else tensor).numpy()
    else:
        source = tensor
    out = shared_array(source.shape, storage(dtype))
    out[...] = source
    return out


def shared_array(shape, dtype) -> np.ndarray:
    """Zeroed array in anonymous shared memory."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    if count == 0:
        return np.zeros(shape, dtype)
    return np.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype, count).reshape(shape)


def write_back(tensor, arr: np.ndarray) -> None:
    """Store the working array into the caller's tensor."""
    if is_torch(tensor):
        import torch

        tensor.detach().copy_(torch.from_numpy(arr))
    else:
        tensor[...] = arr.astype(tensor.dtype)
