"""The tasks that the DAS experiment trains at each size, and the stored sets that it replays."""

from __future__ import annotations

from dataclasses import dataclass

from papers.das_parts.runs import CLOCK, EXACT, PLAIN, RIGHT_SHARE, LiveTask

_MODEL = "--vocab-size 16 --swiglu --disable-bias-linear --qk-layernorm"
_ADAM = "--weight-decay 0 --adam-beta2 0.95 --lr-decay-style linear"


@dataclass(frozen=True)
class Scale:
    """Tasks, and the stored sets with the number of problems, samples in an epoch, and epochs."""

    tasks: tuple[LiveTask, ...]
    stored: dict[str, tuple[int, int, int]]


def smallest() -> Scale:
    """Seconds on two CPU cores; the models learn little."""
    tail = LiveTask(
        "long tail",
        base=2,
        digits={6: 3, 12: 1},
        examples=1,
        carelessness=0.1,
        held_out=4,
        solved=64,
        model=f"{_MODEL} --num-layers 1 --hidden-size 32 --num-attention-heads 2 --max-position-embeddings 192 "
        "--tree-segment-tokens 256",
        warmup=f"{_ADAM} --global-batch-size 8 --train-iters 4 --lr 4e-3",
        training=f"{_ADAM} --train-iters 4 --lr 1e-3 --lr-decay-iters 4 --num-steps-per-rollout 2 "
        "--rollout-max-response-len 12 --eval-interval 4",
        batch=2,
        samples=4,
        modes=(PLAIN, CLOCK),
        seeds=1,
        reward=RIGHT_SHARE,
    )
    return Scale((tail,), {"math_qwen25_8x100": (4, 2, 3)})


def small() -> Scale:
    """Minutes on two CPU cores."""
    common = f"{_MODEL} --num-layers 2 --hidden-size 128 --num-attention-heads 4 --rotary-base 100"
    warmup = f"{_ADAM} --global-batch-size 16 --lr 2e-3 --lr-warmup-iters 20 --min-lr 1e-5"
    training = f"{_ADAM} --lr 2e-4 --lr-warmup-iters 4 --num-steps-per-rollout 2"
    columns = LiveTask(
        "scratchpad",
        base=4,
        digits={8: 32},
        examples=2,
        carelessness=0.25,
        held_out=64,
        solved=2400,
        model=f"{common} --max-position-embeddings 192 --tree-segment-tokens 1024",
        warmup=f"{warmup} --train-iters 150",
        training=f"{training} --lr 1e-4 --train-iters 24 --lr-decay-iters 24 --rollout-max-response-len 32 "
        "--eval-interval 8",
        batch=8,
        samples=8,
        modes=(PLAIN, EXACT, CLOCK),
        seeds=1,
    )
    tail = LiveTask(
        "long tail",
        base=4,
        digits={4: 24, 8: 6, 24: 2},
        examples=1,
        carelessness=0.1,
        held_out=64,
        solved=2400,
        model=f"{common} --max-position-embeddings 384 --tree-segment-tokens 1024",
        warmup=f"{warmup} --train-iters 150",
        training=f"{training} --train-iters 24 --lr-decay-iters 24 --rollout-max-response-len 96 --eval-interval 8",
        batch=8,
        samples=8,
        modes=(PLAIN, EXACT, CLOCK),
        seeds=1,
        reward=RIGHT_SHARE,
    )
    return Scale((columns, tail), {"math_qwen25_8x100": (16, 2, 4), "humaneval_codegen16b_100x40": (16, 4, 4)})


def full() -> Scale:
    """One H200: the task of ``examples/scratchpad.sh``, a long tail on a deeper model, and exactness in float32."""
    wide = f"{_MODEL} --hidden-size 1024 --num-attention-heads 8 --num-query-groups 4"
    warmup = f"{_ADAM} --global-batch-size 64 --lr-warmup-iters 20 --min-lr 1e-5"
    training = f"{_ADAM} --lr 1e-5 --lr-warmup-iters 4 --num-steps-per-rollout 2"
    columns = LiveTask(
        "scratchpad",
        base=10,
        digits={24: 128},
        examples=2,
        carelessness=0.1,
        held_out=128,
        solved=16000,
        model=f"{wide} --num-layers 8 --rotary-base 1000 --max-position-embeddings 576 --bf16 "
        "--tree-segment-tokens 8192",
        warmup=f"{warmup} --train-iters 250 --lr 5e-4",
        training=f"{training} --train-iters 32 --lr-decay-iters 32 --rollout-max-response-len 96 --eval-interval 8 "
        "--inference-max-requests 512",
        batch=32,
        samples=16,
        modes=(PLAIN, CLOCK),
        seeds=3,
        deterministic=False,
    )
    tail = LiveTask(
        "long tail",
        base=10,
        digits={8: 96, 24: 24, 96: 8},
        examples=1,
        carelessness=0.02,
        held_out=128,
        solved=8000,
        model=f"{wide} --num-layers 24 --rotary-base 1000 --max-position-embeddings 1536 --bf16 "
        "--tree-segment-tokens 8192",
        warmup=f"{warmup} --train-iters 125 --lr 3e-4",
        training=f"{training} --train-iters 16 --lr-decay-iters 16 --rollout-max-response-len 384 --eval-interval 8 "
        "--inference-max-requests 512",
        batch=32,
        samples=16,
        modes=(PLAIN, CLOCK),
        seeds=1,
        deterministic=False,
        reward=RIGHT_SHARE,
    )
    exact = LiveTask(
        "float32",
        base=4,
        digits={8: 64},
        examples=2,
        carelessness=0.25,
        held_out=128,
        solved=3200,
        model=f"{_MODEL} --num-layers 2 --hidden-size 256 --num-attention-heads 4 --rotary-base 100 "
        "--max-position-embeddings 192 --tree-segment-tokens 2048",
        warmup=f"{_ADAM} --global-batch-size 16 --lr 1e-3 --lr-warmup-iters 20 --min-lr 1e-5 --train-iters 200",
        training=f"{_ADAM} --lr 1e-4 --lr-warmup-iters 4 --num-steps-per-rollout 2 --train-iters 32 "
        "--lr-decay-iters 32 --rollout-max-response-len 32 --eval-interval 16",
        batch=16,
        samples=8,
        modes=(PLAIN, EXACT),
        seeds=1,
    )
    return Scale((columns, tail, exact), {"math_qwen25_8x100": (97, 2, 4), "humaneval_codegen16b_100x40": (100, 8, 5)})
