"""The toolchain reader: canned tools everywhere, real nvcc where it is installed."""

import stat

import pytest

pytest.importorskip("tilelang")

import tilelang.language as T  # noqa: E402

from gdn_prefill import toolchain  # noqa: E402

needs_nvcc = pytest.mark.skipif(
    toolchain.unavailable() is not None, reason=f"nvcc: {toolchain.unavailable()}"
)

TWO_ROLES = """
extern "C" __global__ void work_kernel(float* __restrict__ a);
extern "C" __global__ void __launch_bounds__(512, 1) work_kernel(float* __restrict__ a) {
  extern __shared__ __align__(1024) uchar buf_dyn_shmem[];
  if (((int)threadIdx.x) < 256) {
    tl::warpgroup_reg_alloc<168>();
    for (int i = 0; i < 4; ++i) {
      a[i] = 0;
    }
  } else {
    if (((int)threadIdx.x) < 384) {
      tl::warpgroup_reg_alloc<136>();
    } else {
      tl::warpgroup_reg_dealloc<40>();
    }
  }
}
"""

STARVED = """
extern "C" __global__ void __launch_bounds__(1024, 2) starved_kernel(float* a) {
  float live[64];
  #pragma unroll
  for (int i = 0; i < 64; ++i) live[i] = a[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 64; ++i) a[i * 1024 + threadIdx.x] = live[i] * live[63 - i];
}
"""

CANNED_REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the function 'work_kernel'
ptxas info    : Compiling entry function 'work_kernel' for 'sm_90a'
ptxas info    : Function properties for work_kernel
    0 bytes stack frame, 572 bytes spill stores, 568 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 3072 bytes smem
ptxas info    : Compile time = 1.0 ms
"""


def scaled_copy(rows: int = 64, wide: bool = False):
    """A small PrimFunc: one tile of rows x 64 fp32 through shared memory."""
    columns = 128 if wide else 64

    @T.prim_func
    def scaled(
        a: T.Tensor((T.dynamic("n"), columns), "float32"),
        b: T.Tensor((T.dynamic("n"), columns), "float32"),
    ):
        with T.Kernel(T.ceildiv(a.shape[0], rows), threads=128) as block:
            tile_shared = T.alloc_shared((rows, columns), "float32")
            first = block * rows
            T.copy(a[first : first + rows, :], tile_shared)
            for i, j in T.Parallel(rows, columns):
                tile_shared[i, j] *= 2.0
            T.copy(tile_shared, b[first : first + rows, :])

    return scaled


@pytest.fixture
def fake_nvcc(tmp_path, monkeypatch):
    """Puts an nvcc on PATH that prints a given text and exits with a given status."""

    def install(text: str, status: int = 0) -> None:
        (tmp_path / "report").write_text(text)
        tool = tmp_path / "nvcc"
        tool.write_text(f"#!/bin/sh\ncat {tmp_path}/report >&2\nexit {status}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return install


def test_reads_ptxas_report(fake_nvcc):
    fake_nvcc(CANNED_REPORT)
    found = toolchain.resources(TWO_ROLES, sass=False)
    assert (found.threads, found.registers) == (512, 128)
    assert (found.spill_store_bytes, found.spill_load_bytes) == (572, 568)
    assert found.static_shared_bytes == 3072
    assert found.dynamic_shared_bytes is None
    assert len(found.warnings) == 1 and "C7512" in found.warnings[0]


def test_register_budget_counts_the_groups_of_each_branch(fake_nvcc):
    fake_nvcc(CANNED_REPORT)
    found = toolchain.resources(TWO_ROLES, sass=False)
    asked = [(change.registers, change.groups) for change in found.setmaxnreg]
    assert asked == [(168, 2), (136, 1), (40, 1)]
    assert (found.register_demand, found.register_pool) == (512, 512)

    greedy = TWO_ROLES.replace("<40>", "<48>")
    found = toolchain.resources(greedy, sass=False)
    assert found.register_demand == 520
    assert any("520" in problem and "512" in problem for problem in found.problems())


def test_a_register_change_against_its_direction_is_a_problem(fake_nvcc):
    """On an H200 setmaxnreg.dec to more registers than the launch's is an illegal instruction."""
    fake_nvcc(CANNED_REPORT.replace("572", "0").replace("568", "0").replace("(C7512)", ""))
    for right, wrong in (("alloc<136>", "dealloc<136>"), ("dealloc<40>", "alloc<40>")):
        problems = toolchain.resources(TWO_ROLES.replace(right, wrong), sass=False).problems()
        assert len(problems) == 1 and "illegal instruction" in problems[0]


def test_problems_name_spills_and_warnings(fake_nvcc):
    fake_nvcc(CANNED_REPORT)
    problems = toolchain.resources(TWO_ROLES, sass=False).problems()
    assert any("572" in problem for problem in problems)
    assert any("C7512" in problem for problem in problems)

    clean = CANNED_REPORT.replace("572", "0").replace("568", "0").replace("(C7512)", "")
    fake_nvcc(clean)
    assert toolchain.resources(TWO_ROLES, sass=False).problems() == ()


def test_missing_nvcc_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    assert "nvcc" in toolchain.unavailable()
    with pytest.raises(toolchain.MissingToolError, match="nvcc"):
        toolchain.resources(TWO_ROLES)
    with pytest.raises(toolchain.MissingToolError, match="nvcc"):
        toolchain.compile_for_hopper(scaled_copy())


def test_missing_header_is_named(fake_nvcc):
    fake_nvcc("kernel.cu:1:10: fatal error: cute/tensor.hpp: No such file or directory", status=1)
    with pytest.raises(toolchain.MissingToolError, match="cute/tensor.hpp"):
        toolchain.resources(TWO_ROLES)


def test_compiler_failure_carries_its_message(fake_nvcc):
    fake_nvcc("kernel.cu(3): error: identifier 'nothing' is undefined", status=2)
    with pytest.raises(toolchain.ToolchainError, match="identifier 'nothing'"):
        toolchain.resources(TWO_ROLES)


def test_several_functions_need_all_resources(fake_nvcc):
    second = TWO_ROLES.replace("work_kernel", "other_kernel")
    fake_nvcc(CANNED_REPORT + CANNED_REPORT.replace("work_kernel", "other_kernel"))
    with pytest.raises(ValueError, match="work_kernel, other_kernel"):
        toolchain.resources(TWO_ROLES + second, sass=False)
    found = toolchain.all_resources(TWO_ROLES + second, sass=False)
    assert [item.entry for item in found] == ["work_kernel", "other_kernel"]
    assert [len(item.warnings) for item in found] == [1, 1]


def test_generate_needs_no_nvcc(monkeypatch):
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    generated = toolchain.generate(scaled_copy(rows=64, wide=True))
    assert generated.entries == ("scaled_kernel",)
    assert generated.threads["scaled_kernel"] == 128
    assert generated.dynamic_shared_bytes["scaled_kernel"] == 64 * 128 * 4
    assert "scaled_kernel" in generated.host_source


def test_pass_configs_reach_nvcc():
    configs = {"tl.enable_fast_math": True, "tl.device_compile_flags": ["-maxrregcount 40"]}
    flags = toolchain.generate(scaled_copy(), configs).nvcc_flags
    assert flags == ("-maxrregcount", "40", "--use_fast_math")


def test_lowering_failure_is_typed():
    @T.prim_func
    def unlowerable(a: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=96):
            tile_shared = T.alloc_shared((64, 64), "float32")
            product_fragment = T.alloc_fragment((64, 64), "float32")
            T.copy(a, tile_shared)
            T.gemm(tile_shared, tile_shared, product_fragment)
            T.copy(product_fragment, a)

    with pytest.raises(toolchain.ToolchainError, match="lowering for sm_90a failed"):
        toolchain.generate(unlowerable)


@needs_nvcc
def test_real_compilation():
    found = toolchain.resources(scaled_copy())
    assert found.entry == "scaled_kernel"
    assert found.registers > 0 and found.problems() == ()
    assert found.dynamic_shared_bytes == 64 * 64 * 4
    if toolchain.find_disassembler():
        assert found.sass["STS"] > 0 and found.sass["HGMMA"] == 0
        assert found.sass["all"] >= sum(n for k, n in found.sass.items() if k != "all")


@needs_nvcc
def test_real_spills_are_seen():
    """64 live values a thread do not fit into the 32 registers that 2 x 1024 threads leave."""
    found = toolchain.resources(STARVED)
    assert found.registers <= 32
    assert found.spill_store_bytes > 0 and found.spill_load_bytes > 0
    assert any("spills" in problem for problem in found.problems())
    if toolchain.find_disassembler():
        assert found.sass["STL"] > 0 and found.sass["LDL"] > 0


def test_factory_path_errors():
    with pytest.raises(ValueError, match="MODULE:FACTORY"):
        toolchain.load_factory("gdn_prefill.toolchain")
    with pytest.raises(ValueError, match="no module"):
        toolchain.load_factory("gdn_prefill.no_such_module:kernel")
    with pytest.raises(ValueError, match="no callable 'nothing'"):
        toolchain.load_factory("gdn_prefill.toolchain:nothing")


def test_command_prints_one_line(fake_nvcc, capsys):
    fake_nvcc(CANNED_REPORT.replace("work_kernel", "scaled_kernel"))
    status = toolchain.main([f"{__name__}:scaled_copy", "--kwarg", "rows=32"])
    out = capsys.readouterr().out.splitlines()
    assert status == 1  # the canned report has spills
    assert out[0].startswith("scaled_kernel threads=128 regs=128 spill=572/568 smem=8192+3072")
    assert "C7512x1" in out[0]


def test_command_reports_a_bad_factory(capsys):
    assert toolchain.main(["gdn_prefill.toolchain:nothing"]) == 2
    assert "nothing" in capsys.readouterr().err
