"""The mask of tree attention as a function that FlashAttention 4 compiles into its kernels.

The library calls it for one pair at a time, with indices as vectors of length 1.
"""

import cutlass
import cutlass.cute as cute
from flash_attn.cute.utils import scalar_to_ssa


@cute.jit
def tree_mask(batch, head, query, key, lengths, tensors):
    """Whether a query sees a key: ``key <= position < key_end[key]``, with the query's position among the keys."""
    position = query + scalar_to_ssa(lengths.seqlen_k - lengths.seqlen_q, cutlass.Int32)
    end = scalar_to_ssa(tensors[0][key[0]], cutlass.Int32)
    return (key <= position) & (position < end)
