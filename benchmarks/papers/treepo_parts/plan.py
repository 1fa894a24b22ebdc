"""Sizes of the TreePO experiment, and the flags of its methods and ablations.

The task is addition in columns (``examples/scratchpad.py``), which a model learns from scratch: a supervised warm-up on
a careless teacher's solutions, then reinforcement learning. All methods start from the same warmed-up weights, train
with the same loss and learning rate, and end with the rollout batch in which the budget of decoded tokens is reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GRPO, TREES, TREEPO = "GRPO", "GRPO on trees", "TreePO"
# Steps that no run reaches before its budget of tokens.
MOST_STEPS = 1_000_000


@dataclass(frozen=True)
class Scale:
    """Sizes of the experiment.

    Attributes:
        data, model, warmup, training: flags of the task's files, of the model and of both kinds of training.
        response: maximum number of tokens of a response; a right one has about as many.
        width: rollouts of a prompt.
        segment: tokens of a segment.
        batch: prompts of a rollout batch.
        steps: rollout batches of GRPO, which define the budget of decoded tokens.
        ablation_steps: the same for each ablation.
        eval_interval: steps between evaluations.
        methods: compared by their curves.
        seeds: maximum number of seeds of the curves; each has its own order of prompts and sampling.
        shared_start: all seeds have the data and the warmed-up weights of the first one.
        efficiency: flags of ``benchmarks/rollout.py tree``.
        efficiency_segments: segment lengths of the trees there.
        widths, branching_factors: of the trees that answer held-out problems.
        repeats: timed runs of each of them.
    """

    data: str
    model: str
    warmup: str
    training: str
    response: int
    width: int
    segment: int
    batch: int
    steps: int
    ablation_steps: int
    eval_interval: int
    methods: tuple[str, ...]
    seeds: int
    shared_start: bool
    efficiency: str
    efficiency_segments: tuple[int, ...]
    widths: tuple[int, ...]
    branching_factors: tuple[int, ...]
    repeats: int

    @property
    def tokens(self) -> int:
        """The budget of decoded tokens of the curves: ``steps`` batches of rollouts of full length."""
        return self.steps * self.batch * self.width * self.response

    @property
    def ablation_tokens(self) -> int:
        """The budget of an ablation."""
        return self.ablation_steps * self.batch * self.width * self.response


def scale(name: str) -> Scale:
    """The sizes of "smallest", "small" (minutes on two CPU cores) or "full" (one GPU)."""
    return {"smallest": _SMALLEST, "small": _SMALL, "full": _FULL}[name]


_FULL = Scale(
    data="--base 10 --digits 24 --examples 2 --carelessness 0.15 --count 16000 --held-out 128",
    model="--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --num-query-groups 4 "
    "--rotary-base 1000 --max-position-embeddings 576 --bf16 --tree-segment-tokens 8192",
    warmup="--global-batch-size 64 --train-iters 250 --lr 5e-4 --lr-warmup-iters 20 --min-lr 1e-5 "
    "--lr-decay-style linear",
    training="--lr 1e-5 --inference-max-requests 512 --old-logprobs recompute --n-samples-per-eval-prompt 2",
    response=96,
    width=16,
    segment=12,
    batch=32,
    steps=20,
    ablation_steps=12,
    eval_interval=2,
    methods=(GRPO, TREEPO, TREES),
    seeds=10,
    shared_start=True,
    efficiency="--shape 1.7b --batch 128 --queries 32 --width 16 --mean-length 375 --max-length 1792 "
    "--prompt-tokens 128 --runs 1",
    efficiency_segments=(64, 128, 256),
    widths=(1, 4, 16),
    branching_factors=(2, 4, 8),
    repeats=2,
)
_SMALL = Scale(
    data="--base 2 --digits 6 --examples 1 --carelessness 0.4 --count 3200 --prompts 1024 --held-out 64",
    model="--num-layers 2 --hidden-size 64 --num-attention-heads 2 --rotary-base 100 --max-position-embeddings 128 "
    "--tree-segment-tokens 1024",
    warmup="--global-batch-size 16 --train-iters 200 --lr 3e-3 --lr-warmup-iters 20 --min-lr 1e-5 "
    "--lr-decay-style linear",
    training="--lr 2e-4 --n-samples-per-eval-prompt 2",
    response=24,
    width=8,
    segment=4,
    batch=8,
    steps=32,
    ablation_steps=4,
    eval_interval=6,
    methods=(GRPO, TREEPO, TREES),
    seeds=2,
    shared_start=False,
    efficiency="--shape tiny --batch 16 --queries 12 --width 8 --mean-length 24 --max-length 96 --prompt-tokens 16 "
    "--runs 3",
    efficiency_segments=(4, 8, 16),
    widths=(1, 2, 4, 8),
    branching_factors=(2, 4),
    repeats=2,
)
_SMALLEST = Scale(
    data="--base 2 --digits 6 --examples 0 --carelessness 0.3 --count 8 --prompts 64 --held-out 2",
    model="--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 64 "
    "--tree-segment-tokens 64",
    warmup="--global-batch-size 4 --train-iters 2 --lr 1e-3",
    training="--lr 1e-3",
    response=8,
    width=4,
    segment=4,
    batch=2,
    steps=1,
    ablation_steps=1,
    eval_interval=1,
    methods=(GRPO, TREEPO),
    seeds=1,
    shared_start=False,
    efficiency="--shape tiny --batch 4 --queries 2 --width 4 --mean-length 5 --max-length 9 --prompt-tokens 8 --runs 1",
    efficiency_segments=(4,),
    widths=(1, 2),
    branching_factors=(2,),
    repeats=1,
)


def method_flags(chosen: Scale) -> dict[str, str]:
    """The flags by which the methods differ."""
    trees = f"--rollout-method treepo --treepo-segment-length {chosen.segment}"
    return {GRPO: "", TREES: trees, TREEPO: f"{trees} --advantage-estimator treepo"}


@dataclass(frozen=True)
class Ablation:
    """A variant of TreePO: the group of its table, its name and the flags that it adds."""

    group: str
    name: str
    flags: str


def ablations(chosen: Scale) -> list[Ablation]:
    """All variants, without the setting that they vary."""
    result = [Ablation(group, name, flags) for group, variants in _variants(chosen).items() for name, flags in variants]
    return result if chosen is not _SMALLEST else [ablation for ablation in result if ablation.name == "size-weighted"]


def _variants(chosen: Scale) -> Mapping[str, list[tuple[str, str]]]:
    response, width = chosen.response, chosen.width
    half = f"--treepo-segment-length {response // 2}"
    lengths = [chosen.segment * 4, chosen.segment * 2, chosen.segment // 2]
    low, high = (f"--treepo-allocation {name}-logprob" for name in ("low", "high"))
    return {
        "depth x segment": [
            (f"{-(-response // length)} x {length}", f"--treepo-segment-length {length}")
            for length in lengths
            if length < response
        ],
        "branches": [
            ("4 first branches", "--treepo-initial-branches 4"),
            ("2 to 8 first branches", f"--treepo-initial-branches 2 --treepo-initial-branches-max {min(8, width)}"),
            ("branching factor 4", "--treepo-branching-factor 4"),
        ],
        "advantage": [
            ("size-weighted", "--treepo-advantages size-weighted"),
            ("without the root", "--treepo-advantages drop-root"),
            ("without uniform subgroups", "--treepo-advantages reject-zero-variance"),
            ("with leaf weights", "--leaf-weights both"),
            ("REINFORCE++ baseline", "--advantage-estimator reinforce_plus_plus_baseline"),
        ],
        # Of two segments most leaves are grown by fallback.
        f"fallback, 2 x {response // 2}": [
            ("random", half),
            ("none", f"{half} --treepo-fallback none"),
            ("finished paths", f"{half} --treepo-fallback finished"),
        ],
        "allocation": [
            ("low logprob", low),
            ("high logprob", high),
            ("low logprob, 0.05", f"{low} --treepo-allocation-temperature 0.05"),
            ("high logprob, 0.05", f"{high} --treepo-allocation-temperature 0.05"),
        ],
        "segment rewards": [
            ("per segment", "--advantage-estimator treepo_segment"),
            ("per segment, leaf weights", "--advantage-estimator treepo_segment --leaf-weights both"),
            ("per segment, size-weighted", "--advantage-estimator treepo_segment --treepo-advantages size-weighted"),
        ],
    }
