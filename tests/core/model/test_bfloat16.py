"""bfloat16 training: tree gradients are as close to float32 as dense ones."""

from dataclasses import replace

import numpy as np

from hybrid_cases import HYBRID
from precision import tree_over_dense


def test_a_hybrid_tree_is_as_near_to_float32_as_a_dense_one():
    """In the median, because in some batches a few tokens make nearly all of both distances."""
    heads = replace(HYBRID["mixer"], linear_key_head_dim=16, linear_value_head_dim=16)
    sizes = dict(hidden_size=64, ffn_hidden_size=96, kv_channels=16, mixer=heads)
    ratios = tree_over_dense(range(70, 73), count=12, **HYBRID | sizes)
    print(f"distance of the tree over dense: {ratios}")
    assert 0.9 < np.median(ratios) <= 1.01
