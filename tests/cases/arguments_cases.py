"""Command lines of small runs, on stored and on sampled rollouts."""

from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.config import TrainConfig

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4"
STORED = f"{MODEL} --vocab-size 100 --rollouts a.jsonl --global-batch-size 8"
SAMPLED = f"{MODEL} --task arithmetic"


def parse(line: str) -> TrainConfig:
    return parse_arguments(line.split())
