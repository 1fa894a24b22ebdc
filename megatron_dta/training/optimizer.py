"""Megatron's distributed data parallelism, optimizer and schedule around the model, and the step they take together.

Backward passes add to Megatron's gradient buffer, in float32 also for a bfloat16 model. ``step`` then reduces it over
the data-parallel ranks, clips, and updates; a step whose loss or gradient is not finite changes nothing and says so.
"""

from __future__ import annotations

import copy
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
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_dta import cpu_compat
from megatron_dta.config import OptimizationConfig, ParallelConfig
from megatron_dta.config.checks.optimizer_states import DTYPES
from megatron_dta.model import Model
from megatron_dta.training.optimizer_state import keep_owned, owned_state

# Megatron's layout of a distributed optimizer's state that loads on any mesh, gathered on the host.
_RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}

# With ``owned_state`` in the place of what would give all of it to all ranks.
_DIVIDED = {"distrib_optim_fully_reshardable_mem_efficient": False}

# A parameter's state has the same name whether its optimizer is the only one or one of several.
_UNPREFIXED = {"chained_optim_avoid_prefix": True}


@dataclass(frozen=True)
class StepOutcome:
    """What an optimizer step did.

    Attributes:
        applied: False if the step was skipped because the loss or the gradient was not finite, or an outlier.
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
            cpu_compat.collect_states_by(owned_state)
        self.chunks = data_parallel_chunks(model, parallel, in_float32=settings.main_grads_dtype == "fp32")
        optimizer_config = _optimizer_config(settings, model.config.params_dtype, self._is_distributed)
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

    def step(self, loss: float, skip_above: float | None = None) -> StepOutcome:
        """Reduce, check, clip and apply the gradients of all backwards since ``zero_grad``; ``loss`` is their loss.

        A gradient whose norm is above ``skip_above`` is not applied.
        """
        biases = [bias for chunk in self.chunks for name, bias in chunk.named_buffers() if name.endswith("expert_bias")]
        before = [bias.clone() for bias in biases]
        self.reduce_gradients()
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        learning_rate = self.learning_rate
        applied = math.isfinite(loss) and math.isfinite(grad_norm) and (skip_above is None or grad_norm <= skip_above)
        if applied:
            # Megatron's own step prepares and measures again, which changes nothing; it has no way to skip on a NaN.
            self.optimizer.step()
            self.schedule.step(1)
        else:
            # Megatron updates the biases of experts with the reduction of the gradients.
            for bias, value in zip(biases, before, strict=True):
                bias.copy_(value)
        return StepOutcome(applied=applied, grad_norm=grad_norm, learning_rate=learning_rate)

    @property
    def learning_rate(self) -> float:
        """Rate that the next step uses."""
        return float(self.optimizer.param_groups[0]["lr"])

    def sharded_state_dict(
        self, model_state: dict[str, Any], is_loading: bool = False, fully_parallel: bool = False
    ) -> dict[str, Any]:
        """Optimizer and schedule for Megatron's distributed checkpoint; ``model_state`` is the model's part of it.

        An optimizer that has not taken a step has no state, and then no part.

        Args:
            fully_parallel: let all data-parallel ranks have parts of a distributed optimizer's state, not the first.
        """
        state = {"opt_param_scheduler": self.schedule.state_dict()}
        if is_loading and self._is_distributed:
            for optimizer in self._optimizers():
                _make_empty_state(optimizer)
        if is_loading or len(self.optimizer.state):
            divided = fully_parallel and self._is_distributed and not is_loading
            metadata = _UNPREFIXED | (_RESHARDABLE if self._is_distributed else {}) | (_DIVIDED if divided else {})
            found = self.optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)
            found = _without_classes(found)
            state["optimizer"] = keep_owned(found) if divided else found
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a loaded state. Hyperparameters stay those of the command line, only the progress is taken."""
        if "optimizer" in state:
            parts = self._optimizers()
            steps = _steps_in(state["optimizer"])
            for index, optimizer in enumerate(parts):
                loaded = state["optimizer"][index] if len(parts) > 1 else state["optimizer"]
                # One optimizer's state beside those of the several that the checkpoint's mesh had.
                own = {name: value for name, value in loaded.items() if not isinstance(name, int)}
                (_load_distributed if self._is_distributed else _load)(optimizer, own, steps)
        # Megatron's schedule adds the loaded steps to its own.
        self.schedule.num_steps = 0
        self.schedule.load_state_dict(state["opt_param_scheduler"])

    def _optimizers(self) -> list[Any]:
        """Megatron's optimizers: where ranks hold different experts, one for those and one for all else."""
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])


def _steps_in(state: Any) -> list[Any]:
    """Numbers of steps taken, wherever Megatron's optimizers keep them in ``state``: all the same."""
    if isinstance(state, list):
        return [step for part in state for step in _steps_in(part)]
    if not isinstance(state, dict):
        return []
    own = [state[name] for name in ("common_step", "step") if name in state]
    return own + [step for part in state.values() for step in _steps_in(part)]


def _without_classes(state: Any) -> Any:
    """``state`` without the classes that Megatron's offloading optimizer notes in its groups.

    They say nothing of the state, and a file with them cannot be read.
    """
    if isinstance(state, dict):
        return {name: _without_classes(value) for name, value in state.items() if not isinstance(value, type)}
    return [_without_classes(part) for part in state] if type(state) is list else state


def _make_empty_state(optimizer: Any) -> None:
    """Megatron's distributed optimizer reads the number of steps from Adam's state, also before there is one."""
    adam = optimizer.optimizer
    if _counts_in_groups(adam):
        return  # Megatron makes its state as it should be.
    is_hybrid = isinstance(adam, HybridDeviceOptimizer)
    for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
        # With states on the host, these and the master weights belong to the parameter's copy there.
        inner = adam.param_to_inner_param[parameter] if is_hybrid else parameter
        moments = {name: torch.zeros_like(inner) for name in ("exp_avg", "exp_avg_sq")}
        adam.state[parameter] = {"step": torch.tensor(0.0), **moments}
        if is_hybrid:
            adam.state[parameter]["master_param"] = inner
    if is_hybrid:
        adam._sync_hdo_state_to_sub_optimizers()


def _counts_in_groups(adam: Any) -> bool:
    """Whether Adam is Transformer Engine's, which Megatron takes on GPUs wherever that is installed.

    It has one number of steps for each group of parameters, an int, where PyTorch's has a tensor for each parameter.
    """
    return hasattr(adam, "get_unscaled_state")


def _load(optimizer: Any, loaded: dict[str, Any], steps: list[Any]) -> None:
    """Moments and master weights as loaded, the groups with their hyperparameters as they are."""
    # The bfloat16 optimizer keeps Adam's state one level deeper, beside the master weights.
    adam = loaded.get("optimizer", loaded)
    adam["param_groups"] = copy.deepcopy(optimizer.optimizer.state_dict()["param_groups"])
    adam["state"].pop("common_step", None)
    if steps and _counts_in_groups(optimizer.optimizer):
        for group in adam["param_groups"]:
            group["step"] = int(steps[0])
    elif steps:
        adam["state"]["common_step"] = torch.as_tensor(steps[0], dtype=torch.float32)
    optimizer.load_state_dict(loaded)


def _load_distributed(optimizer: Any, loaded: dict[str, Any], steps: list[Any]) -> None:
    """Number of steps first, then weights and moments, which the layout has by parameter.

    With PyTorch's Adam Megatron asks the second part for the number of steps too, which it does not hold, and gives all
    parameters one tensor as their number of steps, which each would then advance.
    """
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["optimizer"]["param_groups"]:
        if steps:
            group["step"] = int(steps[0])
    optimizer.load_state_dict(state)
    of_parameters = list(optimizer.optimizer.state.values())
    taken = [values.pop("step").clone() if "step" in values else None for values in of_parameters]
    optimizer.load_parameter_state_from_fully_reshardable(loaded["param_state"])
    for values, step in zip(of_parameters, taken, strict=True):
        if step is not None:
            values["step"] = step
    if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
        _put_beside_parameters(optimizer.optimizer, steps)


def _put_beside_parameters(hybrid: HybridDeviceOptimizer, steps: list[Any]) -> None:
    """States as loaded, all on the host, to where each one's parameter is updated.

    Megatron tells the two sides apart by their optimizers' class, which is one where only PyTorch's Adam is installed.
    """
    for parameter, values in hybrid.state.items():
        inner = hybrid.param_to_inner_param[parameter]
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value is not inner:
                values[name] = value.to(inner.device)
    if steps and hybrid.gpu_optimizer is not None and _counts_in_groups(hybrid.gpu_optimizer):
        for group in hybrid.gpu_optimizer.param_groups:
            group["step"] = int(steps[0])
    # At every step Megatron writes what its own groups hold over those of both sides: also the loaded number of steps,
    # at which an optimizer that counts in groups would then stay.
    for group in hybrid.param_groups:
        group.pop("step", None)


def data_parallel_chunks(
    model: Model, parallel: ParallelConfig, in_float32: bool = True
) -> list[DistributedDataParallel]:
    """The rank's parts of ``model`` with Megatron's gradient buffers, for the engine.

    Args:
        in_float32: gradients of 16-bit weights in float32; otherwise in the weights' dtype.
    """
    settings = DistributedDataParallelConfig(
        # Exactness tests in float64 keep their gradients in it.
        grad_reduce_in_fp32=in_float32 and model.config.params_dtype != torch.float64,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        bucket_size=parallel.ddp_bucket_size,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
    )
    return [DistributedDataParallel(model.config, settings, part) for part in model.parts]


def _optimizer_config(settings: OptimizationConfig, params_dtype: torch.dtype, is_distributed: bool) -> OptimizerConfig:
    aware, offload = settings.use_precision_aware_optimizer, settings.optimizer_cpu_offload
    config = OptimizerConfig(
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
        use_precision_aware_optimizer=aware and not offload,
        main_grads_dtype=DTYPES["fp32" if offload else settings.main_grads_dtype],
        main_params_dtype=DTYPES[settings.main_params_dtype],
        exp_avg_dtype=DTYPES[settings.exp_avg_dtype],
        exp_avg_sq_dtype=DTYPES[settings.exp_avg_sq_dtype],
        optimizer_cpu_offload=settings.optimizer_cpu_offload,
        optimizer_offload_fraction=settings.optimizer_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=settings.overlap_cpu_optimizer_d2h_h2d,
        pin_cpu_grads=not settings.no_pin_cpu_grads,
        pin_cpu_params=not settings.no_pin_cpu_params,
        use_distributed_optimizer=is_distributed,
    )
    # Master weights as such: the 16 bits beside a bfloat16 weight that Megatron would keep mean nothing without it,
    # so that a checkpoint of them could be read by no other run.
    config.store_param_remainders = False
    if offload:
        # Megatron asks for Transformer Engine's version here, and 0.16 fails where it is not installed,
        # although offloaded states do not need it. What would follow from its answer is set as without it.
        config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        config.main_grads_dtype = DTYPES[settings.main_grads_dtype]
    return config


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
