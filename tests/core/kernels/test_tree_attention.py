"""Tree attention against the plainest possible twin: one softmax per query over the keys on its own root path."""

import pytest
import torch

pytest.importorskip("triton")

import dta_kernels.tree_attention.reference as reference
from conftest import seed_all
from dta_kernels.tree_attention.reference import tree_attention_backward, tree_attention_forward
from tree_attention_cases import random_parents, segment_of


def path_attention(q, k, v, parent, first_query, scale):
    """Query i is stream token first_query + i; keys are the stream's tokens 0 .. M - 1."""
    heads_per_group = q.shape[1] // k.shape[1]
    outputs = []
    for i in range(q.shape[0]):
        path, token = [], first_query + i
        while token >= 0:
            path.append(token)
            token = int(parent[token])
        keys = k[path].repeat_interleave(heads_per_group, dim=1)
        values = v[path].repeat_interleave(heads_per_group, dim=1)
        probabilities = torch.softmax(torch.einsum("hd,mhd->hm", q[i], keys) * scale, dim=-1)
        outputs.append(torch.einsum("hm,mhd->hd", probabilities, values))
    return torch.stack(outputs)


@pytest.mark.parametrize(("seed", "heads", "groups", "head_size"), [(0, 4, 2, 8), (1, 3, 1, 5), (3, 8, 2, 1)])
@pytest.mark.parametrize(("block_elements", "cpu_block"), [(1, 128), (700, 128), (1 << 24, 7)])
def test_forward_and_gradients_equal_attention_over_the_path(
    seed, heads, groups, head_size, block_elements, cpu_block, monkeypatch
):
    monkeypatch.setattr(reference, "SCORE_ELEMENTS", block_elements)
    monkeypatch.setattr(reference, "CPU_BLOCK", cpu_block)
    generator = seed_all(seed)
    size = int(generator.integers(20, 50))
    first_query = int(generator.integers(0, size - 1))
    parent = random_parents(generator, size, turn=0.4)
    end = segment_of(parent, 0, size).key_end
    q = torch.randn(size - first_query, heads, head_size, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(size, groups, head_size, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected = path_attention(q, k, v, parent, first_query, 0.37)
    grad_out = torch.randn_like(expected)
    expected.backward(grad_out)

    index = torch.arange(size)
    arguments = (index[first_query:], index, torch.from_numpy(end), 0.37)
    with torch.no_grad():
        out, lse = tree_attention_forward(q, k, v, *arguments)
        dq, dk, dv = tree_attention_backward(grad_out, q, k, v, out, lse, *arguments)
    for actual, wanted in ((out, expected), (dq, q.grad), (dk, k.grad), (dv, v.grad)):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-13)
