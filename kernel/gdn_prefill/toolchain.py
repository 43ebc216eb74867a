"""Compile a TileLang kernel for Hopper without a GPU and read what it costs.

Two stages, both runnable on a machine that has no CUDA device:

* ``generate``   PrimFunc -> CUDA source, host source, dynamic shared memory. Needs tilelang only.
* ``resources``  CUDA source -> nvcc and ptxas -> registers, spills, static shared memory, ptxas
  warnings, SASS opcode counts (these last only where nvdisasm is installed). Needs nvcc.

``compile_for_hopper`` is tilelang's ordinary compilation for the same target; it fills the compile
cache.

    python -m gdn_prefill.toolchain MODULE:FACTORY [--kwarg NAME=VALUE] [--pass-config KEY=VALUE]

prints one dense line for the PrimFunc that FACTORY returns.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import inspect
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import typing
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .lowering import lowering

ARCHITECTURE = "sm_90a"
TARGET: dict[str, str] = {"kind": "cuda", "arch": ARCHITECTURE}

WARP_GROUP = 128
SHARED_MEMORY_LIMIT = 227 * 1024
REGISTER_FILE = 64 * 1024
SASS_OPCODES = ("HGMMA", "HMMA", "LDS", "STS", "LDSM", "STSM", "BAR", "SYNCS", "LDL", "STL")

PassConfigs = Mapping[str, Any]


class ToolchainError(RuntimeError):
    """Lowering, nvcc or ptxas failed; the message carries the end of the tool's output."""


class MissingToolError(ToolchainError):
    """A tool or a header that the request needs is not on this machine; the message names it."""


@dataclasses.dataclass(frozen=True)
class Generated:
    """What tilelang made of one PrimFunc.

    ``entries`` holds the __global__ functions in order of definition; ``threads`` and
    ``dynamic_shared_bytes`` are keyed by entry. ``nvcc_flags`` come from the pass configs.
    """

    device_source: str
    host_source: str
    entries: tuple[str, ...]
    threads: Mapping[str, int]
    dynamic_shared_bytes: Mapping[str, int]
    nvcc_flags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RegisterChange:
    """``groups`` warp groups (those of one role) set their registers a thread to ``registers``.

    ``grows`` tells setmaxnreg.inc from .dec; the wrong one is an illegal instruction.
    """

    registers: int
    groups: int
    grows: bool


@dataclasses.dataclass(frozen=True)
class Resources:
    """Cost of one __global__ function on sm_90a.

    ``setmaxnreg`` holds one RegisterChange for every setmaxnreg instruction, in source order.
    ``dynamic_shared_bytes`` is None where only a CUDA source was given (the host chooses it).
    ``sass`` maps opcode -> count ("all" = every instruction); None without a disassembler.
    """

    entry: str
    threads: int
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int | None
    setmaxnreg: tuple[RegisterChange, ...]
    warnings: tuple[str, ...]
    sass: Mapping[str, int] | None

    @property
    def shared_bytes(self) -> int:
        """Static plus dynamic shared memory, in bytes."""
        return self.static_shared_bytes + (self.dynamic_shared_bytes or 0)

    @property
    def register_pool(self) -> int:
        """Registers of one thread, summed over the warp groups, as the launch grants them."""
        return self.registers * self.threads // WARP_GROUP

    @property
    def register_demand(self) -> int:
        """The same sum once every warp group has executed its setmaxnreg, if it has one."""
        changed = sum(change.groups for change in self.setmaxnreg)
        asked = sum(change.registers * change.groups for change in self.setmaxnreg)
        return asked + (self.threads // WARP_GROUP - changed) * self.registers

    def problems(self) -> tuple[str, ...]:
        """Reasons not to ship this kernel: spills, ptxas warnings, a budget exceeded."""
        found = []
        if self.spill_store_bytes or self.spill_load_bytes:
            found.append(
                f"spills {self.spill_store_bytes} B stored, {self.spill_load_bytes} B loaded"
            )
        found.extend(self.warnings)
        if self.shared_bytes > SHARED_MEMORY_LIMIT:
            found.append(f"shared memory {self.shared_bytes} B exceeds {SHARED_MEMORY_LIMIT} B")
        if self.registers * self.threads > REGISTER_FILE:
            found.append(
                f"{self.registers} registers x {self.threads} threads exceed {REGISTER_FILE}"
            )
        if self.setmaxnreg and self.register_demand > self.register_pool:
            found.append(
                f"setmaxnreg asks for {self.register_demand} registers, summed over the groups, "
                f"of the {self.register_pool} that the launch grants"
            )
        for change in self.setmaxnreg:
            low, high = sorted((self.registers, change.registers))
            if low != high and change.grows != (change.registers == high):
                way = "inc" if change.grows else "dec"
                found.append(
                    f"setmaxnreg.{way} to {change.registers} from the {self.registers} registers "
                    "of the launch is an illegal instruction"
                )
        return tuple(found)

    def line(self) -> str:
        """One dense line for a terminal."""
        dynamic = "?" if self.dynamic_shared_bytes is None else str(self.dynamic_shared_bytes)
        parts = [
            f"{self.entry}",
            f"threads={self.threads}",
            f"regs={self.registers}",
            f"spill={self.spill_store_bytes}/{self.spill_load_bytes}",
            f"smem={dynamic}+{self.static_shared_bytes}",
        ]
        if self.setmaxnreg:
            asked = "/".join(f"{c.registers}x{c.groups}" for c in self.setmaxnreg)
            parts.append(f"setmaxnreg={asked} ({self.register_demand} of {self.register_pool})")
        codes = Counter(re.findall(r"C75\d\d", " ".join(self.warnings)))
        parts.append(
            "warnings=" + (",".join(f"{k}x{n}" for k, n in sorted(codes.items())) or "none")
        )
        if self.sass is None:
            parts.append("sass=unavailable")
        else:
            parts.append(" ".join(f"{k}={n}" for k, n in self.sass.items() if n))
        return " ".join(parts)


# --- tools on the disk
def find_nvcc() -> str | None:
    """Path of nvcc from PATH, CUDA_HOME / CUDA_PATH or tilelang's own search; None if absent."""
    found = shutil.which("nvcc")
    if found:
        return found
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), _tilelang_cuda_home()]
    for root in filter(None, roots):
        candidate = Path(root) / "bin" / "nvcc"
        if candidate.is_file():
            return str(candidate)
    return None


def find_disassembler() -> str | None:
    """Path of nvdisasm from PATH, beside nvcc or the nvidia-cuda-nvdisasm package, or None."""
    found = shutil.which("nvdisasm")
    if found:
        return found
    roots = [Path(entry) / "nvidia" for entry in sys.path if entry]
    nvcc = find_nvcc()
    candidates = [Path(nvcc).resolve().parent / "nvdisasm"] if nvcc else []
    for root in roots:
        candidates.extend(sorted(root.glob("*/bin/nvdisasm")))
    return next((str(path) for path in candidates if path.is_file()), None)


def unavailable() -> str | None:
    """Why ``resources`` cannot run here, in words, or None when it can. Never raises."""
    try:
        _include_flags()
    except MissingToolError as error:
        return str(error)
    if find_nvcc() is None:
        return "nvcc is not installed (looked in PATH, CUDA_HOME and CUDA_PATH)"
    return None


def _tilelang_cuda_home() -> str | None:
    try:
        from tilelang.env import CUDA_HOME
    except ImportError:
        return None
    return CUDA_HOME or None


def _include_flags() -> tuple[str, ...]:
    try:
        from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH
    except ImportError as error:
        raise MissingToolError("tilelang is not installed") from error
    needed = {
        "tilelang's device templates": Path(TILELANG_TEMPLATE_PATH)
        / "tl_templates"
        / "cuda"
        / "common.h",
        "the CUTLASS headers": Path(CUTLASS_INCLUDE_DIR) / "cute" / "tensor.hpp",
    }
    for what, path in needed.items():
        if not path.is_file():
            raise MissingToolError(f"{what} are missing: {path} does not exist")
    return f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}"


# --- compilation
def _normalised(pass_configs: PassConfigs | None) -> dict[str, Any]:
    """Pass configs with plain string keys (tilelang's PassConfigKey members are accepted)."""
    return {str(getattr(key, "value", key)): value for key, value in (pass_configs or {}).items()}


def _quiet_tilelang():
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    try:
        import tilelang
    except ImportError as error:
        raise MissingToolError("tilelang is not installed") from error
    if logging.getLogger("tilelang").level < logging.ERROR:
        tilelang.set_log_level("ERROR")
    return tilelang


def compile_for_hopper(prim_func, pass_configs: PassConfigs | None = None):
    """tilelang.compile for sm_90a, whatever device is here; returns tilelang's kernel object.

    Raises MissingToolError without tilelang or nvcc, ToolchainError when the compilation fails.
    """
    tilelang = _quiet_tilelang()
    if find_nvcc() is None:
        raise MissingToolError("nvcc is not installed (looked in PATH, CUDA_HOME and CUDA_PATH)")
    try:
        with lowering(pass_configs) as configs:
            return tilelang.compile(prim_func, target=TARGET, pass_configs=configs)
    except Exception as error:
        raise ToolchainError(
            f"compilation for {ARCHITECTURE} failed: {_tail(str(error))}"
        ) from error


@contextlib.contextmanager
def _silenced_stderr():
    """The lowering passes print advice from C++, straight to file descriptor 2."""
    sys.stderr.flush()
    kept = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(sink)


def generate(prim_func, pass_configs: PassConfigs | None = None) -> Generated:
    """Lower a PrimFunc to CUDA and host source for sm_90a; no nvcc involved."""
    tilelang = _quiet_tilelang()
    from tilelang import tvm

    try:
        with (
            lowering(_normalised(pass_configs)) as configs,
            _silenced_stderr(),
            tvm.target.Target(TARGET),
            tvm.transform.PassContext(opt_level=3, config=configs),
        ):
            artifact = tilelang.lower(prim_func, target=TARGET, enable_host_codegen=True)
    except Exception as error:
        raise ToolchainError(f"lowering for {ARCHITECTURE} failed: {_tail(str(error))}") from error
    device, host = str(artifact.kernel_source), str(artifact.host_mod.inspect_source())
    entries = _entries(device)
    return Generated(
        device_source=device,
        host_source=host,
        entries=tuple(entries),
        threads=entries,
        dynamic_shared_bytes={name: _dynamic_shared_bytes(name, device, host) for name in entries},
        nvcc_flags=_nvcc_flags(configs),
    )


def _nvcc_flags(configs: Mapping[str, Any]) -> tuple[str, ...]:
    flags: list[str] = []
    extra = configs.get("tl.device_compile_flags") or ()
    for flag in [extra] if isinstance(extra, str) else extra:
        flags.extend(str(flag).split())
    if configs.get("tl.enable_fast_math"):
        flags.append("--use_fast_math")
    level = configs.get("tl.ptxas_register_usage_level")
    if level is not None:
        flags.append(f"--ptxas-options=--register-usage-level={level}")
    return tuple(flags)


_DEFINITION = re.compile(
    r"__global__ void (?:__launch_bounds__\((\d+)[^)]*\) )?(\w+)\([^;{]*\)\s*\{"
)


def _entries(device_source: str) -> dict[str, int]:
    """Name of every __global__ definition -> its launch bound in threads."""
    return {name: int(threads or 0) for threads, name in _DEFINITION.findall(device_source)}


def _body(entry: str, device_source: str) -> str:
    """Text of one __global__ definition, up to the next one."""
    starts = [(match.start(), match.group(2)) for match in _DEFINITION.finditer(device_source)]
    for index, (start, name) in enumerate(starts):
        if name == entry:
            end = starts[index + 1][0] if index + 1 < len(starts) else len(device_source)
            return device_source[start:end]
    raise ToolchainError(f"no __global__ function {entry!r} in the generated source")


def _dynamic_shared_bytes(entry: str, device_source: str, host_source: str) -> int:
    """The host passes it as the last argument of the packed launch, where the kernel has any."""
    if "extern __shared__" not in _body(entry, device_source):
        return 0
    call = re.search(rf"TVMFFIFunctionCall\({entry}_packed, [^,]*, (\d+),", host_source)
    if call is None:
        raise ToolchainError(f"the host source does not launch {entry!r}")
    slot = int(call.group(1)) - 1
    stores = re.findall(
        rf"stack_ffi_any\)\[{slot}\]\.v_int64\) = \(?\(int64_t\)(\d+)\)?;",
        host_source[: call.start()],
    )
    if not stores:
        raise ToolchainError(
            f"the dynamic shared memory of {entry!r} is not a constant in the host source"
        )
    return int(stores[-1])


# --- reading
def resources(kernel, pass_configs: PassConfigs | None = None, *, sass: bool = True) -> Resources:
    """Cost of a kernel with exactly one __global__ function; see ``all_resources``."""
    found = all_resources(kernel, pass_configs, sass=sass)
    if len(found) != 1:
        names = ", ".join(item.entry for item in found)
        raise ValueError(
            f"kernel has {len(found)} __global__ functions ({names}); use all_resources"
        )
    return found[0]


def all_resources(
    kernel, pass_configs: PassConfigs | None = None, *, sass: bool = True
) -> tuple[Resources, ...]:
    """Cost of every __global__ function of a PrimFunc, a ``Generated`` or a CUDA source text.

    Raises MissingToolError where nvcc or a header is absent, ToolchainError where nvcc fails.
    """
    if isinstance(kernel, str):
        generated = Generated(
            kernel,
            "",
            tuple(_entries(kernel)),
            _entries(kernel),
            {},
            _nvcc_flags(_normalised(pass_configs)),
        )
    elif isinstance(kernel, Generated):
        generated = kernel
    else:
        generated = generate(kernel, pass_configs)
    if not generated.entries:
        raise ToolchainError("the source defines no __global__ function")
    with tempfile.TemporaryDirectory(prefix="gdn_toolchain_") as folder:
        cubin = Path(folder) / "kernel.cubin"
        report = _run_nvcc(generated, cubin)
        opcodes = _opcode_counts(cubin) if sass else None
    return tuple(_read(entry, generated, report, opcodes) for entry in generated.entries)


def _run_nvcc(generated: Generated, cubin: Path) -> str:
    includes = _include_flags()
    nvcc = find_nvcc()
    if nvcc is None:
        raise MissingToolError("nvcc is not installed (looked in PATH, CUDA_HOME and CUDA_PATH)")
    source = cubin.with_suffix(".cu")
    source.write_text(generated.device_source)
    command = [
        nvcc,
        "-cubin",
        "-O3",
        f"-arch={ARCHITECTURE}",
        "-std=c++20",
        "--resource-usage",
        "-diag-suppress",
        "20012",
        *includes,
        *generated.nvcc_flags,
        "-o",
        str(cubin),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = done.stdout + done.stderr
    if done.returncode:
        missing = re.search(r"fatal error: (\S+): No such file", report)
        if missing:
            raise MissingToolError(f"header {missing.group(1)} is missing for nvcc ({nvcc})")
        raise ToolchainError(f"nvcc failed with status {done.returncode}: {_tail(report)}")
    return report


def _read(
    entry: str, generated: Generated, report: str, opcodes: Mapping[str, Mapping[str, int]] | None
) -> Resources:
    block = re.search(
        rf"Function properties for {entry}\b(.*?Used \d+ registers[^\n]*)", report, flags=re.DOTALL
    )
    if block is None:
        raise ToolchainError(f"ptxas reported nothing for {entry!r}: {_tail(report)}")
    text = block.group(1)

    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        return int(found.group(1)) if found else 0

    warned = [line for line in report.splitlines() if re.search(r"\(C75\d\d\)|\bC75\d\d\b", line)]
    own = [
        line.strip()
        for line in warned
        if entry in line or not any(e in line for e in generated.entries)
    ]
    body = _body(entry, generated.device_source)
    threads = generated.threads[entry]
    return Resources(
        entry=entry,
        threads=threads,
        registers=number(r"Used (\d+) registers"),
        spill_store_bytes=number(r"(\d+) bytes spill stores"),
        spill_load_bytes=number(r"(\d+) bytes spill loads"),
        static_shared_bytes=number(r"(\d+) bytes smem"),
        dynamic_shared_bytes=generated.dynamic_shared_bytes.get(entry),
        setmaxnreg=_register_changes(body, threads),
        warnings=tuple(own),
        sass=None if opcodes is None else opcodes.get(entry),
    )


_BELOW = re.compile(r"if \(\(\(int\)threadIdx\.x\) < (\d+)\) \{$")
_FROM = re.compile(r"if \((\d+) <= \(\(int\)threadIdx\.x\)\) \{$")


def _register_changes(body: str, threads: int) -> tuple[RegisterChange, ...]:
    """setmaxnreg calls of a generated function, each with the warp groups whose branch it is in.

    Follows the nesting of ``threadIdx.x < N`` branches; any other condition is taken as true.
    """
    found = []
    whole = range(threads)
    stack = [(whole, whole)]
    for line in map(str.strip, body.splitlines()):
        inside = stack[-1][0]
        call = re.match(r"tl::warpgroup_reg_(alloc|dealloc)<(\d+)>", line)
        if call:
            registers, groups = int(call.group(2)), len(inside) // WARP_GROUP
            found.append(RegisterChange(registers, groups, call.group(1) == "alloc"))
        elif line == "} else {":
            _, other = stack.pop()
            stack.append((other, other))
        elif match := _BELOW.match(line):
            bound = min(max(int(match.group(1)), inside.start), inside.stop)
            stack.append((range(inside.start, bound), range(bound, inside.stop)))
        elif match := _FROM.match(line):
            bound = min(max(int(match.group(1)), inside.start), inside.stop)
            stack.append((range(bound, inside.stop), range(inside.start, bound)))
        else:
            stack.extend([(inside, inside)] * (line.count("{") - line.count("}")))
            for _ in range(line.count("}") - line.count("{")):
                stack.pop()
            stack = stack or [(whole, whole)]
    return tuple(found)


def _opcode_counts(cubin: Path) -> dict[str, dict[str, int]] | None:
    """SASS_OPCODES counted in each function of a cubin; None without a working disassembler."""
    tool = find_disassembler()
    if tool is None:
        return None
    done = subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    counts: dict[str, dict[str, int]] = {}
    for section in re.split(r"^\.text\.", done.stdout, flags=re.MULTILINE)[1:]:
        name = section.split(":", 1)[0]
        seen = Counter(
            re.findall(
                r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)",
                section,
                flags=re.MULTILINE,
            )
        )
        counts[name] = {opcode: seen[opcode] for opcode in SASS_OPCODES} | {
            "all": sum(seen.values())
        }
    return counts


def _tail(text: str, lines: int = 12) -> str:
    kept = [line for line in text.strip().splitlines() if line.strip()]
    return "\n".join(kept[-lines:])


# --- command line
def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def load_factory(path: str) -> Callable[..., Any]:
    """``MODULE:FACTORY`` -> the callable. ValueError names what is wrong with the path."""
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ValueError(f"factory {path!r} is not MODULE:FACTORY")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"factory {path!r}: no module {error.name!r}") from error
    if not callable(getattr(module, name, None)):
        raise ValueError(f"factory {path!r}: {module_name} has no callable {name!r}")
    return getattr(module, name)


def build(factory: Callable[..., Any], kwargs: Mapping[str, Any]):
    """Call a PrimFunc factory; where it takes one config dataclass, ``kwargs`` are its fields."""
    parameters = list(inspect.signature(factory).parameters.values())
    if len(parameters) == 1 and parameters[0].name not in kwargs:
        hint = typing.get_type_hints(factory).get(parameters[0].name)
        if dataclasses.is_dataclass(hint):
            return factory(hint(**kwargs))
    return factory(**kwargs)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m gdn_prefill.toolchain``; 0 when the kernel has no ``problems``."""
    parser = argparse.ArgumentParser(
        prog="gdn_prefill.toolchain", description="Cost of one kernel on sm_90a."
    )
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="callable returning a PrimFunc")
    parser.add_argument("--kwarg", metavar="NAME=VALUE", type=_pair, action="append", default=[])
    parser.add_argument(
        "--pass-config",
        metavar="KEY=VALUE",
        type=_pair,
        action="append",
        default=[],
        help="overrides the module's PASS_CONFIGS",
    )
    parser.add_argument(
        "--source", metavar="FILE", type=Path, help="also write the generated CUDA source there"
    )
    options = parser.parse_args(arguments)
    # tilelang logs a failed PrimFunc's whole rewritten body; the exception's message is enough
    logging.disable(logging.CRITICAL)
    try:
        factory = load_factory(options.factory)
        module = sys.modules[options.factory.partition(":")[0]]
        configs = {
            **_normalised(getattr(module, "PASS_CONFIGS", None)),
            **dict(options.pass_config),
        }
        generated = generate(build(factory, dict(options.kwarg)), configs)
        if options.source:
            options.source.write_text(generated.device_source)
        found = all_resources(generated)
    except Exception as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for item in found:
        print(item.line())
        for warning in item.warnings:
            print(f"  {warning}")
    return int(any(item.problems() for item in found))


if __name__ == "__main__":
    sys.exit(main())
