"""The engines that verl's workers drive: ``language_model`` for actor and reference, ``value_model`` for the critic."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from megatron.core import parallel_state
from tensordict import TensorDict
from torch import Tensor
from torch.distributed import ProcessGroup
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import HFModelConfig, OptimizerConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import _hf_entry_identity, enable_full_determinism, hf_delta_export

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.layers.lora import without_adapters
from megatron_dta.core.model.parallel.mesh import current_mesh, initialize_parallel
from megatron_dta.core.model.parallel.staged_model import Model
from megatron_dta.integrations.build import build_tree_engine
from megatron_dta.integrations.plans import Planner
from megatron_dta.integrations.verl.checkpoints import VerlCheckpoints
from megatron_dta.integrations.verl.config import BACKEND, MegatronDtaEngineConfig
from megatron_dta.integrations.verl.settings import train_config
from megatron_dta.integrations.verl.step import Loss, MiniBatch, describe, loss_scope
from megatron_dta.integrations.verl.weights import shards
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.huggingface.save import hf_weights, load_hf
from megatron_dta.training.optimizer.build import TrainingOptimizer
from megatron_dta.training.weights.offload import HostStorages

logger = logging.getLogger(__name__)
# Requests that need logits or the choice of experts, by the key of verl's data.
_REFUSED = {
    "calculate_sum_pi_squared": "actor.calculate_sum_pi_squared=False",
    "distillation_use_topk": "a distillation loss of logprobs instead of top-k logits",
    "enable_routing_replay": "router_replay.mode=disabled",
}


class MegatronDtaEngine(BaseEngine):
    """A model on prefix trees behind verl's engine interface; see ``verl.workers.engine.base.BaseEngine``."""

    value_head = False
    # verl's names of the model outputs: of the logprobs (values), and of the entropies.
    names: tuple[str, str | None] = ("log_probs", "entropy")

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: MegatronDtaEngineConfig,
        optimizer_config: OptimizerConfig | None,
        checkpoint_config: CheckpointConfig,
    ) -> None:
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        # verl asks for the rank's place in the mesh before it initializes the model.
        self._config = train_config(model_config, engine_config, None)
        try:
            self.device = initialize_parallel(engine_config.seed, self._config.parallel)
        except ValueError as error:
            # Actor, reference and critic share the processes.
            raise InputError(
                f"megatron_dta.*_parallel_size: actor, reference and critic need the same sizes: {error}"
            ) from error
        if self.device.type == "cpu" and (engine_config.param_offload or engine_config.optimizer_offload):
            raise InputError("engine.param_offload and engine.optimizer_offload need a GPU; set them to False")

    # Building

    def initialize(self) -> None:
        """Build the model with the checkpoint's weights and, if it is trained, its optimizer."""
        config = self.engine_config
        optimizer_config = None if config.forward_only else self.optimizer_config
        self._config = settings = train_config(self.model_config, config, optimizer_config)
        if config.full_determinism:
            enable_full_determinism(config.seed)
        self.model: Model = build_model(settings.model, self.device, settings.parallel, value_head=self.value_head)
        load_hf(settings, self.model, without_head=self.value_head)
        self.optimizer: TrainingOptimizer | None = None
        if config.forward_only:
            self.model.requires_grad_(False)
        else:
            self.optimizer = TrainingOptimizer(self.model, settings.optimization, settings.parallel)
        self.tree_engine, tuner = build_tree_engine(settings, self.model, self.optimizer)
        self._planner = Planner(self.tree_engine, settings.tree, tuner)
        self._checkpoints = VerlCheckpoints(self)
        self._on_host: dict[str, HostStorages] = {}
        self._loss, self._said = 0.0, False
        self.to("cpu", config.param_offload, config.optimizer_offload, config.param_offload)

    @property
    def settings(self) -> TrainConfig:
        """This project's settings of the engine."""
        return self._config

    # Passes

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run a mini-batch; see ``step``.

        Returns:
            ``model_output``, ``loss`` and ``metrics`` as verl's engines return them for one micro-batch.
        """
        for key, instead in _REFUSED.items():
            if tensordict_utils.get_non_tensor_data(data, key, default=False):
                raise InputError(f"{key} is not supported by the engine megatron_dta; use {instead}")
        group = self.get_data_parallel_group()
        num_tokens = data["loss_mask"].sum().to(self.device)
        torch.distributed.all_reduce(num_tokens, group=group)
        tensordict_utils.assign_non_tensor(
            data, batch_num_tokens=num_tokens.item(), dp_size=self.get_data_parallel_size()
        )
        self.tree_engine.temperature = _temperature(data)
        entropy = tensordict_utils.get_non_tensor_data(data, "calculate_entropy", default=False)
        batch = MiniBatch(data, self.tree_engine, self._planner, (self.names[0], self.names[1] if entropy else None))
        if forward_only:
            return batch.infer(loss_function, group)
        loss: Loss = loss_function
        report, statistics = batch.train(loss, group, loss_scope(self.engine_config.loss_scope, loss))
        self._loss = sum(report["loss"])
        if not self._said and current_mesh().rank == 0:
            # verl's trainer for supervised training logs no metrics of engines.
            print(f"megatron_dta: {describe(statistics)}", flush=True)
        self._said = True
        for name, value in statistics.items():
            report["metrics"].setdefault(name, []).append(value)
        return report

    def optimizer_zero_grad(self) -> None:
        """Clear the gradient buffers."""
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        """Apply the gradients unless they are not finite; returns their norm before clipping."""
        outcome = self.optimizer.step(self._loss, advance_schedule=False)
        if not outcome.applied:
            logger.warning("skipped a step: the gradient norm is %s", outcome.grad_norm)
        return outcome.grad_norm

    def lr_scheduler_step(self) -> float:
        """Advance the learning rate by one step; returns the rate of the step that was taken."""
        rate = self.optimizer.learning_rate
        self.optimizer.schedule.step(1)
        return rate

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        """Context of training: brings offloaded states to the device."""
        return _ModeContext(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        """Context of passes without gradients: brings offloaded weights to the device."""
        return _ModeContext(self, "eval", **kwargs)

    def disable_adapter(self) -> AbstractContextManager:
        """Within it, passes use the base model without its LoRA adapters."""
        return without_adapters(self.tree_engine.tree_models)

    # The mesh

    def get_data_parallel_rank(self) -> int:
        """Position among the ranks that get other rows."""
        return parallel_state.get_data_parallel_rank()

    def get_data_parallel_size(self) -> int:
        """Number of replicas of the model."""
        return parallel_state.get_data_parallel_world_size()

    def get_data_parallel_group(self) -> ProcessGroup:
        """The ranks that get other rows."""
        return parallel_state.get_data_parallel_group()

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether verl collects this rank's outputs; every rank of a replica has them."""
        return (
            parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
            and parallel_state.get_pipeline_model_parallel_rank()
            == parallel_state.get_pipeline_model_parallel_world_size() - 1
        )

    # States

    @property
    def is_param_offload_enabled(self) -> bool:
        """Whether weights and gradients are on the host between phases."""
        return self.engine_config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether the optimizer's states are on the host between phases."""
        return self.engine_config.optimizer_offload

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move weights, optimizer states or gradients to the host ("cpu") or back; gradients come back as zeros."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        if self.device.type == "cpu":
            return
        wanted = {"weights": model, "states": optimizer and self.optimizer is not None}
        wanted["gradients"] = grad and self.optimizer is not None
        for name, moves in wanted.items():
            if not moves:
                continue
            if device != "cpu":
                if name in self._on_host:
                    self._on_host.pop(name).to_device()
            elif name not in self._on_host:
                # Listed each time, because Adam's states appear with its first step.
                self._on_host[name] = storages = HostStorages(self._tensors(name), keep=name != "gradients")
                storages.to_host()
        if device == "cpu":
            torch.cuda.empty_cache()

    def _tensors(self, name: str) -> list[Tensor]:
        if name == "weights":
            return [parameter.data for chunk in self.tree_engine.tree_models for parameter in chunk.parameters()]
        return self.optimizer.state_tensors() if name == "states" else self.optimizer.gradient_buffers()

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Whole weights under Hugging Face's names, one at a time, with LoRA adapters merged."""
        self._bring_weights()
        return hf_weights(self._config, self.model).iterate(), None

    def get_per_tensor_param_shard(self, **kwargs: Any) -> tuple[Iterator, None]:
        """This rank's shards of the weights, see ``weights.shards``."""
        self._bring_weights()
        return shards(hf_weights(self._config, self.model), self.device), None

    def get_per_tensor_param_delta_shard(self, **kwargs: Any) -> tuple[Iterator, None]:
        """Elements of this rank's shards that changed since the last export; see verl's ``delta_sharded`` backend."""
        shards, _ = self.get_per_tensor_param_shard()
        return hf_delta_export(shards, self._delta_shard_snap, _hf_entry_identity), None

    def _bring_weights(self) -> None:
        if self.device.type != "cpu":
            self.to(self.device.type, model=True, optimizer=False, grad=False)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Save weights, optimizer and schedule; every rank must call this."""
        _refuse_hdfs(hdfs_path)
        with self._states_on_device():
            self._checkpoints.save(local_path, global_step, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        """Load what ``save_checkpoint`` saved. The folder stays: it is not a copy of a remote one."""
        _refuse_hdfs(hdfs_path)
        with self._states_on_device():
            self._checkpoints.load(local_path)

    def _states_on_device(self) -> AbstractContextManager:
        stack = ExitStack()
        offloads = self.engine_config.param_offload, self.engine_config.optimizer_offload
        if self.device.type != "cpu" and any(offloads):
            self.to(self.device.type, *offloads, grad=False)
            stack.callback(self.to, "cpu", *offloads, grad=False)
        return stack


class _ModeContext(BaseEngineCtx):
    """verl's context of a phase; leaving a training phase clears the gradients."""

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or exc_type is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(exc_type, exc_val, exc_tb)


def _temperature(data: TensorDict) -> float:
    value = data.get("temperature", 1.0)
    value = getattr(value, "data", value) if not isinstance(value, Tensor) else value
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() and not bool((value == value.reshape(-1)[0]).all()):
        raise InputError("temperature: rows of one batch have different temperatures; use one for all")
    return float(value.reshape(-1)[0]) if value.numel() else 1.0


def _refuse_hdfs(path: str | None) -> None:
    if path is not None:
        raise InputError(f"hdfs_path={path}: checkpoints are saved to local or shared folders only; leave it out")


@EngineRegistry.register(model_type="language_model", backend=BACKEND, device=["cuda", "cpu"])
class MegatronDtaLanguageModel(MegatronDtaEngine):
    """Actor and reference."""


@EngineRegistry.register(model_type="value_model", backend=BACKEND, device=["cuda", "cpu"])
class MegatronDtaValueModel(MegatronDtaEngine):
    """The critic: the model with a value head, whose initial weights are random."""

    value_head = True
    names = ("values", None)
