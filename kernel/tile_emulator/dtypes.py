"""Storage of TIR dtypes in numpy.  16-bit and 8-bit floats live in float32 arrays and are rounded
when stored or cast.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

NARROW = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def storage(dtype: str) -> np.dtype:
    """numpy dtype of the array that holds elements of a TIR dtype."""
    return np.dtype(np.float32 if dtype in NARROW else dtype)


def item_bytes(dtype: str) -> int:
    """Bytes of one element on the device."""
    return np.dtype(NARROW.get(dtype, dtype)).itemsize


def is_float(dtype: str) -> bool:
    return "float" in dtype


def rounded(x, dtype: str):
    """x as a value of the TIR dtype: an array, or a python / numpy scalar."""
    narrow = NARROW.get(dtype)
    if narrow is not None:
        return np.asarray(x, np.float32).astype(narrow).astype(np.float32)
    if isinstance(x, np.ndarray) and x.ndim:
        return x if x.dtype == dtype else x.astype(storage(dtype))
    if is_float(dtype):
        return storage(dtype).type(x)
    if dtype == "bool":
        return bool(x)
    return int(x)


def to_device(x: np.ndarray, dtype: str) -> np.ndarray:
    """A storage array as the device holds it (contiguous, in the device's dtype)."""
    return np.ascontiguousarray(x, NARROW.get(dtype, dtype))


def from_device(x: np.ndarray, dtype: str, target: str) -> np.ndarray:
    """Device elements of one dtype, taken bit by bit as another of the same size, as storage."""
    raw = np.ascontiguousarray(x, NARROW.get(dtype, dtype))
    return raw.view(NARROW.get(target, target)).astype(storage(target))
