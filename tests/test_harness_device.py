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


@pytest.fixture
def fastest(monkeypatch):
    """Makes nvidia-smi say what the fastest clock is."""

    def say(**clocks):
        device.max_sm_mhz.cache_clear()
        monkeypatch.setattr(device, "query_clocks", lambda: clocks)

    yield say
    device.max_sm_mhz.cache_clear()


def test_a_clock_under_the_fastest_is_throttled(fastest):
    fastest(**{"clocks.max.sm": "1980 MHz"})
    assert device.max_sm_mhz() == 1980
    assert device.throttled(1980.0) is device.throttled(1930.0) is device.throttled(None) is None
    assert device.throttled(1710.4) == ("throttled: the SMs ran at 1710 MHz, their fastest is 1980")


@pytest.mark.parametrize("said", [{}, {"clocks.max.sm": "[N/A]"}, {"clocks.max.sm": ""}])
def test_without_a_fastest_clock_nothing_is_throttled(fastest, said):
    fastest(**said)
    assert device.max_sm_mhz() is device.throttled(100.0) is None


@pytest.mark.gpu
def test_the_gpu_is_described():
    gpu = torch.device("cuda:0")
    assert device.device_slug(gpu).startswith("nvidia-")
    assert ceilings(gpu) == device.H200
    assert set(device.query_clocks()) == set(device.CLOCK_FIELDS)
