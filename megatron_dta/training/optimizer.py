"""Megatron's distributed data parallelism, optimizer and schedule around the model, and the step they take together.

Backward passes add to Megatron's gradient buffer, in float32 also for a bfloat16 model. ``step`` then reduces it over
the data-parallel ranks, clips, and updates; a step whose loss or gradient is not finite changes nothing and says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_dta import cpu_compat
from megatron_dta.config import OptimizationConfig, ParallelConfig
from megatron_dta.model import Model

# Megatron's layout of a distributed optimizer's state that loads on any mesh, gathered on the host.
_RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}


@dataclass(frozen=True)
class StepOutcome:
    """What an optimizer step did.

    Attributes:
        applied: False if the step was skipped because the loss or the gradient was not finite.
        grad_norm: norm of the whole gradient before clipping.
        learning_rate: the rate that the step used, or would have.
    """

    applied: bool
    grad_norm: float
    learning_rate: float


class TrainingOptimizer:
    """The model with its gradient buffers, optimizer and learning-rate schedule.

    Attributes:
        chunks: the rank's parts of the model in Megatron's distributed data parallelism, for the engine.
    """

    def __init__(self, model: Model, settings: OptimizationConfig, parallel: ParallelConfig | None = None) -> None:
        parallel = parallel or ParallelConfig()
        self.settings = settings
        self._is_distributed = parallel.use_distributed_optimizer
        if self._is_distributed:
            cpu_compat.place_parameters_of_all_buckets()
        data_parallel = DistributedDataParallelConfig(
            # Exactness tests in float64 keep their gradients in it.
            grad_reduce_in_fp32=model.config.params_dtype != torch.float64,
            overlap_grad_reduce=parallel.overlap_grad_reduce,
            bucket_size=parallel.ddp_bucket_size,
            use_distributed_optimizer=parallel.use_distributed_optimizer,
        )
        self.chunks = [DistributedDataParallel(model.config, data_parallel, part) for part in model.parts]
        optimizer_config = _optimizer_config(settings, model.config.params_dtype)
        optimizer_config.use_distributed_optimizer = parallel.use_distributed_optimizer
        self.optimizer = get_megatron_optimizer(optimizer_config, self.chunks)
        self.schedule = _schedule(self.optimizer, settings)

    def zero_grad(self) -> None:
        """Empty the gradient buffer; call before the step's first backward."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def reduce_gradients(self) -> None:
        """Add up the gradients of the replicas, over a tensor group those of which each rank has a part, and over the
        first and last stage those of a tied embedding.

        Every rank must call this, also one that had nothing to train; ``step`` does.
        """
        finalize_model_grads(self.chunks)

    def step(self, loss: float) -> StepOutcome:
        """Reduce, check, clip and apply the gradients of all backwards since ``zero_grad``; ``loss`` is their loss."""
        self.reduce_gradients()
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        learning_rate = self.learning_rate
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if finite:
            # Megatron's own step prepares and measures again, which changes nothing; it has no way to skip on a NaN.
            self.optimizer.step()
            self.schedule.step(1)
        return StepOutcome(applied=finite, grad_norm=grad_norm, learning_rate=learning_rate)

    @property
    def learning_rate(self) -> float:
        """Rate that the next step uses."""
        return float(self.optimizer.param_groups[0]["lr"])

    def sharded_state_dict(self, model_state: dict[str, Any], is_loading: bool = False) -> dict[str, Any]:
        """Optimizer and schedule for Megatron's distributed checkpoint; ``model_state`` is the model's part of it.

        An optimizer that has not taken a step has no state, and then no part.
        """
        state = {"opt_param_scheduler": self.schedule.state_dict()}
        if is_loading and self._is_distributed:
            self._make_empty_state()
        if is_loading or len(self.optimizer.state):
            metadata = {"metadata": _RESHARDABLE} if self._is_distributed else {}
            state["optimizer"] = self.optimizer.sharded_state_dict(model_state, is_loading=is_loading, **metadata)
        return state

    def _make_empty_state(self) -> None:
        """Megatron's distributed optimizer reads the number of steps from Adam's state, also before there is one."""
        adam = self._distributed().optimizer
        for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            adam.state[parameter] = {"step": torch.tensor(0.0), **moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a loaded state. Hyperparameters stay those of the command line, only the progress is taken."""
        hyperparameters = [
            {name: value for name, value in group.items() if name not in ("params", "step")}
            for group in self.optimizer.param_groups
        ]
        if "optimizer" in state:
            # From 0.19 on Megatron finds a group by its rates too, so the loaded ones take over the command line's. The
            # bfloat16 optimizer keeps its groups one level deeper, beside the master weights.
            loaded = state["optimizer"].get("optimizer", state["optimizer"])
            for group in loaded["param_groups"]:
                group.update(max_lr=self.settings.lr, min_lr=self.settings.min_lr)
            if self._is_distributed:
                self._load_distributed(dict(state["optimizer"]))
            else:
                self.optimizer.load_state_dict(state["optimizer"])
        for group, values in zip(self.optimizer.param_groups, hyperparameters, strict=True):
            group.update(values)
        # Megatron's schedule adds the loaded steps to its own.
        self.schedule.num_steps = 0
        self.schedule.load_state_dict(state["opt_param_scheduler"])

    def _load_distributed(self, state: dict[str, Any]) -> None:
        """Number of steps and hyperparameters first, then weights and moments, which the layout has by parameter.

        With PyTorch's Adam Megatron asks the second part for the number of steps too, which it does not hold, and gives
        all parameters one tensor as their number of steps, which each would then advance.
        """
        optimizer = self._distributed()
        moments = state.pop("param_state")
        del state["param_state_sharding_type"]
        optimizer.load_state_dict(state)
        of_parameters = list(optimizer.optimizer.state.values())
        steps = [values.pop("step").clone() if "step" in values else None for values in of_parameters]
        optimizer.load_parameter_state_from_fully_reshardable(moments)
        for values, step in zip(of_parameters, steps, strict=True):
            if step is not None:
                values["step"] = step

    def _distributed(self) -> Any:
        """Megatron's one distributed optimizer; there are several only where there are experts."""
        (optimizer,) = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return optimizer


def _optimizer_config(settings: OptimizationConfig, params_dtype: torch.dtype) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer=settings.optimizer,
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        bf16=params_dtype == torch.bfloat16,
        params_dtype=params_dtype,
    )


def _schedule(optimizer: Any, settings: OptimizationConfig) -> OptimizerParamScheduler:
    """Learning rate by step number, in Megatron's shapes; the weight decay is constant."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=max(1, settings.lr_decay_iters or settings.train_iters),
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=max(1, settings.train_iters),
        wd_incr_style="constant",
        # The command line decides, not the checkpoint: a run may be continued with another rate.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=settings.lr_wsd_decay_iters,
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
    )
