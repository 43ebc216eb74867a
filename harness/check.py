"""The verdict on one call: typed, with a reason, zero mismatches allowed."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from cases import HEAD_DIM, Case


class Status(str, Enum):
    """What came of a case. Only PASS earns points."""

    PASS = "PASS"
    WRONG = "WRONG"
    WRONG_SHAPE = "WRONG_SHAPE"
    WRONG_DTYPE = "WRONG_DTYPE"
    INPUT_MODIFIED = "INPUT_MODIFIED"
    ERROR = "ERROR"
    TIMEOUT = "TIMEOUT"
    SUSPECT = "SUSPECT"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Verdict:
    """A status and its reason; the reason of a PASS is empty."""

    status: Status
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.status is Status.PASS


PASSED = Verdict(Status.PASS)


@dataclass(frozen=True)
class Expected:
    """Name, shape and dtype that a result must have."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def layout(self, tensor: Tensor) -> Verdict:
        """Checks dtype and shape, dtype first."""
        if tensor.dtype != self.dtype:
            return Verdict(
                Status.WRONG_DTYPE, f"{self.name} is {tensor.dtype}, must be {self.dtype}"
            )
        if tuple(tensor.shape) != self.shape:
            return Verdict(
                Status.WRONG_SHAPE, f"{self.name} is {tuple(tensor.shape)}, must be {self.shape}"
            )
        return PASSED


def expected_layout(case: Case) -> tuple[Expected, Expected]:
    """The output's and the final state's layout."""
    return (
        Expected("output", (case.B, case.T, case.Hv, HEAD_DIM), torch.bfloat16),
        Expected("final_state", (case.B, case.Hv, HEAD_DIM, HEAD_DIM), torch.float32),
    )


def check_values(name: str, actual: Tensor, expected: Tensor, rtol: float, atol: float) -> Verdict:
    """|actual - expected| <= atol + rtol |expected| everywhere, in float64; NaN and inf fail.

    `expected` must be finite: a reference that is not is an error of the judge (ValueError).
    """
    if not bool(torch.isfinite(expected).all()):
        raise ValueError(f"the expected {name} holds NaN or inf")
    error = (actual.to(torch.float64) - expected).abs()
    bad = ~(error <= atol + rtol * expected.abs())
    count = int(bad.sum())
    if not count:
        return PASSED
    unusable = int((~torch.isfinite(actual)).sum())
    first = tuple(int(index) for index in bad.nonzero()[0])
    worst = float(torch.nan_to_num(error, nan=0.0, posinf=0.0).max())
    return Verdict(
        Status.WRONG,
        f"{name}: {count} of {bad.numel()} elements off by more than {atol} + {rtol}|x|"
        f" (first at {first}, largest finite error {worst:.3g}, {unusable} not finite)",
    )


def check_result(
    case: Case, result: object, expected_output: Tensor, expected_state: Tensor
) -> Verdict:
    """Checks what a call returned: a pair of plain tensors of the right layout and values."""
    kinds = check_kinds(result, expected_output.device)
    if not kinds.passed:
        return kinds
    for layout, tensor in zip(expected_layout(case), result, strict=True):
        verdict = layout.layout(tensor)
        if not verdict.passed:
            return verdict
    for name, tensor, expected in zip(
        ("output", "final_state"), result, (expected_output, expected_state), strict=True
    ):
        verdict = check_values(name, tensor, expected, case.rtol, case.atol)
        if not verdict.passed:
            return verdict
    return PASSED


def check_kinds(result: object, device: torch.device) -> Verdict:
    """Checks that a result is a pair of exact torch.Tensor on `device`, nothing lazier."""
    if type(result) not in (tuple, list) or len(result) != 2:
        return Verdict(
            Status.ERROR, f"returned {_describe(result)}, must be the pair (output, final_state)"
        )
    for name, tensor in zip(("output", "final_state"), result, strict=True):
        if type(tensor) is not Tensor:
            status = Status.SUSPECT if isinstance(tensor, Tensor) else Status.ERROR
            return Verdict(
                status, f"{name} is a {type(tensor).__name__}, must be exactly torch.Tensor"
            )
        if tensor.device != device:
            return Verdict(Status.ERROR, f"{name} is on {tensor.device}, must be on {device}")
    return PASSED


def _describe(result: object) -> str:
    if type(result) in (tuple, list):
        return f"a {type(result).__name__} of {len(result)}"
    return f"a {type(result).__name__}"


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in float64; NaN where anything is not finite."""
    difference = torch.linalg.vector_norm(actual.to(torch.float64) - expected)
    return float(difference / torch.linalg.vector_norm(expected))


def check_unmodified(inputs: dict[str, Tensor], clones: dict[str, Tensor]) -> Verdict:
    """Compares every input, bit for bit, with its clone of before the call.

    The reason shows the first difference, as it tells whose data it is that lies there: a call that
    writes to memory it does not own may hit a clone as well as an input.
    """
    for name, tensor in inputs.items():
        if not torch.equal(_bits(tensor), _bits(clones[name])):
            return Verdict(
                Status.INPUT_MODIFIED,
                f"{name} was changed by the call: {_difference(tensor, clones[name])}",
            )
    return PASSED


def _difference(tensor: Tensor, clone: Tensor) -> str:
    """How much of two tensors of other bits differs, where first, and by what."""
    changed = (_bits(tensor) != _bits(clone)).flatten()
    first = int(changed.to(torch.uint8).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), tensor.shape))
    now, before = (_text(t[index].item()) for t in (tensor, clone))
    if now == before:  # two kinds of NaN
        size = 2 * tensor.element_size()
        now, before = (
            f"{now} (0x{_bits(t)[index].item() % 16**size:0{size}x})" for t in (tensor, clone)
        )
    return (
        f"{int(changed.sum())} of {changed.numel()} elements, first at {index}: {now}, was {before}"
    )


def _text(value: float | int) -> str:
    """A number with digits enough to tell any two fp32 apart."""
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def poison_pool(case: Case, device: torch.device) -> None:
    """Leaves NaN in the memory that the next outputs are likely to be allocated from."""
    blocks = [
        torch.full(layout.shape, torch.nan, dtype=layout.dtype, device=device)
        for layout in expected_layout(case)
    ]
    del blocks


def poison(result: object) -> None:
    """Fills returned tensors with NaN, so that a stale one cannot pass later."""
    if type(result) in (tuple, list):
        for tensor in result:
            if type(tensor) is Tensor and tensor.dtype.is_floating_point:
                tensor.detach().fill_(torch.nan)


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals itself and -0 differs from 0."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
