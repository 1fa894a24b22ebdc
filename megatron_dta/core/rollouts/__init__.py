"""Rollouts: one typed record, read from JSONL, Parquet and npz files and checked completely before training.

``record.Rollout`` describes the fields, which are the keys of a JSON line and the columns of a Parquet file. Only
``token_ids`` and ``loss_mask`` are always required. Policy-gradient objectives also need ``reward`` or ``advantages``,
and a reward without advantages needs ``group_id``. A null field counts as missing. An unknown field, a wrong type, NaN
or infinity, arrays of different lengths or a record without a trained token stop the run with the file, the row, the
field and the reason. A line of JSONL:

    {"token_ids": [5, 8, 13], "loss_mask": [false, false, true], "reward": 1.0, "group_id": "a"}
"""
