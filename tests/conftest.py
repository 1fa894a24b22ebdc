"""Shared fixtures and hooks: seeds, real rollouts, one torch thread, Triton's interpreter without a GPU."""

import gc
import multiprocessing
import os
import random
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forked
from megatron_dta.wiring.attach import attach_extras
from roomy import call_with_room

REPOSITORY = Path(__file__).resolve().parent.parent
_PROCESS = os.getpid()
LONGEST_FIRST = Path(__file__).parent / "longest_first.txt"
GPU_TESTS = Path(__file__).parent / "gpu"

# Nearly all that imports make stays: looking through it again and again is a fifth of their time.
gc.disable()

attach_extras()

# Triton decides when it is imported whether kernels run in its interpreter, and this file is imported before all tests.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """One server forks xdist's workers and what they start. Few tests of core need it, and CUDA does not survive it."""
    workers = [] if hasattr(config, "workerinput") else getattr(config.option, "tx", None) or []
    if workers and os.environ.get("TRITON_INTERPRET") == "1" and any("tests/core" not in part for part in config.args):
        python = shlex.join([sys.executable, forked.__file__, forked.server_for_others()])
        config.option.tx = [f"{worker}//python={python}" for worker in workers]


def pytest_collection_finish() -> None:
    """Everything is imported: the garbage collector need not look at it again, Triton's interpreter can be patched."""
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        import quick_interpreter

        quick_interpreter.make_quick()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in tests/gpu, and run long files first, in the order of ``longest_first.txt``."""
    for item in items:
        if item.path.parent == GPU_TESTS:
            two = item.get_closest_marker("two_gpus") is not None
            if not two:
                item.add_marker(pytest.mark.gpu)
            if sys.modules["torch"].cuda.device_count() < 1 + two:
                item.add_marker(pytest.mark.skip(reason="needs two CUDA GPUs" if two else "needs a CUDA GPU"))
    places = {line: place for place, line in enumerate(LONGEST_FIRST.read_text().split())}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def pytest_unconfigure() -> None:
    if multiprocessing.parent_process() is None:  # forked ones end without a look at what is left
        gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    call_with_room(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
    return True


def rollout_file(name: str) -> Path:
    """Path of one of the real rollout sets (``tau1_airline_qwen25_3x50.npz``, ...); skips the test where it is missing.

    The folder is the environment variable ``DTA_ROLLOUTS``, by default ``../shared/rollouts`` beside the repository.
    """
    folder = Path(os.environ.get("DTA_ROLLOUTS") or REPOSITORY / ".." / "shared" / "rollouts").resolve()
    path = folder / name
    if not path.is_file():
        pytest.skip(f"no rollout file {path}: set DTA_ROLLOUTS to the folder that holds {name}")
    return path


def seed_all(seed: int) -> np.random.Generator:
    """Seed Python, NumPy and (where imported) torch, print the seed for the failure report, return its generator."""
    if os.getpid() == _PROCESS:  # what a forked program prints is not captured
        print(f"seed {seed}")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    return np.random.default_rng(seed)


def assert_equal_tensors(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same names, with the same values bit for bit."""
    import torch

    assert actual.keys() == expected.keys()
    assert [name for name, values in expected.items() if not torch.equal(actual[name], values)] == []


@pytest.fixture(autouse=True)
def _deterministic_mode_ends_with_the_test() -> Iterator[None]:
    """``--deterministic-mode`` is a setting of the process."""
    yield
    if "torch" in sys.modules and sys.modules["torch"].are_deterministic_algorithms_enabled():
        sys.modules["torch"].use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    """Small operands are faster on one thread, and several test processes then share a machine fairly."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def setup(kind: str, request: pytest.FixtureRequest) -> Iterator[object]:
    """Rollout servers of a ``kind`` and engines on them (``http_engine_cases.Setup``)."""
    from http_engine_cases import Setup

    with ExitStack() as stack:
        yield Setup(stack, kind, seed_all(len(request.node.name)))
