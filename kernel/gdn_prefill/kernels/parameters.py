"""Parameters of the operator's kernels whose rows may lie any stride apart."""

import tilelang.language as T

from ..validation import HEAD_DIM


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
