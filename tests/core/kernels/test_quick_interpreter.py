"""The tests' quick operators against those of Triton's interpreter: values, types and shapes, and what overflows."""

from __future__ import annotations

import operator

import numpy as np
import pytest

pytest.importorskip("triton")

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter as tritons

from conftest import seed_all
from quick_interpreter import make_quick, was_tried
from triton_device import interpreter

DTYPES = {
    "float32": tl.float32, "float64": tl.float64, "float16": tl.float16, "int32": tl.int32, "int64": tl.int64,
    "uint32": tl.uint32, "bool": tl.int1,
}  # fmt: skip
SHAPES = [((), ()), ((4,), ()), ((), (2, 4)), ((4,), (2, 4)), ((2, 1), (1, 4)), ((2, 4), (2, 4))]
if not was_tried():
    pytest.skip("this version of Triton keeps its interpreter", allow_module_level=True)
OWN = tritons.interpreter_semantic
OPERATIONS = {
    operator.add: lambda one, other: OWN.add(one, other, True),
    operator.sub: lambda one, other: OWN.sub(one, other, True),
    operator.mul: lambda one, other: OWN.mul(one, other, True),
    operator.truediv: OWN.truediv,
    operator.and_: OWN.and_,
    operator.or_: OWN.or_,
    operator.lt: OWN.less_than,
    operator.le: OWN.less_equal,
    operator.gt: OWN.greater_than,
    operator.ge: OWN.greater_equal,
    operator.eq: OWN.equal,
    operator.ne: OWN.not_equal,
}
pytestmark = interpreter


@pytest.fixture(autouse=True, scope="module")
def _quick() -> None:
    make_quick()
    tritons._patch_lang(type("Kernel", (), {"__globals__": {"tl": tl}}))


def tensor_of(generator: np.random.Generator, name: str, shape: tuple[int, ...]) -> core.tensor:
    data = generator.integers(0 if name in ("uint32", "bool") else -3, 4, size=shape or 1).astype(name)
    dtype = DTYPES[name]
    return core.tensor(tritons.TensorHandle(data, dtype), core.block_type(dtype, list(shape)) if shape else dtype)


def integers(*values: int) -> core.tensor:
    return core.tensor(
        tritons.TensorHandle(np.array(values, np.int32), tl.int32), core.block_type(tl.int32, [len(values)])
    )


def outcome(compute, one, other) -> tuple:
    try:
        with np.errstate(all="ignore"):
            found = compute(one, other)
    except Exception as error:
        return type(error).__name__, str(error)
    return found.handle.data.tolist(), found.handle.data.dtype, str(found.type), str(found.shape)


@pytest.mark.parametrize("compute", OPERATIONS, ids=lambda compute: compute.__name__)
def test_operators_equal_tritons_own(compute):
    generator = seed_all(5)
    for one_shape, other_shape in SHAPES:
        for name in DTYPES:
            one = tensor_of(generator, name, one_shape)
            others = [tensor_of(generator, other, other_shape) for other in DTYPES]
            for other in [*others, 2, -1, 0.5, True, 2**31, 2**40]:
                expected = outcome(OPERATIONS[compute], one, other)
                assert str(outcome(compute, one, other)) == str(expected), (name, other)
    for number in (3, -2, 0.5):
        other = tensor_of(generator, "float32", (4,))
        expected = outcome(OPERATIONS[compute], number, other)
        if compute in (operator.add, operator.sub, operator.mul, operator.truediv):
            assert str(outcome(compute, number, other)) == str(expected)


@pytest.mark.parametrize("compute", [operator.add, operator.sub, operator.mul], ids=lambda compute: compute.__name__)
def test_overflow_of_int32_fails(compute):
    large = core.tensor(
        tritons.TensorHandle(np.array([2**30, -(2**30)], np.int32), tl.int32), core.block_type(tl.int32, [2])
    )
    other = {operator.add: large, operator.sub: 2**30 + 1, operator.mul: 4}[compute]
    with pytest.raises(AssertionError, match="int32 overflow"):
        compute(large, other)


def test_pointers_move_by_elements():
    numbers = np.arange(12, dtype=np.float64)
    start = core.tensor(
        tritons.TensorHandle(np.array([numbers.ctypes.data], np.uint64), tl.pointer_type(tl.float64)),
        tl.pointer_type(tl.float64),
    )
    offsets = core.tensor(
        tritons.TensorHandle(np.array([3, -1, 7, 0], np.int32), tl.int32), core.block_type(tl.int32, [4])
    )
    places = start + 2 + offsets
    assert str(places.type) == str(OWN.add(start, offsets, True).type)
    assert tl.load(places).handle.data.tolist() == [5, 1, 9, 2]
    found = tl.load(places, mask=offsets > 0, other=0.0)
    assert (found.handle.data.tolist(), found.dtype, found.type.shape) == ([5, 0, 9, 0], tl.float64, (4,))
    assert tl.load(places, mask=offsets > 0, other=4.0).handle.data.tolist() == [5, 4, 9, 4]
