"""megatron_dta: exact RL post-training on prefix trees, on Megatron-Core.

Rollouts that share prefixes are laid out as a prefix forest; every shared token goes through the model once, forward
and backward, and the gradient is the one of training each sequence alone. The packages, from the data to the optimizer:

    rollouts    typed records, read from JSONL, Parquet and npz, checked before anything is trained
    tree        the prefix forest of a batch as arrays in depth-first preorder
    planning    segments of the stream, their order of execution, what is kept and what is recomputed
    objectives  advantages and losses, written for one sequence's logprobs
    model       Megatron-Core's GPTModel with the core attention replaced through the layer spec
    engine      runs the plan: forward in preorder, backward in postorder, one path in flight
    sampling    rollouts from the training weights, prompts, tokenizers and rewards
    training    the loop: sample, reward, tree, train, checkpoint
"""

__version__ = "0.1.0"
