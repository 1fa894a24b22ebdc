"""Gated delta rule and Mamba-2 in chunks, and the short convolution along paths, equal token-by-token references."""

from itertools import pairwise

import pytest
import torch

from dta_kernels.recurrence.contract import Runs
from dta_kernels.recurrence.gated_delta_rule import gated_delta_rule, state_space
from dta_kernels.recurrence.reference import gated_delta_rule_by_token, short_convolution_by_token
from dta_kernels.recurrence.short_convolution import PathLayout, short_convolution, short_convolution_gradients

H, J, K, V = 2, 4, 5, 3
# Lengths around the chunk size, one-token runs, and a run of several chunks between short ones.
LENGTHS = [[64], [1, 1, 1], [3, 130, 1, 64, 7], [128, 5, 65]]


def rule_inputs(lengths: list[int], dtype: torch.dtype, strong_decay: float = 1.0) -> list[torch.Tensor]:
    torch.manual_seed(sum(lengths))
    T, R = sum(lengths), len(lengths)
    shapes = [(T, H, K), (T, H, K), (T, J, V), (T, J), (T, J), (R, J, K, V)]
    q, k, v, g, beta, entry = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    g, beta = -strong_decay * torch.nn.functional.softplus(g), beta.sigmoid()
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta, entry)]


def state_space_by_token(c, b, v, g, entry) -> tuple[torch.Tensor, torch.Tensor]:
    state, outputs = entry, []
    for t in range(len(v)):
        key, query = (x[t].repeat_interleave(J // H, dim=0) for x in (b, c))
        state = g[t].exp()[:, None, None] * state + key.unsqueeze(2) * v[t].unsqueeze(1)
        outputs.append((query.unsqueeze(2) * state).sum(1))
    return torch.stack(outputs), state


def by_token(inputs: list[torch.Tensor], lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    *tokens, entry = inputs
    pieces = zip(*(x.split(lengths) for x in tokens), strict=True)
    one = gated_delta_rule_by_token if len(tokens) == 5 else state_space_by_token
    results = [one(*piece, entry[r]) for r, piece in enumerate(pieces)]
    return torch.cat([out for out, _ in results]), torch.stack([state for _, state in results])


@pytest.mark.parametrize("rule", [gated_delta_rule, state_space])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_outputs_exits_and_all_gradients_of_the_rule(lengths, rule):
    inputs = rule_inputs(lengths, torch.float64)
    inputs = inputs if rule is gated_delta_rule else inputs[:4] + inputs[5:]
    out, exits = rule(tuple(inputs[:-1]), inputs[-1], Runs.of_lengths(lengths))
    expected, expected_exits = by_token(inputs, lengths)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(exits, expected_exits, rtol=1e-12, atol=1e-13)
    weights = torch.randn_like(out), torch.randn_like(exits)
    actual = torch.autograd.grad([out, exits], inputs, weights)
    wanted = torch.autograd.grad([expected, expected_exits], inputs, weights)
    for number, (gradient, other) in enumerate(zip(actual, wanted, strict=True)):
        torch.testing.assert_close(gradient, other, rtol=1e-11, atol=1e-12, msg=lambda text, n=number: f"{n}: {text}")
        assert other.abs().max() > 0


def test_strong_decay_overflows_nowhere_and_states_stay_in_float32():
    inputs = [x.detach() for x in rule_inputs([200, 3], torch.bfloat16, strong_decay=40.0)]
    inputs[-1] = inputs[-1].float().requires_grad_()
    inputs[0].requires_grad_()
    out, exits = gated_delta_rule(tuple(inputs[:-1]), inputs[-1], Runs.of_lengths([200, 3]))
    assert (out.dtype, exits.dtype) == (torch.bfloat16, torch.float32)
    gradients = torch.autograd.grad(out.float().sum() + exits.sum(), [inputs[0], inputs[-1]])
    assert all(x.isfinite().all() for x in (out, exits, *gradients))


@pytest.mark.parametrize("width", [2, 4])
def test_convolution_along_paths_and_all_gradients(width):
    """A fork behind two tokens, below it a run of one token with a child of its own, and rows from outside."""
    torch.manual_seed(width)
    C, before = 3, width - 1
    names = "trunk", "short", "below", "sibling", "root"
    runs = {name: range(*bounds) for name, bounds in zip(names, pairwise([0, 2, 3, 8, 9, 12]), strict=True)}
    outside = list(range(12, 12 + before))  # the rows before the trunk
    zero = 12 + before
    fork = [*outside, 0, 1]
    ancestors = {"trunk": outside, "short": fork, "below": [*fork, 2], "sibling": fork}
    source, token_row, paths = [], [], {}
    for name, tokens in runs.items():
        above = ([zero] * before + ancestors.get(name, []))[-before:]
        paths[name] = above
        token_row += [len(source) + before + i for i in range(len(tokens))]
        source += above + list(tokens)
    ends = [tokens.stop for tokens in runs.values() for _ in tokens]
    heads = [tokens.start for tokens in runs.values()]
    layout = PathLayout(*map(torch.tensor, (source, token_row, heads, ends)))
    rows = torch.randn(12 + before, C, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(C, width, dtype=torch.float64, requires_grad=True)
    token_rows, before_rows = rows.detach().split([12, before])
    actual = short_convolution(token_rows, before_rows, weight.detach(), layout)
    padded = torch.cat([rows, rows.new_zeros(1, C)])
    parts = (short_convolution_by_token(rows[list(runs[name])], weight, padded[paths[name]])[0] for name in names)
    expected = torch.cat(list(parts))
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-14)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [rows, weight], grad)
    *of_rows, of_weight, _ = short_convolution_gradients(grad, token_rows, before_rows, weight.detach(), layout)
    for gradient, other in zip((torch.cat(of_rows), of_weight), wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-13)
        assert other.abs().min() > 0


def test_decay_has_an_exact_gradient_in_float32():
    """Sums of strong decay are in the hundreds within a chunk, and only their small differences matter."""
    lengths = [128, 40]
    inputs = rule_inputs(lengths, torch.float32, strong_decay=12.0)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    out, exits = gated_delta_rule(tuple(inputs[:-1]), inputs[-1], Runs.of_lengths(lengths))
    expected, expected_exits = by_token(doubles, lengths)
    weights = torch.randn_like(expected), torch.randn_like(expected_exits)
    (gradient,) = torch.autograd.grad([out, exits], inputs[3], [weight.float() for weight in weights])
    (wanted,) = torch.autograd.grad([expected, expected_exits], doubles[3], weights)
    assert (gradient - wanted).abs().max() < 1e-6 * wanted.abs().max()
