"""GRPO on prefix trees in one screen, with the library and without the trainer.

    python examples/grpo_on_trees.py [ROLLOUTS] [--steps 20] [--mode dta|packed|dense]

Shows how to put the tree engine into a training loop of your own: build a model, load rollouts, plan a step, run it
forward and backward with your own loss function, and update with any optimizer. ROLLOUTS is a JSONL, Parquet or .npz
file of rollouts with rewards (default: the example file next to this script).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core import (
    LossFields,
    ModelConfig,
    Objective,
    TokenLosses,
    TrainingSample,
    TreeConfig,
    TreeEngine,
    build_model,
    group_advantages,
    initialize_parallel,
    load_rollouts,
    prepare_batch,
)

EXAMPLE = Path(__file__).with_name("rollouts.example.jsonl")


def clipped_loss(logprobs_T: Tensor, entropy_T: Tensor, fields: LossFields) -> TokenLosses:
    """PPO's clipped surrogate, written for one sequence; the engine calls it and knows nothing of its formula.

    Values where ``loss_mask`` is False may be anything, NaN too, so they are replaced before any arithmetic.
    """

    def trained(values_T: Tensor) -> Tensor:
        return torch.where(fields.loss_mask, values_T, 0.0)

    advantages_T = trained(fields.advantages)
    ratio_T = torch.exp(trained(logprobs_T) - trained(fields.old_logprobs))
    loss_T = -torch.minimum(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.2) * advantages_T)
    clipped_T = ((ratio_T - 1).abs() > 0.2).float()
    return TokenLosses(trained(loss_T), metrics={"clip_fraction": trained(clipped_T).detach()})


def load_samples(path: str) -> list[TrainingSample]:
    """Rollouts with advantages: those of the file where it has them, else rewards normalised within their group."""
    rollouts = load_rollouts(path, require=("reward|advantages",))
    scored = [rollout for rollout in rollouts if rollout.advantages is None]
    by_group = group_advantages(
        [rollout.reward for rollout in scored],
        [rollout.group_id for rollout in scored],
        [rollout.trajectory_id for rollout in scored],
    )
    computed = iter(by_group)
    samples = []
    for rollout in rollouts:
        advantages = rollout.advantages
        if advantages is None:
            advantages = np.full(len(rollout.token_ids), next(computed))
        samples.append(TrainingSample(rollout.token_ids, rollout.loss_mask, advantages))
    return samples


def small_model(samples: list[TrainingSample]) -> ModelConfig:
    """A Qwen3-like model of a few thousand parameters with random weights, for the tokens of ``samples``."""
    return ModelConfig(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        qk_layernorm=True,
        swiglu=True,
        disable_bias_linear=True,
        vocab_size=1 + max(int(sample.token_ids.max()) for sample in samples),
        max_position_embeddings=max(len(sample.token_ids) for sample in samples),
    )


def main() -> None:
    """Train on the file and print a line a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rollouts", nargs="?", default=str(EXAMPLE))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mode", choices=("dta", "packed", "dense"), default="dta", help="which forest is trained")
    arguments = parser.parse_args()

    samples = load_samples(arguments.rollouts)
    # 1. The model: Megatron's GPTModel with tree attention. This starts a process group of one process; under torchrun
    #    it is given a ParallelConfig and divides the model over the processes.
    device = initialize_parallel(seed=1)
    model = build_model(small_model(samples), device)
    engine = TreeEngine(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # 2. The plan: one forest of prefixes, cut into segments. It depends on tokens and masks alone, so every pass over
    #    these samples uses it. "token-mean" divides the loss by the number of trained tokens.
    tree = TreeConfig(tree_mode=arguments.mode, tree_segment_tokens=2048)
    batch = prepare_batch(samples, tree, loss_aggregation="token-mean")

    # 3. Logprobs of the policy that the update starts from, by a pass without gradients over the same plan.
    batch = batch.with_fields(old_logprobs=engine.compute_logprobs(batch))

    objective = Objective("clipped", clipped_loss, is_policy_gradient=True)
    for step in range(1, arguments.steps + 1):
        # 4. Forward and backward: gradients are those of every sequence trained alone, added up.
        optimizer.zero_grad()
        result = engine.forward_backward(batch, objective)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # 5. Any optimizer: the engine left ordinary gradients in ``parameter.grad``.
        optimizer.step()
        print(
            f"step {step:3d}  loss {float(result.loss):+.5f}  gradient norm {float(norm):.4f}  "
            f"clipped {float(result.metrics['clip_fraction']):.3f}  "
            f"{result.sequence_tokens} tokens in {result.computed_tokens} computed"
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_entry_point(main)
