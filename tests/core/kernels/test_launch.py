"""The fast launcher gives the results of Triton's own, whatever changes between two launches."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from conftest import seed_all
from dta_kernels.launch import Launcher, ceil_div
from triton_device import DEVICE, interpreter, kernels_run

pytestmark = kernels_run


@triton.jit(do_not_specialize=["count"])
def _kernel(x_in, more_in, y_out, count, stride, factor, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    """Grid (programs, 2): y[program] = sum of its half of x, with ``more`` if there is any."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = index < count
    x = tl.load(x_in + index * stride, mask=exists, other=0.0).to(tl.float32)
    if more_in is not None:
        x += tl.load(more_in + index, mask=exists, other=0.0).to(tl.float32)
    if TWICE:
        x = x * 2
    tl.store(y_out + tl.program_id(0) * 2 + tl.program_id(1), tl.sum(x, 0) * factor + tl.program_id(1))


@pytest.mark.parametrize("twice", [False, True])
def test_every_launch_equals_the_twin(twice):
    generator = seed_all(17 + twice)
    launch = Launcher(_kernel, BLOCK=16, TWICE=twice, num_warps=1)
    dtypes = (torch.float32, torch.float16)
    for attempt in range(30):
        count, stride, begin = int(generator.integers(1, 70)), int(generator.choice([1, 2, 16])), attempt % 3
        dtype, factor = dtypes[int(generator.integers(2))], float(generator.normal())
        storage = torch.randn(begin + count * stride, device=DEVICE).to(dtype)
        x = storage[begin:]  # begins at any address
        more = torch.randn(count, device=DEVICE) if generator.random() < 0.5 else None
        x = torch.nn.Parameter(x) if generator.random() < 0.3 else x
        programs = ceil_div(count, 16)
        actual = torch.full((programs, 2), float("nan"), device=DEVICE)
        launch((programs, 2), x, more, actual, count, stride, factor)
        rows = torch.nn.functional.pad(x.detach()[::stride].double() + (0 if more is None else more), (0, -count % 16))
        sums = rows.view(programs, 16).sum(1) * (2 if twice else 1) * factor
        torch.testing.assert_close(actual.double(), torch.stack([sums, sums + 1], 1), rtol=1e-5, atol=1e-4)


def test_what_it_does_not_know_is_launched_ordinarily():
    launch = Launcher(_kernel, BLOCK=16, TWICE=False)
    x, out = torch.ones(16, device=DEVICE), torch.zeros(1, 2, device=DEVICE)
    for count in (16, 2**40):
        launch((1, 2), x, None, out, count, 1, 0.5)
        assert out.tolist() == [[8.0, 9.0]]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter has no binaries")
def test_a_binary_is_found_again_and_a_profiler_is_told(monkeypatch):
    launch = Launcher(_kernel, BLOCK=16, TWICE=False)
    if not launch._is_quick:
        pytest.skip(f"not tried with Triton {triton.__version__}")
    x, out = torch.ones(64, device=DEVICE), torch.zeros(2, 2, device=DEVICE)
    for count in (3, 5, 32, 7):
        launch((2, 2), x, None, out, count, 1, 1.0)
    assert len(launch._binaries) == 1
    launch((2, 2), x[1:], None, out, 3, 1, 1.0)
    assert len(launch._binaries) == 2
    ordinary, told = [], []
    monkeypatch.setattr(launch, "_kernel", type("Noted", (), {"__getitem__": lambda _, grid: _note(ordinary, grid)})())
    launch((2, 2), x, None, out, 9, 1, 1.0)
    assert not ordinary
    hook = told.append
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch((2, 2), x, None, out, 9, 1, 1.0)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert told
    assert ordinary == [(2, 2)]


def _note(launches: list, grid: tuple[int, ...]):
    launches.append(grid)
    return _kernel[grid]


@triton.jit
def _parting_kernel(counts_in, sums_io, arrived, last_out, PROGRAMS: tl.constexpr):
    """Grid (programs): each adds to its sum in place, a different number of times; the last adds them all."""
    program = tl.program_id(0)
    sum_at = sums_io + program
    tl.store(sum_at, tl.load(sum_at) + 1)
    count = tl.load(counts_in + program)
    if count > 0:
        for number in tl.range(program, program + count):
            tl.store(sum_at, tl.load(sum_at) + number)
    if tl.atomic_add(arrived, 1) == tl.num_programs(0) - 1:
        index = tl.arange(0, PROGRAMS)
        tl.store(last_out, tl.sum(tl.load(sums_io + index, mask=index < tl.num_programs(0), other=0), 0))


@interpreter
def test_programs_that_the_interpreter_runs_at_once_go_their_ways():
    programs = 300
    counts = torch.from_numpy(seed_all(23).integers(0, 6, programs))
    sums, arrived, last = torch.arange(programs), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    _parting_kernel[(programs,)](counts, sums, arrived, last, PROGRAMS=512)
    expected = [p + 1 + sum(range(p, p + count)) for p, count in enumerate(counts.tolist())]
    assert sums.tolist() == expected
    assert (int(arrived), int(last)) == (programs, sum(expected))
