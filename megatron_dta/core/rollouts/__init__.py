"""Rollouts: one typed record, read from JSONL, Parquet and npz files and checked completely before training.

``record.Rollout`` describes the fields, which are the keys of a JSON line and the columns of a Parquet file. Only
``token_ids`` and ``loss_mask`` are always required. Policy-gradient objectives also need ``reward`` or ``advantages``,
and a reward without advantages needs ``group_id``. A null field counts as missing. An unknown field, a wrong type, NaN
or infinity, arrays of different lengths or a record without a trained token stop the run with the file, the row, the
field and the reason. A line of JSONL:

    {"token_ids": [5, 8, 13], "loss_mask": [false, false, true], "reward": 1.0, "group_id": "a"}
"""

from megatron_dta.core.rollouts.load import load_chosen_rollouts, load_rollouts, write_rollouts
from megatron_dta.core.rollouts.record import FIELD_NAMES, Rollout
from megatron_dta.core.rollouts.sample_granularity import cut_length, cut_turns, mask_runs

__all__ = [
    "FIELD_NAMES",
    "Rollout",
    "cut_length",
    "cut_turns",
    "load_chosen_rollouts",
    "load_rollouts",
    "mask_runs",
    "write_rollouts",
]
