"""Rollouts: one typed record, read from JSONL, Parquet and npz, checked in full before anything is trained.

The fields of a record, which are the keys of a JSON line and the columns of a Parquet file; T is the number of tokens:

    field           type         required  meaning
    token_ids       int [T]      yes       token ids as sampled, prompt included; 0 <= id < vocabulary
    loss_mask       bool [T]     yes       true (or 1) where the token is trained; false (or 0) at the first token
    reward          float        *         reward of the whole trajectory, finite
    advantages      float [T]    *         advantage per token; replaces the one computed from the rewards of the group
    logprobs        float [T]    no        the sampler's logprob of each token given those before it (what stands at
                                           untrained tokens is not used, and is read as 0)
    group_id        string       **        rollouts of one prompt, whose rewards are compared
    trajectory_id   string       no        samples cut from one trajectory: its reward counts once in the group
    policy_version  int          no        version of the weights that sampled it, from 0
    segment_ends    int [D]      no        of a sampled tree: where each node on the path ends, the prompt first, T last
    branches        int [D]      with it   which child of its parent each of those nodes is, 0 for the prompt: rollouts
                                           of a group whose branches begin alike share these nodes
    segment_rewards float [D]    no        reward received at the end of each node; together they are ``reward``
    leaf_weight     float        no        probability of this leaf in a walk down the tree (product of 1 / children);
                                           0 where it does not count in unbiased means
    fallback        bool         no        whether the leaf was grown after its query had run out of paths

    *  policy-gradient objectives need one of the two; supervised training needs neither.
    ** required where there is a reward and no advantages.

A field that is null counts as left out. An unknown field, a wrong type, NaN or an infinity, arrays of different lengths
or a record without a trained token stop the run with the file, the row, the field and the reason. A line of JSONL:

    {"token_ids": [5, 8, 13], "loss_mask": [false, false, true], "reward": 1.0, "group_id": "a"}

``examples/rollouts.example.jsonl`` holds a few. ``load_rollouts`` reads, ``write_rollouts`` writes.
"""

from megatron_dta.rollouts.load import load_rollouts, write_rollouts
from megatron_dta.rollouts.record import FIELD_NAMES, Rollout
from megatron_dta.rollouts.sample_granularity import cut_length, cut_turns, mask_runs

__all__ = ["FIELD_NAMES", "Rollout", "cut_length", "cut_turns", "load_rollouts", "mask_runs", "write_rollouts"]
