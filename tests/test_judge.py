"""Every adversarial submission is rejected and the honest one is not; the judge's own rules."""

from pathlib import Path

import pytest
import torch

from cases import Case
from harness import judge as judge_module
from harness.check import Status
from harness.judge import CPU_SLACK, GPU_SLACK, _Call, _Record, _Trial, judge
from harness.timing import Plan, Protocol

SUBMISSIONS = Path(__file__).parent / "submissions"
TINY = Case("tiny", 1, 193, 2, 4, True, "mixed")
# Takes a CPU so long that being preempted now and then does not hide a kept result.
SLOW = Case("slow", 1, 700, 2, 8, True, "mixed")
# Large enough for the kernel to take longer than a checksum of its inputs.
SMALL = Case("small", 1, 8192, 4, 8, True, "mixed")
PLAN = Plan(warmup=10, repetitions=12)
CPU = torch.device("cpu")

WRONG, SUSPECT, ERROR = Status.WRONG, Status.SUSPECT, Status.ERROR
EXPECTED = {
    "cached_by_pointer": (WRONG, "output"),
    "cached_by_content": (SUSPECT, "on the same contents"),
    "frozen_arguments": (WRONG, "moved call"),
    "worker_thread": ((WRONG, SUSPECT), ""),
    "patched_timer": (SUSPECT, "it replaced time.perf_counter"),
    "patched_harness": (SUSPECT, "Timer._"),
    "lazy_tensor": (SUSPECT, "output is a Lazy, must be exactly torch.Tensor"),
    "modified_inputs": (Status.INPUT_MODIFIED, "v was changed"),
    "stale_memory": (WRONG, "output"),
    "nan_outputs": (WRONG, "not finite"),
    "warmup_detection": (WRONG, "output"),
    "forged_exit": (ERROR, "ended with exit code 0 before it was done"),
    "forged_messages": (SUSPECT, "spoke to the judge itself"),
    "patched_checker": (WRONG, "output"),
    "precomputed_outside": ((WRONG, SUSPECT), ""),
}
HONEST = ("honest", "honest_cached")
ON_A_GPU = {
    **EXPECTED,
    # The checksum makes the host wait for the device, which the judge's own clock sees as well.
    "cached_by_content": (SUSPECT, ("on the same contents", "the judge's clock saw")),
    "side_stream": (SUSPECT, "the device worked on"),
}


def assert_rejected(outcome, expected):
    """`expected`: a status or several, a part of the reason or several; one of each must fit."""
    statuses, reasons = (one if isinstance(one, tuple) else (one,) for one in expected)
    assert outcome.status in statuses
    assert any(reason in outcome.reason for reason in reasons), outcome.reason
    assert outcome.times_ms == ()


def test_every_submission_has_an_expectation():
    files = {path.stem for path in SUBMISSIONS.glob("*.py")}
    assert files == {*ON_A_GPU, *HONEST}
    assert len(EXPECTED) >= 8


@pytest.mark.parametrize("name", EXPECTED)
def test_rejected_on_a_cpu(name):
    case = SLOW if name in ("cached_by_content", "patched_harness") else TINY
    outcome = judge(SUBMISSIONS / f"{name}.py", case, PLAN, CPU, backend="torch", timeout_s=300)
    assert_rejected(outcome, EXPECTED[name])


@pytest.mark.parametrize("name", HONEST)
def test_honest_passes_on_a_cpu(name):
    outcome = judge(SUBMISSIONS / f"{name}.py", TINY, PLAN, CPU, backend="torch", timeout_s=300)
    assert (outcome.status, outcome.reason, outcome.times_ms) == (Status.PASS, "", ())
    assert (outcome.implementation, outcome.version) == (name, "submission")


def submit(tmp_path, body, timeout_s=300.0):
    """Judges a file with that body on the CPU."""
    path = tmp_path / "mine.py"
    path.write_text(f"import torch\n{body}")
    return judge(path, TINY, Plan(warmup=1, repetitions=4), CPU, "torch", timeout_s)


ENTRY = "def gdn_prefill_forward(q, k, v, g_cumsum, beta, A, initial_state=None):\n    "
RIGHT = (
    "from gdn_prefill import gdn_prefill_forward as compute\n"
    "    o, s = compute(q, k, v, g_cumsum, beta, A, initial_state)\n    "
)


@pytest.mark.parametrize(
    "body, status, reason",
    [
        ("x = 1\n", ERROR, "mine.py defines no function gdn_prefill_forward"),
        ("import no_such_module\n", ERROR, "ModuleNotFoundError: No module named"),
        (f"{ENTRY}raise ValueError('no')\n", ERROR, "ValueError: no (mine.py:3)"),
        (f"{ENTRY}raise SystemExit(0)\n", ERROR, "SystemExit: 0 (mine.py:3)"),
        (f"{ENTRY}return None\n", ERROR, "returned a NoneType"),
        (f"{ENTRY}{RIGHT}return o.float(), s\n", Status.WRONG_DTYPE, "output is torch.float32"),
        (f"{ENTRY}{RIGHT}return o[:, 1:], s\n", Status.WRONG_SHAPE, "output is (1, 192, 4, 128)"),
        (f"import os, signal\n{ENTRY}os.kill(os.getpid(), signal.SIGSEGV)\n", ERROR, "SIGSEGV"),
    ],
)
def test_plain_failures_are_typed(tmp_path, body, status, reason):
    outcome = submit(tmp_path, body)
    assert outcome.status is status
    assert reason in outcome.reason


def test_a_hang_is_a_timeout(tmp_path):
    outcome = submit(tmp_path, f"import time\n{ENTRY}time.sleep(3600)\n", timeout_s=10)
    assert (outcome.status, outcome.reason) == (Status.TIMEOUT, "not done within 10 s")


LOUD = """
import os, subprocess, sys
print("printed")
print("no newline\\rPASS \\x1b[2K", file=sys.stderr)
os.write(1, b"raw")
os.write(2, bytes([10, 255, 10]))
subprocess.run(["echo", "from a child"])
subprocess.Popen(["sleep", "5"], start_new_session=True)
"""


def test_what_a_submission_prints_is_marked(tmp_path, capfd):
    """Also where it leaves a process behind that holds its standard error open."""
    assert submit(tmp_path, f"{LOUD}{ENTRY}raise ValueError('no')\n").status is ERROR
    printed = capfd.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert all(line.startswith("submission: ") for line in lines), printed.err
    said = {line.removeprefix("submission: ") for line in lines}
    assert {"printed", "no newline", "PASS \\x1b[2K", "raw", "\\xff", "from a child"} <= said


def test_a_missing_file_is_an_error_of_the_caller(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.py does not exist"):
        judge(tmp_path / "none.py", TINY, PLAN, CPU)


def doubts(fresh, seen=None, drain=0.0, rewritten=None, untouched=None, slack=CPU_SLACK, count=4):
    """What the judge says of `count` calls of so many ms each, if its own clock saw `seen` ms."""

    def calls(ms, seen_ms=None, drain_ms=0.0):
        return [_Call(ms, drain_ms, ms if seen_ms is None else seen_ms, 0)] * count

    trial = object.__new__(_Trial)
    trial._case, trial._plan, trial._device = TINY, Plan(), CPU
    trial._record = _Record(
        null=calls(0.0, 0.05),
        fresh=calls(fresh, (fresh if seen is None else seen) + 0.05, drain),
        rewritten=calls(fresh if rewritten is None else rewritten),
        untouched=calls(fresh if untouched is None else untouched),
    )
    return trial._doubtful_times(slack)


@pytest.mark.parametrize("slack, ms", [(CPU_SLACK, 20.0), (GPU_SLACK, 0.2)])
def test_times_that_do_not_fit_are_doubted(slack, ms):
    assert doubts(ms, slack=slack) == []
    assert "the judge's clock" in doubts(ms, seen=3 * ms, slack=slack)[0]
    assert "worked on" in doubts(ms, drain=ms, slack=slack)[0]
    assert "(rewritten)" in doubts(ms, rewritten=ms / 4, slack=slack)[0]
    assert "(untouched)" in doubts(ms, untouched=ms / 4, slack=slack)[0]


def test_ordinary_noise_is_not_doubted():
    assert doubts(20.0, seen=22.0, rewritten=15.0, untouched=25.0) == []
    assert doubts(0.05, seen=0.06, drain=0.005, rewritten=0.04, slack=GPU_SLACK) == []


def clock_doubts(clock_mhz, seen_ms=1.5, fastest=1980.0):
    """What the judge says of calls of 1 ms at that clock, which its own clock saw take seen_ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge_module, "max_sm_mhz", lambda: fastest)
        return judge_module._doubtful_clock([_Call(1.0, 0.0, seen_ms, 0, clock_mhz)] * 4)


def test_a_clock_must_fit_the_device_and_what_the_judge_saw():
    assert clock_doubts(None) == clock_doubts(1980.0) == clock_doubts(1200.0) == []
    assert clock_doubts(1200.0, fastest=None) == []
    assert clock_doubts(2500.0) == ["it reports an SM clock of 2500 MHz, the fastest is 1980"]
    # Its spin of 200000 cycles would take 0.8 ms, beside a call of 1 ms in 1.5.
    assert "the judge's clock left no time" in clock_doubts(250.0)[0]
    for none in (0.0, -1.0, float("nan"), float("inf")):
        assert clock_doubts(none) == ["it reports an SM clock that is none"]


def test_a_doubtful_clock_makes_a_trial_suspect(monkeypatch):
    monkeypatch.setattr(judge_module, "_doubtful_clock", lambda calls: [f"{len(calls)} clocks"])
    assert doubts(20.0) == ["4 clocks"]


def test_the_rest_is_behind_checks_and_before_the_warm_up(monkeypatch):
    said = []
    original = judge_module.Channel.send

    def spy(self, kind, payload=(), **fields):
        said.append(kind)
        original(self, kind, payload, **fields)

    monkeypatch.setattr(judge_module.Channel, "send", spy)
    monkeypatch.setattr(judge_module, "rest", lambda device, seconds: said.append(seconds))
    plan = Plan(warmup=3, repetitions=4, rest_s=0.25)
    judge(SUBMISSIONS / "honest.py", TINY, plan, CPU, "torch", 300)
    behind = said.index(0.25)
    assert said[behind - 4 : behind] == ["refresh", "go", "keep", "send"]
    assert said[behind + 1 : behind + 6] == ["refresh", "go", "refresh", "go", "range"]
    assert said.count(0.25) == 1


def test_two_calls_prove_no_kept_result():
    assert doubts(20.0, untouched=5.0, count=2) == []
    assert "the judge's clock" in doubts(20.0, seen=60.0, count=2)[0]


def test_the_child_gets_no_expected_values(monkeypatch):
    jobs = []
    original = judge_module.Channel.send

    def spy(self, kind, payload=(), **fields):
        jobs.append((kind, fields))
        original(self, kind, payload, **fields)

    monkeypatch.setattr(judge_module.Channel, "send", spy)
    judge(SUBMISSIONS / "nan_outputs.py", TINY, PLAN, CPU, "torch", 300)
    assert jobs[0][0] == "job"
    assert set(jobs[0][1]) == {"case", "device", "submission", "protocol", "seeds", "backend"}
    assert {kind for kind, _ in jobs} == {"job", "refresh", "go", "load", "keep", "send"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_rejected_on_a_gpu(name):
    outcome = judge(SUBMISSIONS / f"{name}.py", SMALL, PLAN, torch.device("cuda:0"))
    assert_rejected(outcome, ON_A_GPU[name])


@pytest.mark.gpu
@pytest.mark.parametrize("protocol", list(Protocol))
@pytest.mark.parametrize("name", HONEST)
def test_honest_passes_on_a_gpu(name, protocol):
    plan = Plan(protocol, 10, 30)
    outcome = judge(SUBMISSIONS / f"{name}.py", SMALL, plan, torch.device("cuda:0"))
    assert (outcome.status, outcome.reason) == (Status.PASS, "")
    assert len(outcome.times_ms) == 30
    assert (outcome.clock_mhz is not None) == (protocol is Protocol.GRAPH)
