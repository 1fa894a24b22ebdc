"""The kernels of gated delta net's convolution and norm in Triton's interpreter, and what they need to be chosen."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from conftest import seed_all
from dta_kernels.recurrence import library, library_settings, reference
from dta_kernels.recurrence.contract import Recurrence
from dta_kernels.recurrence.decode_kernels import convolution_step, recurrence_step
from dta_kernels.recurrence.gated_delta_rule import gated_delta_rule
from dta_kernels.recurrence.head_norms import gated_norm, unit_heads
from dta_kernels.recurrence.short_convolution import PathLayout, short_convolution, short_convolution_gradients
from hybrid_cases import HYBRID, NEMOTRON, NEMOTRON_EXPERTS, spread
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.kernels import choose_recurrence
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_tree
from tree_engine_cases import GRPO, branching_sequences, model_config, tree_config, weights_of
from triton_device import interpreter


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Memory that a kernel must fill starts as NaN."""

    def poisoned(make: Callable, *arguments: object, **options: object) -> torch.Tensor:
        tensor = make(*arguments, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, partial(poisoned, getattr(torch, name)))


@interpreter
@pytest.mark.parametrize("width", [2, 4])
def test_convolution_reads_rows_in_place_and_by_index(width):
    """Runs of several blocks and of one token, below a fork of rows from outside and below each other."""
    generator, before = torch.Generator().manual_seed(width), width - 1
    lengths, C = [37, 1, 1, 40, 3], 150
    N = sum(lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    zero, outside = N + before, list(range(N, N + before))
    ends = [N, bounds[1] - 1, bounds[2] - 1, bounds[1] - 1, -1]  # last row before each run; -1 before a root
    paths = [outside, list(range(37)), [*range(37), 37], list(range(37)), []]
    source, token_row = [], []
    for run, (begin, end) in enumerate(pairwise(bounds)):
        above = [zero] * before + (outside if run else []) + paths[run] if ends[run] >= 0 else [zero] * before
        source += above[len(above) - before :]
        token_row += range(len(source), len(source) + end - begin)
        source += range(begin, end)
    run_end = [end for begin, end in pairwise(bounds) for _ in range(begin, end)]
    plain = PathLayout(*map(torch.tensor, (source, token_row, bounds[:-1], run_end)))
    fused = plain._replace(uses_kernels=True)
    # Rows are columns of a wider product.
    rows = torch.randn(N, C + 11, generator=generator)[:, :C]
    outer, weight = torch.randn(before, C, generator=generator), torch.randn(C, width, generator=generator)
    bias = torch.randn(C, generator=generator)
    actual, expected = (short_convolution(rows, outer, weight, layout, bias) for layout in (fused, plain))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    grad = torch.randn(N, C, generator=generator)
    gradients = (short_convolution_gradients(grad, rows, outer, weight, layout, bias) for layout in (fused, plain))
    for gradient, other in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5)


@interpreter
@pytest.mark.parametrize(("N", "J", "V"), [(9, 3, 20), (1, 1, 128), (0, 2, 16)])
def test_gated_norm_equals_its_formula(N, J, V):
    generator = torch.Generator().manual_seed(N)
    x = torch.randn(N, J, V, generator=generator, requires_grad=True)
    wide = torch.randn(N, J * V + 7, generator=generator, requires_grad=True)
    weight = torch.randn(V, generator=generator, requires_grad=True)
    z = wide[:, : J * V].reshape(N, J, V) if N else torch.zeros(0, J, V, requires_grad=True)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    expected = normed * weight * torch.nn.functional.silu(z)
    actual = gated_norm(x, z, weight, 1e-6)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    grad = torch.randn(actual.shape, generator=generator)
    inputs = (x, wide, weight) if N else (x, z, weight)
    gradients = (torch.autograd.grad(out, inputs, grad) for out in (actual, expected))
    for gradient, other in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)


@interpreter
@pytest.mark.parametrize(("N", "H", "K"), [(9, 3, 20), (1, 1, 128), (0, 2, 16)])
def test_unit_heads_equal_their_formula(N, H, K):
    generator = torch.Generator().manual_seed(N)
    wide = torch.randn(N, H * K + 7, generator=generator, requires_grad=True)
    x = wide[:, : H * K].reshape(N, H, K) if N else torch.zeros(0, H, K, requires_grad=True)
    expected, actual = reference.unit_heads(x), unit_heads(x)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    grad = torch.randn(actual.shape, generator=generator)
    gradient, other = (torch.autograd.grad(out, wide if N else x, grad)[0] for out in (actual, expected))
    torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)


@interpreter
@pytest.mark.parametrize("settings", [HYBRID, NEMOTRON, NEMOTRON_EXPERTS], ids=["delta", "mamba", "experts"])
def test_a_hybrid_model_on_fused_layers_equals_the_plain_one(settings):
    samples = random_training_samples(branching_sequences(seed_all(5), count=6, longest=10), seed=5)
    model = model_config(torch.float32, **settings, fused_layer_impl="reference")
    weights = spread(weights_of(model, seed=5), seed=3)
    tree = tree_config("dta", 9, 0)
    expected, _ = run_tree(model, weights, samples, GRPO, tree)
    actual, _ = run_tree(replace(model, fused_layer_impl="triton"), weights, samples, GRPO, tree)
    errors = compare_outcomes(actual, expected)
    assert errors.largest() < 2e-5, errors


def test_missing_and_old_libraries_are_refused_in_one_line(monkeypatch):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")

    def choose(impl: str, dtype: torch.dtype, device: torch.device) -> Recurrence:
        model = model_config(dtype, **HYBRID, recurrence_impl=impl)
        return choose_recurrence(model, device, gated_delta_rule, "gated_delta_rule")

    assert choose("auto", torch.bfloat16, cpu) is choose("auto", torch.float32, cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for version, spec, triton, message in (
        (None, None, "3.7.1", "fla-core is not installed; install it .*megatron_dta.hybrid.* or give reference"),
        ("0.5.1", None, "3.7.1", "fla-core has version 0.5.1, which is older than 0.6.0; install it"),
        ("0.6.1.dev3", None, "3.6.0+git1234", r"Triton 3\.6\.0.* wrongly for Hopper GPUs; install tilelang, or triton"),
    ):
        monkeypatch.setattr(library, "installed_version", lambda version=version: version)
        monkeypatch.setattr(library, "find_spec", lambda name, spec=spec: spec)
        monkeypatch.setattr(library, "version", lambda name, triton=triton: triton)
        with pytest.raises(InputError, match=message):
            choose("auto", torch.bfloat16, cuda)
    monkeypatch.setattr(library, "version", lambda name: "3.7.1")
    assert choose("auto", torch.bfloat16, cuda) is library.gated_delta_rule
    assert choose("reference", torch.bfloat16, cuda) is not library.gated_delta_rule
    with pytest.raises(InputError, match="recurrence_impl fla needs a CUDA GPU and --bf16; use auto"):
        choose("fla", torch.float32, cuda)


def test_small_values_are_not_tuned_with_settings_that_are_compiled_wrongly_for_hopper(monkeypatch):
    two, four = (SimpleNamespace(num_warps=warps, num_stages=3, kwargs={}) for warps in (2, 4))
    tuner, name = SimpleNamespace(), "chunk_bwd_kernel_dv_local"
    monkeypatch.setattr(library_settings, "tuners", lambda: {name: tuner})
    monkeypatch.setattr(library_settings, "_all_candidates", lambda: {name: [two, four]})
    for sizes, major, left in (((64, 32), 9, [two]), ((64, 64), 9, [two, four]), ((64, 32), 10, [two, four])):
        library_settings.fix_settings.__wrapped__(sizes, (major, 0))
        assert tuner.configs == left


@interpreter
def test_steps_of_decoding_change_the_states_of_their_slots_only():
    """Three tokens behind a state, a sequence that begins (its slot is NaN), and a row without a slot."""
    generator = torch.Generator().manual_seed(8)
    H, J, K, V, W, C = 2, 4, 20, 24, 4, 300
    slots, starts = torch.tensor([2, 0, -1]), torch.tensor([5, 0, 9])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    states, rows, weight = normal(4, J, K, V), normal(4, W - 1, C), normal(C, W)
    states[0], rows[0] = float("nan"), float("nan")
    address = torch.tensor([states.data_ptr(), rows.data_ptr()])
    expected_states, expected_rows = states.clone(), rows.clone()
    expected_states[0], expected_rows[0] = 0.0, 0.0
    for step in range(3):
        # Rows are columns of a wider product.
        wide = normal(3, C + 11)[:, :C]
        q, k, v = normal(3, H * K + 7)[:, : H * K].unflatten(1, (H, K)), normal(3, H, K), normal(3, J, V)
        inputs = q, k, v, -normal(3, J).abs(), normal(3, J).sigmoid()
        filtered = convolution_step(wide, weight, address, slots, starts + step)
        out = recurrence_step(inputs, address, slots, starts + step)
        for row, slot in ((0, 2), (1, 0)):
            expected, expected_rows[slot] = reference.short_convolution_by_token(
                wide[row : row + 1], weight, expected_rows[slot]
            )
            torch.testing.assert_close(filtered[row : row + 1], expected, rtol=1e-5, atol=1e-5)
            row_inputs = [tensor[row : row + 1] for tensor in inputs]
            expected, expected_states[slot] = reference.gated_delta_rule_by_token(*row_inputs, expected_states[slot])
            torch.testing.assert_close(out[row : row + 1], expected, rtol=1e-5, atol=1e-5)
        assert out[2].isfinite().all()
        assert filtered[2].isfinite().all()
    torch.testing.assert_close(states, expected_states, rtol=1e-5, atol=1e-5)
    assert torch.equal(rows, expected_rows)
