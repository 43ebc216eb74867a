"""Device slugs, attached profilers, reasons for not timing."""

import pytest
import torch

from harness import device
from harness.device import attached_profiler, ceilings, slug, why_untimed


@pytest.mark.parametrize(
    "name, expected",
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA H800 MIG 1g.10gb", "nvidia-h800-mig-1g-10gb"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
    ],
)
def test_slugs(name, expected):
    assert slug(name) == expected


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, None),
        ({"PATH": "/usr/bin", "NV_NSIGHT_INJECTION_PORT_BASE": ""}, None),
        ({"NV_NSIGHT_INJECTION_PORT_BASE": "49152"}, "NV_NSIGHT_INJECTION_PORT_BASE"),
        ({"NSYS_PROFILING_SESSION_ID": "17"}, "NSYS_PROFILING_SESSION_ID"),
        ({"CUDA_INJECTION64_PATH": "/x/libToolsInjection64.so"}, "CUDA_INJECTION64_PATH"),
        ({"LD_PRELOAD": "/opt/nsight-compute/libTreeLauncherPreload.so"}, "LD_PRELOAD"),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so"}, None),
        ({"GDN_PROFILING": "1"}, "GDN_PROFILING"),
    ],
)
def test_profilers_show_in_the_environment(environment, expected):
    assert attached_profiler(environment) == expected


def test_a_cpu_is_untimed_and_has_no_ceilings():
    cpu = torch.device("cpu")
    assert "no GPU" in why_untimed(cpu)
    assert ceilings(cpu) is None
    assert device.device_slug(cpu) == "cpu"


def test_missing_nvidia_smi_means_no_clocks(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert device.query_clocks() == {}


@pytest.mark.gpu
def test_the_gpu_is_described():
    gpu = torch.device("cuda:0")
    assert device.device_slug(gpu).startswith("nvidia-")
    assert ceilings(gpu) == device.H200
    assert set(device.query_clocks()) == set(device.CLOCK_FIELDS)
