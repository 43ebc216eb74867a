"""The operator over drawn combinations of options, shapes, dtypes and data, against float64.

The same strategy runs on the CPU (the portable path, every combination of options) and on a Hopper
GPU (the kernels, where what needs another compiled kernel comes from a list that covers all pairs).
Fresh memory is filled with NaN, rows past the last sequence with garbage, and every buffer lies
between guard rows.
"""

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gdn_prefill
from gdn_prefill import operator_forward
from gdn_prefill.split import CorePlan
from reference.operator import gated_delta_rule

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT32, INT64 = torch.int32, torch.int64
D = 128
TOLERANCE = 5e-3  # relative L2 of a whole result
SEQUENCE_TOLERANCE = 4e-2  # of one sequence's: a token alone is no average
GUARD = 3
FACTORS = {
    "heads": ((1, 1), (2, 4), (1, 3)),
    "dtype": (BF16, FP16),
    "packed": (None, INT32, INT64),
    "gate": ("log", "linear", "raw", "raw without bias"),
    "gate_dtype": (FP32, BF16),
    "beta": ("plain", "sigmoid", "twice"),
    "beta_dtype": (FP32, BF16),
    "l2norm": (False, True),
    "initial": (None, FP32, BF16, FP16),
    "slots": (None, INT32, INT64),
    "final": ("none", "fresh", "buffer", "in place"),
    "final_dtype": (FP32, BF16, FP16),
    "v_first": (False, True),
    "kept": (None, "h", "checkpoints"),
    "kept_dtype": (FP32, BF16),
    "batch_invariant": (False, True),
}


@dataclass(frozen=True)
class Variant:
    """Everything that may need another compiled kernel."""

    heads: tuple[int, int]
    dtype: torch.dtype
    packed: torch.dtype | None
    gate: str
    gate_dtype: torch.dtype
    beta: str
    beta_dtype: torch.dtype
    l2norm: bool
    initial: torch.dtype | None
    slots: torch.dtype | None
    final: str
    final_dtype: torch.dtype
    v_first: bool
    kept: str | None
    kept_dtype: torch.dtype
    batch_invariant: bool

    def possible(self) -> "Variant":
        """Itself with what contradicts its other choices replaced."""
        changed = {}
        if self.final == "in place":
            changed = {"final": "buffer"} if self.initial is None else {"final_dtype": self.initial}
        final = changed.get("final", self.final)
        if self.slots and self.initial is None and final != "buffer":
            changed["slots"] = None
        if self.kept == "h":
            changed["kept_dtype"] = changed.get("final_dtype", self.final_dtype)
        return replace(self, **changed)


@dataclass(frozen=True)
class Data:
    """Everything else: lengths (dense calls take the first for all), values and padding."""

    lengths: tuple[int, ...]
    surplus: int
    strength: float
    garbage: float
    every: int
    scale: float | None
    padded_rows: bool
    output_given: bool
    seed: int


def pairwise(factors: dict[str, tuple], seed: int = 0) -> list[Variant]:
    """Variants in which every two levels of every two factors meet, those that can."""
    names = list(factors)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }
    draw = random.Random(seed)
    chosen, fruitless = [], 0
    while missing and fruitless < 20:
        rows = [
            Variant(**{name: draw.choice(factors[name]) for name in names}).possible()
            for _ in range(60)
        ]
        best = max(rows, key=lambda row: len(missing & _pairs(row, names)))
        fruitless = 0 if missing & _pairs(best, names) else fruitless + 1
        if not fruitless:
            missing -= _pairs(best, names)
            chosen.append(best)
    return chosen


def _pairs(variant: Variant, names: list[str]) -> set[tuple]:
    values = [(name, getattr(variant, name)) for name in names]
    return {(*a, *b) for a, b in itertools.combinations(values, 2)}


GPU_HEADS = {"heads": ((2, 4), (2, 8))}
GPU_VARIANTS = pairwise(FACTORS | GPU_HEADS)
# Those that the dispatch may run at 128 columns.
WIDE_FACTORS = FACTORS | {
    **GPU_HEADS,
    "beta": ("plain", "sigmoid"),
    "kept": (None,),
    "kept_dtype": (FP32,),
    "batch_invariant": (False,),
}
WIDE_VARIANTS = pairwise(WIDE_FACTORS)


def variants():
    return st.builds(
        Variant, **{name: st.sampled_from(levels) for name, levels in FACTORS.items()}
    ).map(Variant.possible)


def data(lengths, sequences: int):
    return st.builds(
        Data,
        lengths=st.lists(lengths, min_size=1, max_size=sequences).map(tuple),
        surplus=st.sampled_from((0, 1, 70)),
        strength=st.sampled_from((0.0, 0.06, 1.0, 40.0)),
        garbage=st.sampled_from((1.0, 1e4, float("nan"))),
        every=st.sampled_from((64, 128)),
        scale=st.sampled_from((None, 0.3)),
        padded_rows=st.booleans(),
        output_given=st.booleans(),
        seed=st.integers(0, 2**16),
    )


CPU_DATA = data(st.sampled_from((0, 1, 2, 31, 63, 64, 65, 100, 128, 129)), 4)
GPU_DATA = data(
    st.one_of(
        st.sampled_from((0, 1, 2, 31, 63, 64, 65, 127, 128, 129, 1000, 2048)),
        st.integers(1, 300),
    ),
    8,
)


def guarded(shape, dtype, device, padded_rows=False):
    """(buffer of that shape, all that surrounds it): memory of 7s, rows apart by more if padded."""
    row = torch.Size(shape[1:]).numel()
    apart = row + 64 * padded_rows
    whole = torch.full(((shape[0] + 2 * GUARD) * apart,), 7.0, dtype=dtype, device=device)
    rows = whole.view(-1, apart)[GUARD : GUARD + shape[0], :row]
    strides = (apart, *torch.empty(shape[1:], device="meta").stride())
    return rows.as_strided(shape, strides), whole


class Problem:
    """A drawn call: its arguments, the float64 reference, and what must not be touched."""

    def __init__(self, variant: Variant, data: Data, device: str):
        self.variant, self.data, self.device = variant, data, device
        self.random = torch.Generator(device).manual_seed(data.seed)
        Hq, Hv = variant.heads
        if variant.packed:
            self.N, self.B = len(data.lengths), 1
            self.bounds = [0, *itertools.accumulate(data.lengths)]
            self.T = max(1, self.bounds[-1] + data.surplus)
        else:
            self.N = self.B = len(data.lengths)
            self.T = max(1, data.lengths[0])
            self.bounds = [n * self.T for n in range(self.N + 1)]
        self.guards: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.named = {"scale": data.scale, "batch_invariant": variant.batch_invariant}
        self.tokens(Hq, Hv)
        self.gates(Hv)
        self.states(Hv)
        self.kept(Hv)
        if data.output_given:
            buffer, whole = guarded((self.B * self.T, Hv, D), variant.dtype, device)
            self.named["output"] = buffer.view(self.B, self.T, Hv, D)
            self.guards.append(("output", whole, whole.clone()))

    def randn(self, *shape):
        return torch.randn(shape, generator=self.random, device=self.device)

    def tokens(self, Hq, Hv):
        B, T, dtype = self.B, self.T, self.variant.dtype
        q, k, v = (self.randn(B, T, heads, D) for heads in (Hq, Hq, Hv))
        if self.variant.l2norm:
            self.named["use_qk_l2norm_in_kernel"] = True
        else:
            q, k = (F.normalize(x, dim=-1) for x in (q, k))
        self.q, self.k, self.v = (self.spoil(x).to(dtype) for x in (q, k, v))
        if self.variant.packed:
            self.named["cu_seqlens"] = torch.tensor(
                self.bounds, dtype=self.variant.packed, device=self.device
            )

    def spoil(self, x):
        """Garbage in the rows that belong to no sequence."""
        x[:, self.bounds[-1] if self.variant.packed else self.T :] = self.data.garbage
        return x

    def gates(self, Hv):
        variant, shape = self.variant, (self.B, self.T, Hv)
        self.gate = {}
        if variant.gate.startswith("raw"):
            g = self.randn(*shape)
            self.gate = {"A_log": self.randn(Hv) + self.data.strength / 10}
            if variant.gate == "raw":
                self.gate["dt_bias"] = self.randn(Hv)
            self.named |= {"use_gate_in_kernel": True, **self.gate}
            self.gate["gate"] = "raw"
        else:
            g = F.logsigmoid(self.randn(*shape)) * self.data.strength
            if variant.gate == "linear":
                g = g.exp()
                g[:, ::7] = 0
                self.named["gate"] = self.gate["gate"] = "linear"
        beta = self.randn(*shape)
        if variant.beta == "plain":
            beta = beta.sigmoid()
        else:
            self.named["use_beta_sigmoid_in_kernel"] = True
            self.named["allow_neg_eigval"] = variant.beta == "twice"
        self.g, self.beta = (
            self.spoil(x).to(dtype)
            for x, dtype in ((g, variant.gate_dtype), (beta, variant.beta_dtype))
        )

    def states(self, Hv):
        variant, pooled = self.variant, self.variant.slots is not None
        self.slots = list(range(self.N))
        rows = self.N
        if pooled:
            rows = self.N + 2
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(self.data.seed))
            self.slots = order[: self.N].tolist()
            self.slots[-1] = -1 if self.data.seed % 3 == 0 else self.slots[-1]
            self.named["state_indices"] = torch.tensor(
                self.slots, dtype=variant.slots, device=self.device
            )
        self.named["state_v_first"] = variant.v_first
        self.initial = None
        if variant.initial:
            self.initial, whole = self.buffer(rows, Hv, variant.initial)
            self.initial.copy_(self.randn(rows, Hv, D, D))
            self.named["initial_state"] = self.initial
        if variant.final in ("none", "fresh"):
            self.named["output_final_state"] = variant.final == "fresh"
            self.named["state_dtype"] = variant.final_dtype
        elif variant.final == "buffer":
            final, whole = self.buffer(rows, Hv, variant.final_dtype)
            self.named["output_state"] = final
            self.guards.append(("output_state", whole, whole.clone()))
            self.named["state_dtype"] = variant.final_dtype
        else:
            self.named["output_state"] = self.initial
            self.named["state_dtype"] = variant.initial
            self.guards.append(("pool", whole, whole.clone()))

    def buffer(self, rows, Hv, dtype):
        return guarded((rows, Hv, D, D), dtype, self.device, self.data.padded_rows)

    def kept(self, Hv):
        if self.variant.kept == "h":
            self.named["output_h"] = True
        elif self.variant.kept == "checkpoints":
            every = self.data.every
            counts = [(b - a) // every for a, b in itertools.pairwise(self.bounds)]
            gap = 1 if self.variant.packed else 0
            self.starts = [0, *itertools.accumulate(count + gap for count in counts)]
            buffer, whole = guarded(
                (self.starts[-1] + 1, Hv, D, D), self.variant.kept_dtype, self.device
            )
            self.guards.append(("state_checkpoints", whole, whole.clone()))
            self.named |= {"checkpoint_every_n_tokens": every, "state_checkpoints": buffer}
            if self.variant.packed:
                self.named["checkpoint_cu_starts"] = torch.tensor(
                    self.starts, dtype=self.variant.packed, device=self.device
                )

    def oriented(self, state):
        return state.mT if self.variant.v_first else state

    def expected(self):
        starts = None
        if self.initial is not None:
            starts = [
                None if slot < 0 else self.oriented(self.initial[slot].clone())
                for slot in self.slots
            ]
        every = {"h": 64, "checkpoints": self.data.every, None: 0}[self.variant.kept]
        return gated_delta_rule(
            self.q,
            self.k,
            self.v,
            self.g,
            self.beta,
            scale=self.data.scale,
            initial_states=starts,
            cu_seqlens=self.bounds,
            use_qk_l2norm=self.variant.l2norm,
            use_beta_sigmoid=self.variant.beta != "plain",
            allow_neg_eigval=self.variant.beta == "twice",
            keep_every=every,
            **self.gate,
        )

    def run(self, call):
        return call(self.q, self.k, self.v, self.g, self.beta, **self.named)


def close(name, actual, expected, tolerance=TOLERANCE):
    assert actual.isfinite().all(), f"{name} is not finite"
    error = (actual.double() - expected).norm().item()
    # fp16 states and nearly forgotten ones have small elements: an absolute floor beside it.
    floor = 1e-6 * expected.numel() ** 0.5
    limit = tolerance * expected.norm().item() + floor
    assert error <= limit, f"{name}: error {error:.3e} above {limit:.3e}"


def check(variant: Variant, data: Data, device: str, backend: str) -> None:
    problem = Problem(variant, data, device)
    expected = problem.expected()
    output, final_state, *h = problem.run(
        lambda *x, **named: gdn_prefill.chunk_gated_delta_rule(*x, backend=backend, **named)
    )
    assert output.dtype == variant.dtype and output.shape == problem.v.shape
    check_output(problem, output, expected)
    check_final_states(problem, final_state, expected)
    check_kept(problem, h, expected)
    check_guards(problem)


def check_output(problem, output, expected):
    rows, reference = output.flatten(0, 1), expected.output.flatten(0, 1)
    close("output", rows[: problem.bounds[-1]], reference[: problem.bounds[-1]])
    for n, (start, end) in enumerate(itertools.pairwise(problem.bounds)):
        close(f"output of sequence {n}", rows[start:end], reference[start:end], SEQUENCE_TOLERANCE)


def check_final_states(problem, final_state, expected):
    if problem.variant.final == "none":
        assert final_state is None
        return
    assert final_state.dtype == problem.named["state_dtype"]
    pooled = "output_state" in problem.named
    if pooled:
        assert final_state is problem.named["output_state"]
    where = problem.slots if pooled else range(problem.N)
    written = [n for n, row in zip(range(problem.N), where, strict=True) if row >= 0]
    if not written:
        return
    actual = torch.stack([problem.oriented(final_state[where[n]]) for n in written])
    reference = torch.stack([expected.final_states[n] for n in written])
    close("final state", actual, reference)
    for i, n in enumerate(written):
        close(f"final state of sequence {n}", actual[i], reference[i], SEQUENCE_TOLERANCE)


def check_kept(problem, h, expected):
    variant = problem.variant
    if variant.kept is None:
        assert not h
        return
    if variant.kept == "h":
        states, row = h[0].flatten(0, -4), 0
        assert states.dtype == problem.named["state_dtype"]
    else:
        assert not h
        states, starts = problem.named["state_checkpoints"], problem.starts
    actual, reference = [], []
    for n, (start, end) in enumerate(itertools.pairwise(problem.bounds)):
        if variant.kept == "h":
            counts = range(0, end - start, 64)
            rows = range(row, row + len(counts))
            row += len(counts)
        else:
            counts = range(problem.data.every, end - start + 1, problem.data.every)
            rows = range(starts[n], starts[n] + len(counts))
        for at, tokens in zip(rows, counts, strict=True):
            actual.append(problem.oriented(states[at]))
            reference.append(expected.states[n][tokens])
    if actual:
        close(variant.kept, torch.stack(actual), torch.stack(reference))


def check_guards(problem):
    """All of a buffer's surroundings, its padding and the rows that nobody owns are as before."""
    touched = {
        "output": problem.bounds[-1],
        "output_state": [slot for slot in problem.slots if slot >= 0],
        "pool": [slot for slot in problem.slots if slot >= 0],
    }
    for name, whole, before in problem.guards:
        if name == "state_checkpoints":
            every = problem.data.every
            rows = [
                start + i
                for start, (a, b) in zip(
                    problem.starts, itertools.pairwise(problem.bounds), strict=False
                )
                for i in range((b - a) // every)
            ]
        elif name == "output":
            rows = list(range(touched[name]))
        else:
            rows = touched[name]
        buffer = problem.named["output_state" if name == "pool" else name]
        view = buffer.flatten(0, 1) if name == "output" else buffer
        offset = view.storage_offset()
        restored = whole.as_strided(view.shape, view.stride(), offset)
        original = before.as_strided(view.shape, view.stride(), offset)
        if rows:
            restored[rows] = original[rows]
        assert torch.equal(whole.isnan(), before.isnan()), f"{name}: written outside its rows"
        same = (whole == before) | before.isnan()
        assert same.all(), f"{name}: {(~same).sum()} elements outside its rows were written"


@pytest.fixture
def poisoned():
    """torch.empty gives NaN: what is read without having been written shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


SHARED = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@settings(max_examples=60, **SHARED)
@given(variant=variants(), data=CPU_DATA)
def test_portable_path(poisoned, variant, data):
    check(variant, data, "cpu", "torch")


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(GPU_VARIANTS)))
@settings(max_examples=12, **SHARED)
@given(data=GPU_DATA)
def test_kernels(poisoned, number, data):
    check(GPU_VARIANTS[number], data, "cuda", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(WIDE_VARIANTS)))
@settings(max_examples=12, **SHARED)
@given(data=GPU_DATA)
def test_kernels_of_the_wide_tile(poisoned, monkeypatch, number, data):
    """The drawn calls are small, so that the dispatch would run them at 64 columns."""
    monkeypatch.setattr(operator_forward, "sequence_plan", lambda *_: CorePlan(128))
    check(WIDE_VARIANTS[number], data, "cuda", "cuda")


@pytest.mark.parametrize(
    ("variants_", "factors"), [(GPU_VARIANTS, FACTORS), (WIDE_VARIANTS, WIDE_FACTORS)]
)
def test_every_pair_of_levels_meets(variants_, factors):
    names = list(factors)
    covered = set().union(*(_pairs(variant, names) for variant in variants_))
    for a, b in itertools.combinations(names, 2):
        if {"heads", "slots", "final", "kept_dtype"} & {a, b}:
            continue  # some of their levels exclude each other
        for x, y in itertools.product(factors[a], factors[b]):
            assert (a, x, b, y) in covered
    assert len(variants_) <= 40
