"""Stage one of the operator against a float64 model: every option, without a GPU and on one.

Outputs start as NaN: what a kernel leaves out shows, and what it must not touch has to stay NaN.
Without a GPU the kernel runs in the tile emulator, which looks for races and for elements that two
CTAs write, and as generated CUDA on the CPU (host_cuda).
"""

import functools
import math
import re
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("tilelang")

import host_cuda  # noqa: E402

from gdn_prefill import preprocess as host  # noqa: E402
from gdn_prefill import toolchain  # noqa: E402
from gdn_prefill.kernels import inverse_blocks, preprocess, preprocess_fused  # noqa: E402
from gdn_prefill.kernels.preprocess import CHUNK, OperatorPreprocessConfig  # noqa: E402
from gdn_prefill.kernels.preprocess_fused import operator_preprocess_kernel  # noqa: E402
from gdn_prefill.kernels.preprocess_packed import CLASSES  # noqa: E402
from gdn_prefill.preprocess import prepare_operator  # noqa: E402
from reference.chunked import chunk_cumsum, solve_A  # noqa: E402
from tile_emulator import emulate  # noqa: E402
from tile_emulator.program import Program  # noqa: E402
from tile_emulator.scheduler import adversarial  # noqa: E402

HEAD_DIM = 128
EPSILON = 1e-6
# A relative to the largest entry of a row: rounding to the dtype, and fp16 operands of products.
A_ERROR = {"bfloat16": 1.5 * 2**-9, "float16": 2.0 * 2**-11}
SCALAR_ERROR = 1e-5


@dataclass(frozen=True)
class Case:
    """One call: a configuration, its arguments, and the sequences as (row, first, end)."""

    config: OperatorPreprocessConfig
    inputs: dict[str, Tensor]
    sequences: list[tuple[int, int, int]]
    lengths: list[int] | None = field(default=None)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        B, T, Hq, _ = self.inputs["k"].shape
        return B, T, Hq, self.inputs["g"].shape[2]

    def replace(self, **inputs) -> "Case":
        return replace(self, inputs=self.inputs | inputs)


def make_case(
    heads: tuple[int, int],
    tokens: int | list[int],
    *,
    batch: int = 1,
    spare: int = 0,
    key_norm: float = 1.0,
    seed: int = 0,
    **options,
) -> Case:
    """tokens: of a dense batch, or the lengths of packed sequences followed by ``spare`` rows."""
    packed = isinstance(tokens, list)
    if packed:
        options.setdefault("cu_seqlens", "int32")
    config = OperatorPreprocessConfig(*heads, **options)
    T = sum(tokens) + spare if packed else tokens
    Hq, Hv = heads
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    dtype = getattr(torch, config.dtype)
    q, k = (F.normalize(draw(batch, T, Hq, HEAD_DIM), dim=-1) for _ in range(2))
    if config.l2norm:
        k = k * key_norm * (0.1 + draw(batch, T, Hq, 1).abs())
        q = q * 3 * draw(batch, T, Hq, 1)
    g = F.logsigmoid(draw(batch, T, Hv)) / 4
    if config.gate == "linear":
        g = g.exp()
        g[:, ::9] = 0.0
    elif config.gate == "raw":
        g = 2 * draw(batch, T, Hv)
    else:
        g[:, ::11] = -torch.inf
    beta = draw(batch, T, Hv)
    if config.beta == "plain":
        beta = beta.sigmoid()
    q, k = q.to(dtype), k.to(dtype)
    if config.strided:
        q, k = views(torch.cat([q, k, draw(batch, T, Hv, HEAD_DIM).to(dtype)], dim=2), Hq)
    inputs = {
        "q": q,
        "k": k,
        "g": g.to(getattr(torch, config.gate_dtype)),
        "beta": beta.to(getattr(torch, config.beta_dtype)),
        "A_log": draw(Hv) / 2,
        "dt_bias": draw(Hv),
    }
    if packed:
        ends = torch.tensor([0, *tokens]).cumsum(0)
        inputs["cu_seqlens"] = ends.to(getattr(torch, config.cu_seqlens))
        bounds = ends.tolist()
        sequences = [(0, a, z) for a, z in zip(bounds, bounds[1:], strict=False)]
    else:
        sequences = [(b, 0, T) for b in range(batch)]
    return Case(config, inputs, sequences)


def views(projection: Tensor, heads_q: int) -> tuple[Tensor, Tensor]:
    """q and k of one projection [B, T, heads of q, k and v, 128]."""
    return projection[:, :, :heads_q], projection[:, :, heads_q : 2 * heads_q]


def poisoned(case: Case) -> dict[str, Tensor]:
    B, T, Hq, Hv = case.shape
    time = case.config.layout == "time"
    device = case.inputs["k"].device

    def scalars(heads):
        shape = (B, heads, T) if time else (B, T, heads)
        return torch.full(shape, torch.nan, device=device)

    rows, blocks = (B, T, Hv, CHUNK), (record_count(case), Hv, 10, 256)
    shape = rows if case.config.inverse == "rows" else blocks
    return {
        "A": torch.full(shape, torch.nan, device=device, dtype=case.inputs["k"].dtype),
        "gate": scalars(Hv),
        "beta": scalars(Hv),
        "query_norm": scalars(Hq),
        "key_norm": scalars(Hq),
        "order": torch.full((sequence_count(case),), -7, dtype=torch.int32, device=device),
    }


def record_count(case: Case) -> int:
    B, T, *_ = case.shape
    return T // CHUNK + sequence_count(case) if case.config.packed else B * -(-T // CHUNK)


def square(record: Tensor) -> Tensor:
    """A [Hv, 64, 64] of a record [Hv, 10, 256]: lane 4 r + c has of a block, in this order,
    columns 8 h + 2 c + p of rows 8 v + r for (h, v, p) = 000 to 111."""
    blocks = record.unflatten(-1, (8, 4, 2, 2, 2)).permute(0, 1, 5, 2, 4, 3, 6)
    blocks = blocks.reshape(len(record), 10, 16, 16)
    found = record.new_zeros(len(record), CHUNK, CHUNK)
    for number, (i, j) in enumerate(inverse_blocks.ORDER):
        found[:, 16 * i : 16 * i + 16, 16 * j : 16 * j + 16] = blocks[:, number]
    return found


def in_rows(case: Case, A: Tensor) -> Tensor:
    """A [B, T, Hv, 64] of either layout, NaN where nothing was written."""
    if case.config.inverse == "rows":
        return A
    B, T, _, Hv = case.shape
    if case.config.packed:
        bounds = case.inputs["cu_seqlens"].tolist()
        sequences = [
            (0, a, z, a // CHUNK + n)
            for n, (a, z) in enumerate(zip(bounds, bounds[1:], strict=False))
        ]
    else:
        sequences = [(b, 0, T, b * -(-T // CHUNK)) for b in range(B)]
    rows, rest = A.new_full((B, T, Hv, CHUNK), torch.nan), A.clone()
    for b, first, end, record in sequences:
        for chunk, begin in enumerate(range(first, end, CHUNK)):
            found = square(A[record + chunk])
            valid = min(end - begin, CHUNK)
            rows[b, begin : begin + valid] = found[:, :valid].transpose(0, 1)
            if found.isfinite().all():
                assert torch.equal(
                    found[:, valid:], torch.eye(CHUNK).to(found)[valid:].expand_as(found[:, valid:])
                ), "A: rows past the end of a sequence"
            rest[record + chunk] = torch.nan
    assert rest.isnan().all(), "A: records of no chunk were written"
    return rows


def sequence_count(case: Case) -> int:
    return len(case.inputs["cu_seqlens"]) - 1 if case.config.packed else 1


def expected_order(case: Case) -> list[int]:
    """The numbers of packed sequences, by classes of length."""
    if not case.config.packed:
        return [-7]
    lengths = case.inputs["cu_seqlens"].diff().tolist()
    eighth = case.shape[1] // (8 * len(lengths))

    def kind(n):
        return next(k for k, least in enumerate(CLASSES) if lengths[n] >= least * eighth)

    return sorted(range(len(lengths)), key=kind)


def expected(case: Case) -> dict[str, Tensor]:
    """The float64 model; NaN where nothing is to be written."""
    config, x = case.config, case.inputs
    g, beta = x["g"].double(), x["beta"].double()
    if config.gate == "linear":
        g = g.log()
    elif config.gate == "raw":
        bias = x["dt_bias"].double() if config.dt_bias else 0.0
        g = -x["A_log"].double().exp() * F.softplus(g + bias)
    g = torch.where(g < preprocess.FORGETS, preprocess.FORGOTTEN, g)
    if config.beta != "plain":
        beta = beta.sigmoid() * (2 if config.beta == "twice_sigmoid" else 1)
    norms = {
        name: (x[source].double().square().sum(-1) + EPSILON).rsqrt()
        for name, source in (("query_norm", "q"), ("key_norm", "k"))
    }
    k = x["k"].double()
    if config.l2norm:
        k = k * norms["key_norm"][..., None]
    else:
        norms = {name: torch.full_like(norm, torch.nan) for name, norm in norms.items()}
    result = {name: torch.full_like(norm, torch.nan) for name, norm in norms.items()}
    result |= {"gate": torch.full_like(g, torch.nan), "beta": torch.full_like(g, torch.nan)}
    result["A"] = torch.full((*g.shape, CHUNK), torch.nan, dtype=torch.float64, device=g.device)
    for b, first, end in case.sequences:
        if first == end:
            continue
        at = (slice(b, b + 1), slice(first, end))
        result["gate"][at] = chunk_cumsum(g[at])
        result["beta"][at] = beta[at]
        result["A"][at] = solve_A(k[at], g[at], beta[at])
        for name, norm in norms.items():
            result[name][at] = norm[at]
    if config.layout == "time":
        for name in ("gate", "beta", "query_norm", "key_norm"):
            result[name] = result[name].transpose(1, 2)
    return result


def check(case: Case, found: dict[str, Tensor]) -> None:
    wanted = expected(case)
    found = found | {"A": in_rows(case, found["A"])}
    assert found["order"].tolist() == expected_order(case), "order: another one"
    for name, want in wanted.items():
        got = found[name].double()
        written, wrong = ~got.isnan(), "not written" if want.isnan().sum() == 0 else "where written"
        assert torch.equal(written, ~want.isnan()), f"{name}: {wrong}"
        got, want = got.nan_to_num(0.0), want.nan_to_num(0.0)
        if name == "A":
            scale = want.abs().amax(-1, keepdim=True)
            error = A_ERROR[case.config.dtype] * scale
        else:
            scale = want.abs().clamp_min(1.0 if name == "gate" else 0.0)
            error = SCALAR_ERROR * scale
        worst = ((got - want).abs() / error.clamp_min(1e-30)).max()
        assert worst <= 1, f"{name}: {worst:.2f} times the error allowed"


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bitwise, but for the kind of a NaN."""
    return all(torch.equal(x.nan_to_num(7e4), b[name].nan_to_num(7e4)) for name, x in a.items())


def arguments(case: Case, outputs: dict[str, Tensor], ctas: int) -> tuple:
    """The PrimFunc's arguments, dummies for what an option that is off would need."""
    config, x = case.config, case.inputs
    dummy = torch.zeros(1, device=x["k"].device)
    return (
        x["q"] if config.l2norm else dummy,
        x["k"],
        x["g"],
        x["beta"],
        x["A_log"] if config.gate == "raw" else dummy,
        x["dt_bias"] if config.dt_bias else dummy,
        x["cu_seqlens"] if config.packed else dummy,
        outputs["A"],
        outputs["gate"],
        outputs["beta"],
        outputs["query_norm"] if config.l2norm else dummy,
        outputs["key_norm"] if config.l2norm else dummy,
        outputs["order"] if config.packed else dummy,
        ctas,
    )


def run_emulated(case: Case, ctas: int | None = None, **options) -> dict[str, Tensor]:
    """ctas: as many as one SM would take, if None."""
    outputs = poisoned(case)
    if ctas is None:
        sequences = len(case.inputs["cu_seqlens"]) - 1 if case.config.packed else None
        ctas = preprocess_fused.grid(case.config, *case.shape[:2], 1, sequences)
    kernel = operator_preprocess_kernel(case.config)
    emulate(
        kernel,
        *arguments(case, outputs, ctas),
        pass_configs=preprocess_fused.PASS_CONFIGS,
        **options,
    )
    return outputs


@pytest.fixture(scope="module")
def run_on_host(tmp_path_factory):
    """Runs the kernel's CUDA on the CPU: (case, blocks, seed) -> outputs."""
    reason = host_cuda.unavailable()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("host_cuda")

    @functools.cache
    def compiled(config: OperatorPreprocessConfig) -> host_cuda.HostKernel:
        kernel = operator_preprocess_kernel(config)
        return host_cuda.HostKernel(kernel, preprocess_fused.PASS_CONFIGS, folder)

    def run(case: Case, blocks: int = 2, seed: int = 0) -> dict[str, Tensor]:
        outputs = poisoned(case)
        B, T, _, _ = case.shape
        x = case.inputs
        sizes = {"batch": B, "tokens": T, "ctas": blocks}
        sizes |= {"key_stride": x["k"].stride(1), "query_stride": x["q"].stride(1)}
        if case.config.packed:
            sizes["boundaries"] = x["cu_seqlens"].shape[0]
            sizes["sequences"] = sizes["boundaries"] - 1
        named = {("beta_out" if name == "beta" else name): y for name, y in outputs.items()}
        compiled(case.config).launch(blocks, seed, **x, **named, **sizes)
        return outputs

    return run


EVERYTHING = {
    "dtype": "float16",
    "gate": "raw",
    "gate_dtype": "bfloat16",
    "dt_bias": True,
    "beta": "twice_sigmoid",
    "beta_dtype": "bfloat16",
    "l2norm": True,
    "cu_seqlens": "int64",
    "strided": True,
}
OPTIONS = {
    "plain": {},
    "linear": {"gate": "linear"},
    "linear_bf16": {"gate": "linear", "gate_dtype": "bfloat16"},
    "raw": {"gate": "raw"},
    "raw_bias": {"gate": "raw", "dt_bias": True, "gate_dtype": "bfloat16"},
    "sigmoid": {"beta": "sigmoid", "beta_dtype": "bfloat16"},
    "twice_sigmoid": {"beta": "twice_sigmoid"},
    "fp16": {"dtype": "float16", "gate_dtype": "float16", "beta_dtype": "float16"},
    "l2norm": {"l2norm": True},
    "token": {"layout": "token", "l2norm": True},
    "blocks": {"inverse": "blocks"},
    "blocks_fp16": {"inverse": "blocks", "dtype": "float16", "l2norm": True},
}
LENGTHS = [0, 0, 70, 64, 0, 1, 129, 63, 0]


@pytest.mark.parametrize("name", OPTIONS)
def test_options_emulated(name):
    case = make_case((1, 2), 70, batch=2, key_norm=11.0, **OPTIONS[name])
    check(case, run_emulated(case))


@pytest.mark.parametrize("inverse", ["rows", "blocks"])
@pytest.mark.parametrize("heads", [(1, 8), (2, 6), (3, 3)])
def test_packed_emulated(heads, inverse):
    """One q/k head for two items, items of several q/k heads, and items with missing V heads."""
    case = make_case(heads, LENGTHS, spare=5, l2norm=True, key_norm=11.0, inverse=inverse)
    check(case, run_emulated(case, ctas=4))


@pytest.mark.parametrize("ctas", [2, 7, 60])
def test_more_sequences_than_threads_emulated(ctas):
    """A thread searches three of them, mostly empty ones."""
    generator = torch.Generator().manual_seed(ctas)
    lengths = torch.randint(-8, 3, (300,), generator=generator).clamp(min=0)
    lengths[torch.randint(0, 300, (2,), generator=generator)] += 70
    case = make_case((1, 1), lengths.tolist(), seed=ctas, spare=1)
    check(case, run_emulated(case, ctas=ctas, check=None))


@pytest.mark.parametrize("inverse", ["rows", "blocks"])
def test_everything_under_adversarial_schedules(inverse):
    case = make_case((2, 6), [64, 0, 70], spare=3, inverse=inverse, **EVERYTHING)
    kernel = operator_preprocess_kernel(case.config)
    wanted = run_emulated(case, ctas=3)
    check(case, wanted)
    for schedule in ("random:1", "random:2", *adversarial(Program(kernel).roles)):
        found = run_emulated(case, ctas=3, schedule=schedule)
        assert same(found, wanted)


@pytest.mark.parametrize("sequences", [[0, 0, 0], [0], [1], [64]])
def test_more_ctas_than_items_emulated(sequences):
    case = make_case((1, 4), sequences, spare=2)
    check(case, run_emulated(case, ctas=4))


def not_a_number(case: Case, sequence: int) -> Case:
    """The case with NaN and Inf in all inputs' rows of one sequence and in the spare rows."""
    _, first, end = case.sequences[sequence]
    inputs = {}
    for name in ("q", "k", "g", "beta"):
        x = case.inputs[name].clone()
        for rows in (slice(first, end), slice(case.sequences[-1][2], None)):
            x[:, rows] = torch.nan
            x[:, rows][..., ::2] = torch.inf
        inputs[name] = x
    others = [s for s in case.sequences if s != case.sequences[sequence]]
    return replace(case.replace(**inputs), sequences=others)


def without(case: Case, outputs: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """The outputs with NaN in some rows."""
    outputs = {name: x.clone() for name, x in outputs.items()}
    outputs["A"] = in_rows(case, outputs["A"])
    for name, x in outputs.items():
        if name != "order":
            at = (slice(None), rows) if name == "A" else (slice(None), slice(None), rows)
            x[at] = torch.nan
    return outputs


@pytest.mark.parametrize("inverse", ["rows", "blocks"])
@pytest.mark.parametrize("l2norm", [False, True])
def test_neighbours_do_not_leak_emulated(l2norm, inverse):
    healthy = make_case((2, 6), [84, 33, 114, 64], spare=64, l2norm=l2norm, inverse=inverse)
    for sequence in (1, 3):
        case = not_a_number(healthy, sequence)
        _, first, end = healthy.sequences[sequence]
        found = without(case, run_emulated(case, check=None), slice(first, end))
        check(replace(case, config=replace(case.config, inverse="rows")), found)


@pytest.mark.parametrize("key_norm", [0.0, 11.0, 1e4])
def test_keys_of_any_length_are_normalised(key_norm):
    """What is stored as fp16 is the product of normalised keys; zero keys have norm 1000."""
    case = make_case((1, 4), 70, l2norm=True, key_norm=key_norm)
    check(case, run_emulated(case))


def test_gates_that_forget_or_keep_everything():
    """Decays 0 and 1, softplus far below and above 0: sums stay finite, small decays exact."""
    for gate, values in {
        "linear": [0.0, 1.0, 1.0 - 2.0**-20, 1e-30, 0.5],
        "raw": [-60.0, 60.0, -20.0, 0.0, 1e4],
        "log": [-torch.inf, 0.0, -1e-7, -9e3, -1e30],
    }.items():
        case = make_case((1, 2), 65, gate=gate, dt_bias=gate == "raw")
        g = torch.tensor(values).repeat(26)[: 65 * 2].reshape(1, 65, 2)
        case = case.replace(g=g, dt_bias=torch.zeros(2), A_log=torch.tensor([-3.0, 1.0]))
        outputs = run_emulated(case, check=None)
        check(case, outputs)
        one = case.replace(g=torch.full((1, 65, 2), values[2]))
        sums = run_emulated(one, check=None)["gate"].double()
        wanted = expected(one)["gate"]
        assert ((sums - wanted).abs() <= 1e-5 * wanted.abs()).all(), f"{gate} {values[2]}"


def test_check_can_fail():
    case = make_case((1, 4), [70, 1], spare=3, l2norm=True)
    outputs = run_emulated(case)
    check(case, outputs)
    for name, change in (
        ("A", lambda x: x[0, 40, 0, 3].add_(0.02)),
        ("A", lambda x: x[0, 71:].zero_()),
        ("gate", lambda x: x[0, 0, 5].add_(0.05)),
        ("beta", lambda x: x[0, :, 70].fill_(torch.nan)),
        ("query_norm", lambda x: x.mul_(1.0001)),
        ("key_norm", lambda x: x[..., -1].fill_(1.0)),
        ("order", lambda x: x.copy_(x.flip(0))),
    ):
        wrong = outputs | {name: outputs[name].clone()}
        change(wrong[name])
        with pytest.raises(AssertionError, match=name):
            check(case, wrong)


def test_everything_on_host(run_on_host):
    """The generated CUDA: addresses, swizzles, tails, strides."""
    case = make_case((2, 6), LENGTHS, spare=5, **EVERYTHING)
    outputs = run_on_host(case, 2)
    check(case, outputs)
    assert same(outputs, run_on_host(case, 2, seed=5))
    case = not_a_number(case, 2)
    check(case, without(case, run_on_host(case, 3), slice(0, 70)))


def test_dense_on_host(run_on_host):
    case = make_case((1, 4), 130, batch=2, l2norm=True, key_norm=11.0, gate="linear")
    check(case, run_on_host(case, 3))


def call(case: Case, outputs: dict[str, Tensor]) -> None:
    """prepare_operator with the arguments of a case."""
    config, x = case.config, case.inputs
    norms = ("query_norm", "key_norm")
    prepare_operator(
        x["k"],
        x["g"],
        x["beta"],
        outputs["A"],
        outputs["gate"],
        outputs["beta"],
        q=x["q"] if config.l2norm else None,
        **({name: outputs[name] for name in norms} if config.l2norm else {}),
        gate_mode=config.gate,
        A_log=x["A_log"] if config.gate == "raw" else None,
        dt_bias=x["dt_bias"] if config.dt_bias else None,
        beta_mode=config.beta,
        cu_seqlens=x.get("cu_seqlens"),
        order=outputs["order"] if config.packed else None,
    )


class EmulatedRuntime:
    """A runtime whose kernels run in the emulator; notes what was asked for."""

    def __init__(self):
        self.configs, self.launches = [], []

    def kernel(self, factory, config, pass_configs):
        self.configs.append(config)

        def launch(*tensors):
            self.launches.append(tensors)
            emulate(factory(config), *tensors, pass_configs=pass_configs)

        return launch


@pytest.mark.parametrize(
    "options",
    [{}, {"gate": "raw"}, EVERYTHING, {"cu_seqlens": "int32", "inverse": "blocks"}],
    ids=["plain", "raw", "all", "blocks"],
)
def test_prepare_operator_emulated(monkeypatch, options):
    """The host's side: the configuration that it derives, and every argument in its place."""
    runtime = EmulatedRuntime()
    monkeypatch.setattr(host, "RUNTIME", runtime)
    monkeypatch.setattr(host, "sm_count", lambda _: 1)
    packed = "cu_seqlens" in options
    case = make_case((1, 4), [64, 0, 9] if packed else 73, spare=7, **options)
    outputs = poisoned(case)
    call(case, outputs)
    check(case, outputs)
    assert runtime.configs == [case.config]
    (launch,) = runtime.launches
    # as many items as two chunks, or three sequences of 80 tokens, can have, and who orders them
    room = preprocess_fused.blocks_per_sm(case.config)
    assert launch[-1] == (min(room - 1, 4) + 1 if packed else min(room, 2))


def test_grid_of_packed_sequences_covers_any_lengths():
    config = OperatorPreprocessConfig(1, 4, cu_seqlens="int32")
    many = 10**9  # SMs: the grid is the number of items
    for lengths in ([64] * 9, [1] * 9, [65, 63, 64, 0, 129], [0], [2**20]):
        items = sum(-(-length // CHUNK) for length in lengths)
        assert preprocess_fused.grid(config, 1, sum(lengths), many, len(lengths)) > items
    assert preprocess_fused.grid(config, 1, 2**20, 132, 100_000) == 132 * 3


def test_outputs_and_their_bytes():
    outputs = host.operator_outputs(2, 70, 3, 6, torch.float16, l2norm=True)
    case = make_case((3, 6), 70, batch=2, dtype="float16", l2norm=True)
    for name, tensor in poisoned(case).items():
        if name != "order":
            name = "beta_out" if name == "beta" else name
            assert outputs[name] == (tuple(tensor.shape), tensor.dtype)
    packed = host.operator_outputs(1, 70, 3, 6, sequences=5)
    assert packed["order"] == ((5,), torch.int32)
    for case in (
        make_case((3, 6), 70, batch=2, inverse="blocks"),
        make_case((3, 6), [1, 64, 0, 5], spare=60, inverse="blocks"),
    ):
        sequences = sequence_count(case) if case.config.packed else None
        blocks = host.operator_outputs(*case.shape, sequences=sequences, inverse="blocks")
        assert blocks["A"][0] == tuple(poisoned(case)["A"].shape)
    sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in outputs.values())
    assert sum(sizes) == 2 * 70 * (6 * (64 * 2 + 4 + 4) + 3 * 8)


def test_the_blocks_of_a_record():
    below = [(i, j) for i in range(4) for j in range(i + 1)]
    assert sorted(inverse_blocks.ORDER) == below
    read = [
        (inverse_blocks.block_row(lap, warp), inverse_blocks.block_column(lap, warp))
        for lap in range(inverse_blocks.LAPS)
        for warp in range(inverse_blocks.WARPS_PER_GROUP)
        if inverse_blocks.in_lap(lap, warp)
    ]
    assert tuple((int(i), int(j)) for i, j in read) == inverse_blocks.ORDER
    places = {
        (inverse_blocks.lane_row(lane, e), inverse_blocks.lane_column(lane, e))
        for lane in range(32)
        for e in range(inverse_blocks.LANE_ELEMENTS)
    }
    assert places == {(i, j) for i in range(16) for j in range(16)}


def test_strides_allowed():
    projection = torch.zeros(2, 9, 6, HEAD_DIM, dtype=torch.bfloat16)
    q, k = views(projection, 2)
    assert all(host.strides_allowed(x) for x in (q, k, q.contiguous(), projection))
    flat = torch.zeros(2, 9, 6 * HEAD_DIM + 4, dtype=torch.bfloat16)
    for refused in (
        q[:, :5],  # rows of the batch further apart than its tokens
        q.transpose(2, 3).contiguous().transpose(2, 3),
        q[..., ::2],
        projection[:, :, ::2],
        flat[..., : 2 * HEAD_DIM].unflatten(-1, (2, HEAD_DIM)),  # tokens not 16 bytes aligned
        flat.view(-1)[4:][: 9 * HEAD_DIM].view(1, 9, 1, HEAD_DIM),
    ):
        assert not host.strides_allowed(refused)


@pytest.mark.parametrize(
    ("field_", "value"),
    [("gate", "exp"), ("beta", 1), ("dtype", "float32"), ("cu_seqlens", "int8"), ("dt_bias", True)],
)
def test_config_refuses(field_, value):
    with pytest.raises(ValueError, match=f"{field_}={value!r}"):
        OperatorPreprocessConfig(1, 4, **{field_: value})


BUDGETS = {
    "packed": ((16, 64), {"cu_seqlens": "int32", "l2norm": True}),
    "everything": ((2, 8), EVERYTHING),
    "many_key_tiles": ((4, 4), EVERYTHING),
    "blocks": ((2, 8), {"inverse": "blocks", **EVERYTHING}),
}


@pytest.mark.skipif(toolchain.unavailable() is not None, reason=f"nvcc: {toolchain.unavailable()}")
@pytest.mark.parametrize("name", BUDGETS)
def test_no_spills_and_room_for_its_blocks_per_sm(name):
    heads, options = BUDGETS[name]
    config = OperatorPreprocessConfig(*heads, **options)
    cost = toolchain.resources(operator_preprocess_kernel(config), preprocess_fused.PASS_CONFIGS)
    reserved = 1024  # bytes of shared memory that the system keeps of each block
    blocks = preprocess_fused.blocks_per_sm(config)
    assert cost.problems() == (), cost.line()
    if cost.sass is not None:
        assert cost.sass["LDL"] == cost.sass["STL"] == 0, cost.line()
    assert blocks * (cost.shared_bytes + reserved) <= toolchain.SHARED_MEMORY_LIMIT + reserved
    assert blocks * cost.threads * cost.registers <= toolchain.REGISTER_FILE


@pytest.mark.parametrize(("inverse", "stores"), [("rows", 1), ("blocks", 10)])
def test_offsets_are_64_bit_and_vectors_are_moved_whole(inverse, stores):
    config = OperatorPreprocessConfig(16, 64, inverse=inverse, **EVERYTHING)
    kernel = operator_preprocess_kernel(config)
    source = toolchain.generate(kernel, preprocess_fused.PASS_CONFIGS).device_source
    body = source[source.rindex("__launch_bounds__") :]
    accesses = re.findall(r"\b(?:gate|beta_out|key_norm|query_norm|A|q)(?:\[| \+ )[^;]*;", body)
    assert len(accesses) >= 6 + 8
    wide = re.compile(r"int64_t\)(?:token|first|here_local|min)")
    assert all(wide.search(access) for access in accesses)
    assert body.count("*(uint4*)(q + ") == 8
    assert body.count("*(uint4*)(A + ") == stores


def to_device(case: Case) -> Case:
    inputs = {}
    for name, x in case.inputs.items():
        inputs[name] = x.to("cuda") if x.is_contiguous() else None
    if case.config.strided:
        q, k = case.inputs["q"], case.inputs["k"]
        heads = q.stride(1) // HEAD_DIM
        projection = q.as_strided((*q.shape[:2], heads, HEAD_DIM), q.stride()).to("cuda")
        inputs["q"], inputs["k"] = views(projection, k.shape[2])
    return case.replace(**inputs)


def run_on_gpu(case: Case) -> dict[str, Tensor]:
    outputs = poisoned(case)
    call(case, outputs)
    torch.cuda.synchronize()
    return outputs


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_options_on_gpu(name):
    if name == "token":
        pytest.skip("prepare_operator writes the other layout")
    for heads, tokens, batch in (((2, 8), 1, 3), ((2, 8), 1025, 3), ((2, 6), 200, 2)):
        case = to_device(make_case(heads, tokens, batch=batch, key_norm=11.0, **OPTIONS[name]))
        check(case, run_on_gpu(case))


def random_lengths(seed: int, sequences: int, longest: int) -> list[int]:
    """A third of the sequences empty, the others log-uniform."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(sequences, generator=generator).mul(math.log(longest)).exp().int()
    return (size * (torch.rand(sequences, generator=generator) > 0.33)).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(2, 8), (4, 4), (3, 6)])
@pytest.mark.parametrize("name", ["packed", "everything"])
def test_random_sequences_on_gpu(name, heads):
    options = EVERYTHING if name == "everything" else {"cu_seqlens": "int32"}
    for seed, (sequences, longest) in enumerate([(1, 5000), (9, 700), (130, 90), (3000, 20)]):
        lengths = random_lengths(seed, sequences, longest)
        case = to_device(make_case(heads, lengths, spare=77, seed=seed, **options))
        outputs = run_on_gpu(case)
        check(case, outputs)
        assert same(run_on_gpu(case), outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("l2norm", [False, True])
def test_neighbours_do_not_leak_on_gpu(l2norm):
    healthy = make_case((4, 8), [84, 33, 114, 64], spare=64, l2norm=l2norm)
    for sequence in range(4):
        case = to_device(not_a_number(healthy, sequence))
        _, first, end = healthy.sequences[sequence]
        check(case, without(case, run_on_gpu(case), slice(first, end)))


@pytest.mark.gpu
def test_graph_replays_with_other_sequences():
    """Captured once; then other lengths, fewer tokens and other contents in the same tensors."""
    lengths = [[70, 0, 130, 56], [256, 0, 0, 0], [0, 1, 0, 2], [64, 64, 64, 64], [0, 0, 0, 0]]
    cases = [
        to_device(
            make_case((4, 8), n, spare=256 - sum(n), seed=seed, l2norm=True, cu_seqlens="int64")
        )
        for seed, n in enumerate(lengths)
    ]
    fixed = cases[0].replace(**{name: x.clone() for name, x in cases[0].inputs.items()})
    outputs = poisoned(fixed)
    call(fixed, outputs)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call(fixed, outputs)
    for case in cases:
        for name, x in case.inputs.items():
            fixed.inputs[name].copy_(x)
        for x in outputs.values():
            x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        check(case, outputs)


@pytest.mark.gpu
def test_a_warm_call_neither_allocates_nor_waits():
    case = to_device(make_case((4, 8), [70, 0, 130], l2norm=True))
    outputs = poisoned(case)
    call(case, outputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(case, outputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    check(case, outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_a_million_tokens_on_gpu(packed):
    """2^20 tokens in one sequence; the reference only at both ends."""
    T = 2**20
    case = to_device(make_case((2, 8), [T] if packed else T))
    outputs = run_on_gpu(case)
    ends = (slice(0, 256), slice(T - 256, T))
    for rows in ends:
        inputs = {name: case.inputs[name][:, rows] for name in ("q", "k", "g", "beta")}
        part = replace(case.replace(**inputs), sequences=[(0, 0, 256)])
        found = {n: x[:, rows] if n == "A" else x[:, :, rows] for n, x in outputs.items()}
        check(part, found)
    assert not outputs["A"].isnan().any()


@pytest.mark.gpu
def test_offsets_past_31_bits_on_gpu():
    """A of more than 2^31 elements: the last rows, a tail's plain stores among them."""
    T = 2**31 // (64 * CHUNK) + 100
    config = {"cu_seqlens": "int32"}
    device = {"device": "cuda"}
    rows = slice(T - 200, T)
    small = to_device(make_case((16, 64), [150, 50], **config))
    inputs = {}
    for name in ("k", "g", "beta"):
        x = small.inputs[name]
        inputs[name] = torch.zeros(1, T, *x.shape[2:], dtype=x.dtype, **device)
        inputs[name][:, rows] = x
    inputs["cu_seqlens"] = torch.tensor([0, T - 200, T - 50, T], dtype=torch.int32, **device)
    case = small.replace(**inputs, q=inputs["k"])
    B, Hv = 1, 64
    outputs = {
        "A": torch.empty(B, T, Hv, CHUNK, dtype=torch.bfloat16, **device),
        "gate": torch.empty(B, Hv, T, **device),
        "beta": torch.empty(B, Hv, T, **device),
    }
    call(case, outputs)
    found = {n: x[:, rows] if n == "A" else x[:, :, rows] for n, x in outputs.items()}
    missing = {n: x for n, x in poisoned(small).items() if n not in found}
    check(small, found | missing)


@pytest.mark.gpu
def test_more_sequences_than_a_grid_has_rows_on_gpu():
    """70000 sequences of up to two tokens, times eight heads."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 3, (70_000,), generator=generator).tolist()
    case = to_device(make_case((2, 8), lengths))
    outputs = run_on_gpu(case)
    A = outputs["A"].double()
    starts = case.inputs["cu_seqlens"][:-1][case.inputs["cu_seqlens"].diff() > 0].long()
    assert (A[0, starts, :, 0] == 1).all() and (A[0, starts, :, 1:] == 0).all()
    assert not any(outputs[name].isnan().any() for name in ("A", "gate", "beta"))
    first = case.inputs["g"][0, starts].T
    assert torch.equal(outputs["gate"][0][:, starts], torch.where(first < -1e4, -128.0, first))
