"""What the machine is: the device's slug, its datasheet ceilings, clocks, attached profilers.

Only queries: clocks and power are read, never set.
"""

import functools
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

import torch

CPU = "cpu"
CLOCK_FIELDS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "temperature.gpu",
    "clocks_event_reasons.active",
)
# Set by nsys, ncu and compute-sanitizer in the processes they start.
PROFILER_VARIABLES = (
    "NV_NSIGHT_INJECTION",
    "NV_COMPUTE_PROFILER",
    "NV_SANITIZER",
    "NSYS_PROFILING_SESSION_ID",
    "QUADD_INJECTION",
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
    "GDN_PROFILING",
)
# A clock is measured to about 1 %: from this share of the fastest on, it counts as the fastest.
FULL_CLOCK = 0.97
_PRELOADED = re.compile(r"nsight|TreeLauncher|libToolsInjection|sanitizer-collection", re.I)


@dataclass(frozen=True)
class Ceilings:
    """Datasheet rates: bytes of HBM a second, dense bf16 floating-point operations a second."""

    bytes_per_s: float
    flops_per_s: float


# 4.8 TB/s by the datasheet; 132 SMs x 4096 bf16 FLOP a cycle at the boost clock of 1.98 GHz.
H200 = Ceilings(bytes_per_s=4.8e12, flops_per_s=1070e12)


def slug(name: str) -> str:
    """A device name as a folder name: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def pick_device() -> torch.device:
    """The first GPU if torch sees one, else the CPU."""
    return torch.device("cuda:0" if torch.cuda.is_available() else CPU)


def device_slug(device: torch.device) -> str:
    """The slug under which results and baselines of `device` are kept."""
    return slug(torch.cuda.get_device_name(device)) if device.type == "cuda" else CPU


def ceilings(device: torch.device) -> Ceilings | None:
    """Rates that no honest result on `device` can exceed; None where none are known.

    The H200 is the fastest of the Hopper family (compute capability 9.0), so its rates bound
    every member, slices of one included.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        return H200
    return None


def attached_profiler(environment: Mapping[str, str] = os.environ) -> str | None:
    """The environment variable that shows that a profiler started this process, or None.

    GDN_PROFILING=1 says so by hand, for tools that leave no trace there.
    """
    for variable in sorted(environment):
        if variable.startswith(PROFILER_VARIABLES) and environment[variable]:
            return variable
    return "LD_PRELOAD" if _PRELOADED.search(environment.get("LD_PRELOAD", "")) else None


def why_untimed(device: torch.device) -> str | None:
    """Why nothing is timed here, in words; None where times are taken."""
    if device.type != "cuda":
        return "no GPU: torch.cuda is not available, so correctness is checked and nothing timed"
    profiler = attached_profiler()
    if profiler:
        return f"a profiler is attached ({profiler} is set), so launches run and are not timed"
    return None


def query_clocks() -> dict[str, str]:
    """Clocks, power, temperature and throttling reasons by nvidia-smi; {} where it is not there."""
    command = ["nvidia-smi", f"--query-gpu={','.join(CLOCK_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.strip().splitlines()[0].split(", ")
    return dict(zip(CLOCK_FIELDS, values, strict=False))


@functools.cache
def max_sm_mhz() -> float | None:
    """The fastest clock of the SMs, in MHz; None where nvidia-smi does not tell."""
    try:
        return float(query_clocks()["clocks.max.sm"].split()[0])
    except (KeyError, ValueError, IndexError):
        return None


def throttled(clock_mhz: float | None) -> str | None:
    """What to say of a time taken at that SM clock; None if it was the fastest or is not known."""
    fastest = None if clock_mhz is None else max_sm_mhz()
    if fastest is None or clock_mhz >= FULL_CLOCK * fastest:
        return None
    return f"throttled: the SMs ran at {clock_mhz:.0f} MHz, their fastest is {fastest:.0f}"


def software() -> dict[str, str | None]:
    """Versions that a result depends on; None for what is not installed."""
    packages = ("torch", "tilelang", "triton", "fla-core", "flash-qla", "flashinfer-python")
    return {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **{package: _installed(package) for package in packages},
    }


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
