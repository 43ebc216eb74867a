"""Parameters that kernels of the operator share: rows any stride apart, and A in either layout."""

import tilelang.language as T

from ..validation import CHUNK, HEAD_DIM
from .inverse_blocks import ELEMENTS, STORED


def vectors(name, batch, tokens, heads, dtype):
    """Parameter [batch, tokens, heads, 128] whose tokens may lie any stride apart, such as a view
    of one projection of all of q, k and v.
    """
    stride = T.dynamic(f"{name}_stride", "int64")
    return T.StridedTensor(
        (batch, tokens, heads, HEAD_DIM), (tokens * stride, stride, HEAD_DIM, 1), dtype
    )


def pool(name, rows, heads_v, dtype):
    """The parameter of states in `rows` rows, apart by any stride; a dummy where dtype is None."""
    if dtype is None:
        return T.Tensor((1,), "float32")
    stride = T.dynamic(f"{name}_stride", "int64")
    return T.StridedTensor(
        (rows, heads_v, HEAD_DIM, HEAD_DIM), (stride, HEAD_DIM * HEAD_DIM, HEAD_DIM, 1), dtype
    )


def inverse(blocks, batch, tokens, heads_v, dtype):
    """The parameter A: [batch, tokens, heads_v, 64], or the records of inverse_blocks.py."""
    if blocks:
        return T.Tensor((T.dynamic("records"), heads_v, STORED, ELEMENTS), dtype)
    return T.Tensor((batch, tokens, heads_v, CHUNK), dtype)
