"""Command lines of runs with speculation."""

TREES = "--rollout-method treepo --treepo-segment-length 3 --advantage-estimator treepo"
DATA_PARALLEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 48 --task arithmetic "
    "--arithmetic-max-operand 9 --rollout-batch-size 3 --n-samples-per-prompt 3 --rollout-max-response-len 7 --lr 1e-3 "
    "--rollout-speculation das --old-logprobs recompute --seed 3"
)
