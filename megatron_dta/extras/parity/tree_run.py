"""Runs one batch through the tree engine and returns the outcome in the form of the references."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_dta.core.config import ModelConfig, TreeConfig
from megatron_dta.core.engine import StepResult, TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.extras.parity.outcome import Outcome
from megatron_dta.extras.parity.references import Objective


def run_tree(
    model: ModelConfig,
    weights: dict[str, Tensor],
    samples: Sequence[TrainingSample],
    objective: Objective,
    tree: TreeConfig,
    temperature: float = 1.0,
    loss_aggregation: str = "token-mean",
) -> tuple[Outcome, StepResult]:
    """Train ``samples`` on a tree model with ``weights``; the logprobs come from a forward-only pass over the same
    plan.
    """
    tree_model = build_model(model, next(iter(weights.values())).device)
    tree_model.load_state_dict(weights)
    engine = TreeEngine(
        tree_model, temperature, tree.logprob_chunk_tokens, tree_attention_impl=tree.tree_attention_impl
    )
    engine.offload_kv(tree.kv_offload_fraction)
    batch = prepare_batch(samples, tree, loss_aggregation)
    logprobs = engine.compute_logprobs(batch)
    result = engine.forward_backward(batch, objective)
    gradients = {name: p.grad for name, p in tree_model.named_parameters() if p.grad is not None}
    return Outcome(float(result.loss.double()), logprobs, gradients), result
