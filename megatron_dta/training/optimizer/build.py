"""Wraps the model in Megatron's distributed data parallelism, optimizer and schedule, and runs optimizer steps.

Backward passes accumulate into Megatron's gradient buffer, which is float32 by default even for a bfloat16 model.
``step`` reduces the buffer over the data-parallel ranks, clips the gradient and updates the weights. A step whose loss
or gradient is not finite is skipped: it changes nothing and is reported as not applied.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_dta.core.config import ParallelConfig
from megatron_dta.core.model.parallel import megatron_patches
from megatron_dta.core.model.parallel.staged_model import Model
from megatron_dta.training.config import OptimizationConfig
from megatron_dta.training.config.checks.optimizer_states import DTYPES
from megatron_dta.training.optimizer.state import keep_owned, owned_state

# Megatron's checkpoint layout of a distributed optimizer that loads on any mesh; the state is gathered on the host.
_RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}

# Here ``owned_state`` replaces Megatron's function that gathers the whole state on every rank.
_DIVIDED = {"distrib_optim_fully_reshardable_mem_efficient": False}

# A parameter's state keeps the same name with one optimizer and with several chained ones.
_UNPREFIXED = {"chained_optim_avoid_prefix": True}


@dataclass(frozen=True)
class StepOutcome:
    """The result of an optimizer step.

    Attributes:
        applied: False if the step was skipped because the loss or the gradient was not finite, or because the gradient
            norm was an outlier.
        grad_norm: norm of the whole gradient before clipping.
        learning_rate: the rate that the step used, or would have used.
    """

    applied: bool
    grad_norm: float
    learning_rate: float


class TrainingOptimizer:
    """The model with its gradient buffers, optimizer and learning-rate schedule.

    Attributes:
        chunks: this rank's model chunks, wrapped in Megatron's distributed data parallelism, for the engine.
    """

    def __init__(self, model: Model, settings: OptimizationConfig, parallel: ParallelConfig | None = None) -> None:
        parallel = parallel or ParallelConfig()
        self.settings = settings
        megatron_patches.handle_tensors_together()
        megatron_patches.run_adam_without_compiler()
        self._is_distributed = parallel.use_distributed_optimizer
        if self._is_distributed:
            megatron_patches.place_parameters_of_all_buckets()
            megatron_patches.collect_states_by(owned_state)
        self.chunks = data_parallel_chunks(model, parallel, in_float32=settings.main_grads_dtype == "fp32")
        optimizer_config = _optimizer_config(settings, model.config.params_dtype, self._is_distributed)
        self.optimizer = get_megatron_optimizer(optimizer_config, self.chunks)
        self.schedule = _schedule(self.optimizer, settings)

    def zero_grad(self) -> None:
        """Clear the gradient buffer. Call this before the first backward pass of a step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def reduce_gradients(self) -> None:
        """Sum the gradients over the replicas.

        Partial gradients are also summed over the tensor-parallel group, and those of a tied embedding over the first
        and the last stage. Every rank must call this, even if it had nothing to train; ``step`` calls it.
        """
        finalize_model_grads(self.chunks)

    def step(self, loss: float, advance_schedule: bool = True) -> StepOutcome:
        """Reduce, check, clip and apply the gradients of all backward passes since ``zero_grad``.

        Args:
            loss: the loss of these passes; the step is skipped if it is not finite.
            advance_schedule: False leaves the learning rate to ``schedule.step``, which the caller then calls.
        """
        biases = [bias for chunk in self.chunks for name, bias in chunk.named_buffers() if name.endswith("expert_bias")]
        before = [bias.clone() for bias in biases]
        self.reduce_gradients()
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        learning_rate = self.learning_rate
        applied = math.isfinite(loss) and math.isfinite(grad_norm)
        if applied:
            # Megatron's step cannot be skipped on a NaN, so its parts are called one by one.
            for optimizer in self._optimizers():
                parameters, most = optimizer.get_parameters(), optimizer.config.clip_grad
                if parameters and most > 0:
                    is_aware = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                    megatron_optimizer.clip_grad_by_total_norm_fp32(parameters, most, grad_norm, is_aware)
            self.optimizer.step_with_ready_grads()
            if advance_schedule:
                self.schedule.step(1)
        else:
            # Megatron updates the expert biases while it reduces the gradients, so a skipped step restores them.
            for bias, value in zip(biases, before, strict=True):
                bias.copy_(value)
        return StepOutcome(applied=applied, grad_norm=grad_norm, learning_rate=learning_rate)

    def state_tensors(self) -> list[torch.Tensor]:
        """Master weights and moments on the device of the weights; the weights themselves are not among them."""
        storages = {parameter.untyped_storage().data_ptr() for chunk in self.chunks for parameter in chunk.parameters()}
        device = next(self.chunks[0].parameters()).device
        tensors = []
        for optimizer in self._optimizers():
            adam = optimizer.optimizer
            tensors += [parameter for group in adam.param_groups for parameter in group["params"]]
            tensors += [value for state in adam.state.values() for value in state.values() if torch.is_tensor(value)]
        return [
            tensor
            for tensor in tensors
            if tensor.device == device and tensor.untyped_storage().data_ptr() not in storages
        ]

    def gradient_buffers(self) -> list[torch.Tensor]:
        """The buffers into which backward passes accumulate."""
        return [buffer.grad_data for chunk in self.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def sharded_state_dict(
        self, model_state: dict[str, Any], is_loading: bool = False, fully_parallel: bool = False
    ) -> dict[str, Any]:
        """The optimizer's and the schedule's state for Megatron's distributed checkpoint.

        An optimizer that has not taken a step has no state and is left out.

        Args:
            model_state: the model's part of the checkpoint.
            fully_parallel: divide a distributed optimizer's state among all data-parallel ranks instead of giving it to
                the first one.
        """
        state = {"opt_param_scheduler": self.schedule.state_dict()}
        if is_loading and self._is_distributed:
            for optimizer in self._optimizers():
                _make_empty_state(optimizer)
        if is_loading or len(self.optimizer.state):
            divided = fully_parallel and self._is_distributed and not is_loading
            metadata = _UNPREFIXED | (_RESHARDABLE if self._is_distributed else {}) | (_DIVIDED if divided else {})
            optimizer_state = self.optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)
            optimizer_state = _without_classes(optimizer_state)
            state["optimizer"] = keep_owned(optimizer_state) if divided else optimizer_state
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore moments, master weights and progress. Hyperparameters stay those of the command line."""
        if "optimizer" in state:
            parts = self._optimizers()
            steps = _steps_in(state["optimizer"])
            for index, optimizer in enumerate(parts):
                loaded = state["optimizer"][index] if len(parts) > 1 else state["optimizer"]
                # If the checkpoint's mesh had several optimizers, their states are stored next to this one by number.
                optimizer_state = {name: value for name, value in loaded.items() if not isinstance(name, int)}
                (_load_distributed if self._is_distributed else _load)(optimizer, optimizer_state, steps)
        # Megatron's schedule adds the loaded steps to its own.
        self.schedule.num_steps = 0
        self.schedule.load_state_dict(state["opt_param_scheduler"])

    def _optimizers(self) -> list[Any]:
        """Megatron's optimizers. With expert parallelism there is one for the experts and one for all other weights."""
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])


def _steps_in(state: Any) -> list[Any]:
    """All step counts in ``state``. Megatron's optimizers keep them in different places; their values are equal."""
    if isinstance(state, list):
        return [step for part in state for step in _steps_in(part)]
    if not isinstance(state, dict):
        return []
    steps = [state[name] for name in ("common_step", "step") if name in state]
    return steps + [step for part in state.values() for step in _steps_in(part)]


def _without_classes(state: Any) -> Any:
    """Remove the classes that Megatron's offloading optimizer stores in its parameter groups.

    They carry no state, and the checkpoint reader refuses files that contain them.
    """
    if isinstance(state, dict):
        return {name: _without_classes(value) for name, value in state.items() if not isinstance(value, type)}
    return [_without_classes(part) for part in state] if type(state) is list else state


def _make_empty_state(optimizer: Any) -> None:
    """Create a zero Adam state, from which Megatron's distributed optimizer reads the number of steps when loading."""
    adam = optimizer.optimizer
    if _counts_in_groups(adam):
        return  # Megatron creates this state itself.
    is_hybrid = isinstance(adam, HybridDeviceOptimizer)
    for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
        # With offloading, the moments and the master weight belong to the parameter's copy on the host.
        inner = adam.param_to_inner_param[parameter] if is_hybrid else parameter
        moments = {name: torch.zeros_like(inner) for name in ("exp_avg", "exp_avg_sq")}
        adam.state[parameter] = {"step": torch.tensor(0.0), **moments}
        if is_hybrid:
            adam.state[parameter]["master_param"] = inner
    if is_hybrid:
        adam._sync_hdo_state_to_sub_optimizers()


def _counts_in_groups(adam: Any) -> bool:
    """Whether ``adam`` is Transformer Engine's Adam, which Megatron uses on GPUs if the package is installed.

    It keeps one step count (an int) per parameter group; PyTorch's Adam keeps a tensor per parameter.
    """
    return hasattr(adam, "get_unscaled_state")


def _load(optimizer: Any, loaded: dict[str, Any], steps: list[Any]) -> None:
    """Load moments and master weights; the parameter groups keep their current hyperparameters."""
    # The bfloat16 optimizer nests Adam's state one level deeper, next to the master weights.
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
    """Load the step count first, then master weights and moments, which the checkpoint stores by parameter.

    With PyTorch's Adam, Megatron also looks for the step count in the second part, which does not hold it. It also
    gives all parameters the same step tensor, which every parameter would then advance. So the step tensors are removed
    before the second part is loaded and restored afterwards, one per parameter.
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
    """Move the loaded states from the host to the device on which each parameter is updated.

    Megatron distinguishes the host and device optimizers by class. The classes are the same if only PyTorch's Adam is
    installed.
    """
    for parameter, values in hybrid.state.items():
        inner = hybrid.param_to_inner_param[parameter]
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value is not inner:
                values[name] = value.to(inner.device)
    if steps and hybrid.gpu_optimizer is not None and _counts_in_groups(hybrid.gpu_optimizer):
        for group in hybrid.gpu_optimizer.param_groups:
            group["step"] = int(steps[0])
    # At every step Megatron copies its own groups over those of both optimizers. A loaded step count in them would
    # reset the count of an optimizer that keeps it in its groups.
    for group in hybrid.param_groups:
        group.pop("step", None)


def data_parallel_chunks(
    model: Model, parallel: ParallelConfig, in_float32: bool = True
) -> list[DistributedDataParallel]:
    """Wrap this rank's model chunks in Megatron's distributed data parallelism, which holds the gradient buffers.

    Args:
        in_float32: keep gradients of 16-bit weights in float32; otherwise in the weights' dtype.
    """
    settings = DistributedDataParallelConfig(
        # Exactness tests run in float64 and keep float64 gradients.
        grad_reduce_in_fp32=in_float32 and model.config.params_dtype != torch.float64,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        bucket_size=parallel.ddp_bucket_size,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
    )
    return [DistributedDataParallel(model.config, settings, chunk) for chunk in model.model_chunks]


def _optimizer_config(settings: OptimizationConfig, params_dtype: torch.dtype, is_distributed: bool) -> OptimizerConfig:
    aware, offload = settings.use_precision_aware_optimizer, settings.optimizer_cpu_offload
    config = OptimizerConfig(
        optimizer="adam",
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
        pin_cpu_grads=torch.cuda.is_available(),
        pin_cpu_params=torch.cuda.is_available(),
        use_distributed_optimizer=is_distributed,
    )
    # Store whole master weights. Megatron would otherwise store only the 16 bits that a bfloat16 weight lacks, which
    # are meaningless without that weight, so no other run could read a checkpoint of them.
    config.store_param_remainders = False
    if offload:
        # Here Megatron asks for Transformer Engine's version. Megatron 0.16 fails if the package is not installed,
        # although offloaded states do not need it. These settings are what Megatron derives without the package.
        config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        config.main_grads_dtype = DTYPES[settings.main_grads_dtype]
    return config


def _schedule(optimizer: Any, settings: OptimizationConfig) -> OptimizerParamScheduler:
    """The learning-rate schedule, in one of Megatron's decay styles. The weight decay is constant."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
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
    )
