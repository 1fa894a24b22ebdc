"""Trains the critic of PPO with its own model, optimizer and engine, on the plans of the policy.

The critic is sharded over the ranks like the policy and takes one optimizer step for each step of the policy. It is
saved in the same checkpoints, under names that begin with ``critic.``. It starts from the policy's weights with a
random value head, or from ``--critic-load``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

from megatron_dta.core.config.model import without_lora
from megatron_dta.core.engine import TreeBatch, TreeEngine
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.staged_model import Model
from megatron_dta.core.objectives.registry import make_value_objective
from megatron_dta.core.objectives.value import explained_variance
from megatron_dta.training.checkpoint.files import required_checkpoint
from megatron_dta.training.checkpoint.frozen_base import base_part
from megatron_dta.training.checkpoint.reader import check_files, read_checkpoint, read_common
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.optimizer.build import TrainingOptimizer

_PREFIX = "critic."
_HEAD = "output_layer.weight"


class Critic:
    """The critic's model, optimizer and engine.

    Attributes:
        engine: runs on the critic's weights; its ``compute_logprobs`` returns values.
    """

    def __init__(self, config: TrainConfig, model: Model) -> None:
        settings = config.optimization
        lr = settings.lr if config.critic.critic_lr is None else config.critic.critic_lr
        optimization = replace(settings, lr=lr, min_lr=min(settings.min_lr, lr))
        self.model, self.optimizer = model, TrainingOptimizer(model, optimization, config.parallel)
        self.engine = TreeEngine(self.optimizer.chunks, tree_attention_impl=config.tree.tree_attention_impl)
        self.engine.offload_kv(config.tree.kv_offload_fraction)
        self._objective = make_value_objective(config.critic.value_clip or None)

    def train(self, batch: TreeBatch) -> dict[str, float | bool]:
        """Run one optimizer step on the policy's batch and return its metrics."""
        self.optimizer.zero_grad()
        result = self.engine.forward_backward(batch, self._objective)
        loss = float(result.loss)
        outcome = self.optimizer.step(loss)
        means = {name: float(value) for name, value in result.metrics.items()}
        return {
            "value_loss": loss,
            "value": means["value"],
            "return": means["return"],
            "value_clip_fraction": means["value_clip_fraction"],
            "explained_variance": explained_variance(means),
            "critic_grad_norm": outcome.grad_norm,
            "critic_learning_rate": outcome.learning_rate,
            "critic_skipped": not outcome.applied,
            # Only critics with experts have these losses, with the same coefficients as the policy.
            **{f"critic_{name}": means[name] for name in ("seq_load_balancing_loss", "z_loss") if name in means},
        }

    def sharded_state_dict(
        self, is_loading: bool = False, with_optimizer: bool = True, fully_parallel: bool = False
    ) -> dict[str, Any]:
        """The critic's part of a checkpoint."""
        model_state = self.model.sharded_state_dict()
        state = {"model": model_state}
        if with_optimizer:
            state |= self.optimizer.sharded_state_dict(model_state, is_loading, fully_parallel)
        add_prefix_for_sharding(state, _PREFIX)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the critic from its part of a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state)


def build_critic_model(config: TrainConfig, policy: Model, device: torch.device, resumes: bool) -> Model:
    """Build the critic's model with its initial weights; if the run ``resumes``, a checkpoint replaces them later."""
    # All weights of the critic are trained, even if the policy trains only adapters.
    model = build_model(without_lora(config.model), device, config.parallel, value_head=True)
    folder = config.critic.critic_load
    if resumes:
        return model
    if folder is None:
        _load_trunk(model, {str(i): base_part(chunk.state_dict()) for i, chunk in enumerate(policy.model_chunks)})
        return model
    path = required_checkpoint("--critic-load", folder)
    check_files(path, not config.checkpoint.skip_checkpoint_checks)
    wanted = {str(i): chunk.sharded_state_dict() for i, chunk in enumerate(model.model_chunks)}
    if "critic" in read_common(path):
        add_prefix_for_sharding(wanted, _PREFIX)
    else:
        for chunk in wanted.values():
            chunk.pop(_HEAD, None)
    _load_trunk(model, read_checkpoint(path, wanted))
    return model


def _load_trunk(model: Model, states: dict[str, dict[str, Any]]) -> None:
    """Load each model chunk's weights. A value head that is missing or of another shape keeps its initial values."""
    for i, chunk in enumerate(model.model_chunks):
        initial, saved = chunk.state_dict(), dict(states[str(i)])
        state = {name: value for name, value in saved.items() if not name.startswith("output_layer.")}
        if _HEAD in initial:
            fits = _HEAD in saved and saved[_HEAD].shape == initial[_HEAD].shape
            state[_HEAD] = saved[_HEAD] if fits else initial[_HEAD]
        chunk.load_state_dict(state)
