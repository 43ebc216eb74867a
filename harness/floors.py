"""The time under which no honest result of a case can be, from its shape and a datasheet.

HBM floor: every tensor moved once. It binds only where the caches are cold. Tensor floor: the
multiply-adds of the operator, two operations each.
"""

from cases import CHUNK, HEAD_DIM, Case

from .device import Ceilings
from .implementations import CORE, FULL
from .timing import Protocol

BF16, FP32 = 2, 4


def core_bytes(case: Case) -> int:
    """q, k, v, g_cumsum, beta, A and the initial state read, output and final state written."""
    tokens = case.B * case.T
    return (
        _sequence_bytes(case) + tokens * case.Hv * (2 * FP32 + CHUNK * BF16) + _states(case) * FP32
    )


def full_bytes(case: Case) -> int:
    """As the core but with no A in memory; gate, beta and states in the smallest dtype in use."""
    return _sequence_bytes(case) + case.B * case.T * case.Hv * 2 * BF16 + _states(case) * BF16


def _sequence_bytes(case: Case) -> int:
    """q, k, v and output."""
    return case.B * case.T * HEAD_DIM * BF16 * 2 * (case.Hq + case.Hv)


def _states(case: Case) -> int:
    """Elements of the initial state, if there is one, and of the final one."""
    return (1 + case.initial_state) * case.state_heads * HEAD_DIM**2


def core_flops(case: Case) -> int:
    """K S, Q S, K^T V_new: 64x128x128 each; A W', Q K^T, scores V_new: 64x64x128 each."""
    wide, narrow = CHUNK * HEAD_DIM * HEAD_DIM, CHUNK * CHUNK * HEAD_DIM
    return 2 * (3 * wide + 3 * narrow) * case.chunks * case.state_heads


def full_flops(case: Case) -> int:
    """As the core, and once a q/k head K K^T and two 64x64x64 products' worth of inverse."""
    gram, inverse = CHUNK * CHUNK * HEAD_DIM, 2 * CHUNK**3
    return core_flops(case) + 2 * (gram + inverse) * case.chunks * case.B * case.Hq


def hbm_floor_ms(case: Case, scope: str, rates: Ceilings) -> float:
    return 1e3 * {CORE: core_bytes, FULL: full_bytes}[scope](case) / rates.bytes_per_s


def tensor_floor_ms(case: Case, scope: str, rates: Ceilings) -> float:
    return 1e3 * {CORE: core_flops, FULL: full_flops}[scope](case) / rates.flops_per_s


def floor_ms(case: Case, scope: str, protocol: Protocol, rates: Ceilings) -> float:
    """The floor that binds under `protocol`: memory counts with cold caches only."""
    tensor = tensor_floor_ms(case, scope, rates)
    if protocol is Protocol.COLD:
        return max(tensor, hbm_floor_ms(case, scope, rates))
    return tensor
