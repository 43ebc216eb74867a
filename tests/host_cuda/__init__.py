"""Runs the CUDA source that TileLang generates for a kernel on the CPU, thread by thread.

The tile emulator runs a kernel before it is lowered. This runs what nvcc would compile, with a C++
compiler and a small imitation of the device (device.h): layouts, swizzles, addresses and matrix
registers are those of the shipped code. It knows what the preprocessing kernels use, no more.
"""

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from gdn_prefill.toolchain import generate

DEVICE = Path(__file__).with_name("device.h")
FLAGS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-fno-strict-aliasing", "-ffp-contract=off")
SWIZZLE_BYTES = {0: 0, 1: 32, 2: 64, 3: 128}  # CUtensorMapSwizzle


def unavailable() -> str | None:
    """Why kernels cannot be run this way here, or None."""
    if not sys.platform.startswith("linux"):
        return "needs Linux (ucontext)"
    return None if shutil.which("g++") else "g++ is not installed"


class TensorMap(ctypes.Structure):
    """CUtensorMap of device.h; dimensions innermost first."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("element", ctypes.c_int),
        ("swizzle", ctypes.c_int),
        ("extents", ctypes.c_int64 * 5),
        ("strides", ctypes.c_int64 * 5),
        ("box", ctypes.c_int * 5),
    )


class HostKernel:
    """One compiled kernel. ``folder`` receives the source and the library."""

    def __init__(self, prim_func, pass_configs, folder: Path):
        generated = generate(prim_func, pass_configs)
        (self.name,) = generated.entries
        self.threads = generated.threads[self.name]
        self.maps = _tensor_maps(generated.host_source)
        source = generated.device_source
        signature = re.search(rf"__launch_bounds__\([^)]*\) {self.name}\(([^;{{]*)\)", source)
        self.parameters = [part.strip() for part in signature.group(1).split(",")]
        code = self._translation_unit(source)
        stem = f"{self.name}_{hashlib.sha256(code.encode()).hexdigest()[:12]}"
        library = folder / f"{stem}.so"
        (folder / f"{stem}.cpp").write_text(code)
        command = ["g++", *FLAGS, "-o", str(library), str(folder / f"{stem}.cpp")]
        subprocess.run(command, check=True)
        self.library = ctypes.CDLL(str(library))

    def launch(self, blocks: int, seed: int = 0, **arguments) -> None:
        """Run all blocks one after another; ``seed`` draws the order of warps and of their lanes.

        Arguments by the names of the PrimFunc: torch CPU tensors, and ints for scalars and for
        dynamic sizes.
        """
        sizes = {name: value for name, value in arguments.items() if isinstance(value, int)}
        converted = []
        for parameter in self.parameters:
            name = parameter.split()[-1].lstrip("*")
            if name in self.maps:
                converted.append(ctypes.byref(self._tensor_map(name, arguments, sizes)))
            elif isinstance(arguments[name], torch.Tensor):
                converted.append(ctypes.c_void_p(arguments[name].data_ptr()))
            else:
                integer = ctypes.c_int64 if parameter.startswith("int64_t") else ctypes.c_int
                converted.append(integer(arguments[name]))
        self.library.launch(blocks, self.threads, seed, *converted)

    def _translation_unit(self, source: str) -> str:
        body = "\n".join(
            line
            for line in source.splitlines()
            if (not line.startswith("#") or line.startswith("#pragma"))
            and "extern __shared__" not in line
        )
        declared, passed = [], []
        for parameter in self.parameters:
            kind, name = parameter.rsplit(" ", 1)
            if "CUtensorMap" in kind:
                declared.append(f"CUtensorMap* {name}")
                passed.append(f"*{name}")
            else:
                declared.append(parameter)
                passed.append(name)
        return f"""#include "{DEVICE}"
{body}
extern "C" void launch(int blocks, int threads, int seed, {", ".join(declared)}) {{
  std::mt19937 random(seed);
  for (int block = 0; block < blocks; ++block) {{
    blockIdx.x = block;
    run_block(threads, random, [&] {{ {self.name}({", ".join(passed)}); }});
  }}
}}
"""

    def _tensor_map(self, name: str, arguments: dict, sizes: dict[str, int]) -> TensorMap:
        """The map that the generated host code would encode for these arguments."""
        slots = self.maps[name]
        tensor = arguments[slots[3]]

        def value(slot: int) -> int:
            return eval(slots[slot], {"__builtins__": {}}, sizes)  # integers of the host code

        rank = value(2)
        result = TensorMap(tensor.data_ptr(), rank, tensor.element_size())
        for i in range(rank):
            result.extents[i] = value(4 + i)
            result.strides[i] = value(4 + rank + i)
            result.box[i] = value(4 + 2 * rank + i)
        result.swizzle = SWIZZLE_BYTES[value(4 + 4 * rank + 1)]
        return result


def _tensor_maps(host_source: str) -> dict[str, dict[int, str]]:
    """Name of a tensor map -> the expressions of its encoding: 2 rank, 3 tensor, 4... sizes."""
    maps = {}
    for call in re.finditer(r"FunctionCall\(__tvm_tensormap_create_tiled_packed", host_source):
        stores = re.findall(
            r"stack_ffi_any\)\[(\d+)\]\.v_(?:int64|ptr)\) = (.*);", host_source[: call.start()]
        )
        slots = {int(slot): text.replace("(int64_t)", "") for slot, text in stores}
        maps[slots[0]] = slots
    return maps
