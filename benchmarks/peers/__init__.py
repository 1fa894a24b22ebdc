"""The training step of other projects beside ours, on the same stored rollouts and weights: see ``compare.py``.

workload      rollout sets, model folders and operation counts that all peers share
attention     the varlen attention kernels that TRL's rows run on
trl_rows      TRL's tree rows from its own files, and padding-free rows, on transformers' layers
engine        this project's engine, without flags
blanks        runs of compare.py on several GPUs
worker        measures one peer in a process of its own
"""
