"""The gated delta rule and Mamba-2 by flash-linear-attention on a GPU, against plain PyTorch in float64."""

import pytest
import torch

from dta_kernels.recurrence import library
from dta_kernels.recurrence.contract import Runs
from dta_kernels.recurrence.gated_delta_rule import gated_delta_rule, state_space


def why_skipped() -> str | None:
    if library.installed_version() is None:
        return "needs fla-core (extra hybrid)"
    return library.why_triton_is_wrong(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


pytestmark = pytest.mark.skipif(why_skipped() is not None, reason=why_skipped() or "")


RULES = {"delta": (library.gated_delta_rule, gated_delta_rule), "mamba": (library.state_space, state_space)}


@pytest.mark.parametrize("lengths", [[1], [64, 1, 3], [200, 65, 1, 1, 130]], ids=str)
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("delta", (2, 4, 128, 128)), *(("mamba", sizes) for sizes in ((2, 4, 128, 64), (1, 3, 64, 32), (8, 16, 256, 64)))],
    ids=str,
)
def test_outputs_states_and_gradients_are_within_bfloat16s_own_error(lengths, kind, sizes):
    torch.manual_seed(sum(lengths))
    (H, J, K, V), T, R = sizes, sum(lengths), len(lengths)
    shapes = [(T, H, K), (T, H, K), (T, J, V), (T, J), (T, J), (R, J, K, V)]
    q, k, v, g, beta, entry = (torch.randn(shape, device="cuda") for shape in shapes)
    g, beta = -torch.nn.functional.softplus(g - 3), beta.sigmoid()
    # float32 decay and states, as in the layer.
    rounded = [q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta.bfloat16(), entry]
    rounded = rounded if kind == "delta" else rounded[:4] + rounded[5:]
    runs = Runs.of_lengths(lengths, "cuda")
    results = []
    for rule, dtype in zip(RULES[kind], (None, torch.float64), strict=True):
        inputs = [(x if dtype is None else x.to(dtype)).detach().requires_grad_() for x in rounded]
        out, exits = rule(tuple(inputs[:-1]), inputs[-1], runs)
        assert exits.dtype == (torch.float32 if dtype is None else dtype)
        generator = torch.Generator("cuda").manual_seed(1)
        weights = [torch.randn(x.shape, device="cuda", generator=generator) for x in (out, exits)]
        weights = [w.to(x.dtype) for w, x in zip(weights, (out, exits), strict=True)]
        grads = torch.autograd.grad([out, exits], inputs, weights)
        results.append([out, exits, *grads])
    names = ("out", "exits", "q", "k", "v", "g", *("beta",) * (kind == "delta"), "entry")
    for name, one, other in zip(names, *results, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < 2e-2, (name, float(error))


def test_the_second_run_of_a_call_is_bitwise_that_of_another_call():
    torch.manual_seed(0)
    T, H, J, K = 150, 2, 4, 128
    q, k = (torch.randn(T, H, K, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(T, J, K, device="cuda", dtype=torch.bfloat16)
    g, beta = -torch.rand(T, J, device="cuda"), torch.rand(T, J, device="cuda").bfloat16()
    entry, runs = torch.randn(2, J, K, K, device="cuda"), Runs.of_lengths([100, 50], "cuda")
    before = library.gated_delta_rule((q, k, v, g, beta), entry, runs)
    q[:100] *= 0.5
    after = library.gated_delta_rule((q, k, v, g, beta), entry, runs)
    assert torch.equal(before[0][100:], after[0][100:])
    assert torch.equal(before[1][1], after[1][1])
    assert not torch.equal(before[0][:100], after[0][:100])
