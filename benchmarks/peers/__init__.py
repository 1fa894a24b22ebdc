"""Other projects beside ours: the training step on the same stored rollouts and weights (``compare.py``), and decoding.

workload      rollout sets, model folders and operation counts that all peers share
attention     the varlen attention kernels that TRL's rows run on
trl_rows      TRL's tree rows from its own files, and padding-free rows, on transformers' layers
engine        this project's engine, without flags
blanks        runs of compare.py on several GPUs
worker        measures one peer in a process of its own
verl_update   verl's passes by its own engines and by ours, in an environment with verl
vllm_decode   vLLM's decoding
"""
