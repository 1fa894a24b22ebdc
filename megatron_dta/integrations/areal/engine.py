"""``TreePPOActor``: AReaL's ``TrainEngine`` on prefix trees, with the methods of its PPO actor."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from areal.api import TrainEngine
from megatron.core import parallel_state
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ParallelConfig
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.integrations.areal.batch import Loss, LossWeight, RowBatch
from megatron_dta.integrations.build import build_tree_engine
from megatron_dta.integrations.plans import Planner
from megatron_dta.training.arguments import settings_from
from megatron_dta.training.checkpoint.files import find_checkpoint
from megatron_dta.training.checkpoint.save_load import load_checkpoint, load_weights, save_checkpoint, save_weights
from megatron_dta.training.checkpoint.writer import on_rank0
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.config.checks.all import check_engine
from megatron_dta.training.huggingface.save import hf_weights, load_hf, write_hf
from megatron_dta.training.optimizer.build import TrainingOptimizer

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_WEIGHTS = "weights"


class TreePPOActor(TrainEngine):
    """See ``areal.api.TrainEngine``; ``config`` is AReaL's ``PPOActorConfig``.

    Attributes:
        settings: other settings of this project by field name, such as ``tree_memory_gib``; subclasses override it.
    """

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: Any) -> None:
        from areal.trainer.ppo.actor import PPOActor

        for name in ("is_critic", "use_lora", "offload", "enable_tree_training", "m2_threshold"):
            if getattr(config, name, None):
                raise InputError(f"actor.{name}={getattr(config, name)} is not supported by the engine megatron_dta")
        if config.dtype not in _DTYPES:
            raise InputError(f"actor.dtype={config.dtype}: choose from {', '.join(_DTYPES)}")
        self.config, self.actor, self.rollout_engine, self.version = config, PPOActor(config, self), None, 0
        self.compute_logp = torch.no_grad()(self.actor.compute_logp)
        self.compute_advantages, self.ppo_update = self.actor.compute_advantages, self.actor.ppo_update
        self._is_ready, self._loss = False, 0.0

    @classmethod
    def as_controller(cls, config: Any, scheduler: Any) -> Any:
        """The controller of AReaL's single-controller mode."""
        from areal.trainer.ppo.actor import PPOActorController

        return PPOActorController(train_engine=cls, config=config, scheduler=scheduler)

    # Building

    def create_process_group(self, parallel_strategy: Any = None) -> None:
        """Make the mesh of AReaL's ``ParallelStrategy``."""
        self._sizes = {}
        if parallel_strategy is not None:
            context = parallel_strategy.context_parallel_size
            if context > 1:
                raise InputError(
                    f"context_parallel_size={context} of the allocation is not supported by the engine megatron_dta; "
                    "use tensor parallelism"
                )
            self._sizes = {
                "tensor_model_parallel_size": parallel_strategy.tensor_parallel_size,
                "pipeline_model_parallel_size": parallel_strategy.pipeline_parallel_size,
                "expert_model_parallel_size": parallel_strategy.expert_parallel_size,
            }
            # AReaL gives every model a size for experts.
            if parallel_strategy.expert_parallel_size > 1:
                self._sizes["expert_tensor_parallel_size"] = parallel_strategy.expert_tensor_parallel_size
        self.device = initialize_parallel(self.settings.get("seed", 1234), ParallelConfig(**self._sizes))
        self._cpu_group = dist.new_group(backend="gloo")

    def initialize(self, addr: str | None, ft_spec: Any, *args: Any, **kwargs: Any) -> None:
        """Build the model with the weights of ``config.path`` and, if it is trained, its optimizer."""
        self._config = config = self._train_config(ft_spec)
        self.model = build_model(config.model, self.device, config.parallel)
        load_hf(config, self.model)
        self.optimizer: TrainingOptimizer | None = None
        if self.config.optimizer is None:
            self.model.requires_grad_(False)
        else:
            self.optimizer = TrainingOptimizer(self.model, config.optimization, config.parallel)
        self.engine, tuner = build_tree_engine(config, self.model, self.optimizer, self.config.temperature)
        self._planner = Planner(self.engine, config.tree, tuner)
        self._is_ready = True

    def _train_config(self, ft_spec: Any) -> TrainConfig:
        folder = self.config.path
        if not Path(folder).is_dir():
            from huggingface_hub import snapshot_download

            folder = snapshot_download(folder)
        named = {"load_hf": folder, "hf_checkpoint": folder, "bf16": self.config.dtype == "bfloat16"} | self._sizes
        optimizer, steps = self.config.optimizer, max(1, ft_spec.total_train_steps)
        if optimizer is not None:
            if optimizer.type != "adam":
                raise InputError(f"actor.optimizer.type={optimizer.type} is not supported; use adam")
            named |= {
                "lr": optimizer.lr,
                "min_lr": optimizer.min_lr_ratio * optimizer.lr,
                "lr_decay_style": optimizer.lr_scheduler_type,
                "lr_warmup_iters": int(optimizer.warmup_steps_proportion * steps),
                "train_iters": steps,
                "weight_decay": optimizer.weight_decay,
                "adam_beta1": optimizer.beta1,
                "adam_beta2": optimizer.beta2,
                "adam_eps": optimizer.eps,
                "clip_grad": optimizer.gradient_clipping,
            }
        named["sequence_parallel"] = self._sizes.get("tensor_model_parallel_size", 1) > 1
        config = settings_from(named | self.settings)
        config = replace(config, model=replace(config.model, params_dtype=_DTYPES[self.config.dtype]))
        check_engine(config)
        return config

    # Passes

    def train_batch(self, input_: Any, loss_fn: Loss, loss_weight_fn: LossWeight) -> dict[str, float]:
        """Take an optimizer step on a batch; see ``batch`` for the meaning of the loss."""
        self.optimizer_zero_grad()
        result = RowBatch(input_, self.engine, self._planner).train(loss_fn, loss_weight_fn)
        self._loss = float(result.loss)
        reuse = result.sequence_tokens / max(1, result.computed_tokens)
        return self.optimizer_step() | {"token_reuse": reuse, "num_micro_batches": 1.0}

    def eval_batch(self, input_: Any, loss_fn: Loss, loss_weight_fn: LossWeight) -> Tensor:
        """The loss of a batch, without gradients."""
        return RowBatch(input_, self.engine, self._planner).evaluate(loss_fn, loss_weight_fn)

    def forward_batch(self, input_: Any, output_seqlens: Any = None, aggregate_fn: Any = None) -> Any:
        """Logprobs in the form of the input. There are no micro-batches whose outputs ``aggregate_fn`` would join."""
        if output_seqlens is not None:
            raise InputError("output_seqlens is not supported by the engine megatron_dta; leave it out")
        return RowBatch(input_, self.engine, self._planner).logprobs()

    def forward_backward_batch(self, mb_list: Any, process_output_fn: Any, forward_only: bool = False) -> None:
        """Not supported: no pass here has the logits of whole sequences."""
        raise InputError("forward_backward_batch needs logits; use train_batch, eval_batch or forward_batch")

    def optimizer_zero_grad(self) -> None:
        """Clear the gradient buffers."""
        self.optimizer.zero_grad()

    def optimizer_step(self) -> dict[str, float]:
        """Apply the gradients unless they are not finite."""
        done = self.optimizer.step(self._loss, advance_schedule=False)
        return {"update_successful": float(done.applied), "grad_norm": done.grad_norm, "lr": done.learning_rate}

    def lr_scheduler_step(self) -> None:
        """Advance the learning rate."""
        self.optimizer.schedule.step(1)

    def train(self, mode: bool = True) -> TreePPOActor:
        """The model has no dropout: training and evaluation are the same."""
        return self

    # Rollouts and weights

    def connect_engine(self, engine: Any, meta: Any) -> None:
        """Use ``engine`` for rollouts; it reads new weights from disk."""
        from areal.infra.dist_rollout import DistRolloutCoordinator

        if meta.type != "disk":
            raise InputError(f"actor.weight_update_mode: {meta.type} is not supported; use disk")
        self.rollout_engine = engine
        coordinator = DistRolloutCoordinator(rollout_engine=engine, train_engine=self)
        self.rollout_batch, self.prepare_batch = coordinator.rollout_batch, coordinator.prepare_batch

    def rollout_batch(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """Sample; ``connect_engine`` replaces this method."""
        raise RuntimeError("connect_engine must be called before rollouts")

    prepare_batch = rollout_batch

    def update_weights(self, meta: Any) -> None:
        """Write the weights to ``meta.path`` and let the rollout engine read them."""
        from areal.utils import name_resolve, names

        read: Future = Future()
        if dist.get_rank() == 0:
            self.rollout_engine.pause_generation()
            read = self.rollout_engine.update_weights_from_disk(meta)
        self._write_hf(Path(meta.path), meta.type)
        if dist.get_rank() == 0:
            key = names.update_weights_from_disk(self.config.experiment_name, self.config.trial_name, self.version)
            name_resolve.add(key, str(datetime.now().timestamp()), keepalive_ttl=120)
            read.result()
            self.rollout_engine.continue_generation()
        dist.barrier(group=self._cpu_group)

    def _write_hf(self, folder: Path, name: str) -> None:
        on_rank0(folder, lambda: shutil.rmtree(folder, ignore_errors=True))
        on_rank0(folder, lambda: folder.parent.mkdir(parents=True, exist_ok=True))
        write_hf(self._config, self.model, folder, name)

    def set_version(self, version: int) -> None:
        """The number of the weights."""
        self.version = version

    def get_version(self) -> int:
        """The number of the weights."""
        return self.version

    def save(self, meta: Any) -> None:
        """Write weights in Hugging Face's format ("hf"), or a checkpoint of this project ("dcp")."""
        folder = Path(meta.path)
        if meta.weight_format == "hf":
            if meta.with_optim:
                raise InputError("weight_format=hf with_optim=True is not supported; use weight_format=dcp")
            self._write_hf(folder, "SaveLoadMeta.path")
        elif meta.with_optim:
            save_checkpoint(folder, self._config, self.model, self.optimizer, self.version, {})
        else:
            on_rank0(folder, lambda: shutil.rmtree(folder / _WEIGHTS, ignore_errors=True))
            save_weights(folder / _WEIGHTS, self._config, self.model)

    def load(self, meta: Any) -> None:
        """Load what ``save`` wrote."""
        if meta.weight_format == "hf":
            hf_weights(self._config, self.model).load(meta.path)
        elif meta.with_optim:
            path = find_checkpoint(meta.path)
            if path is None:
                raise InputError(f"{meta.path}: holds no checkpoint of the engine megatron_dta")
            load_checkpoint(path, self._config, self.model, self.optimizer)
        else:
            load_weights(Path(meta.path) / _WEIGHTS, self._config.model, self.model)

    def offload(self) -> None:
        """Not supported."""
        raise InputError("actor.offload=true is not supported by the engine megatron_dta")

    onload = offload

    # The mesh and statistics

    @property
    def initialized(self) -> bool:
        """Whether the model is built."""
        return self._is_ready

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that get other rows."""
        return parallel_state.get_data_parallel_group()

    @property
    def data_parallel_rank(self) -> int:
        """Position among the ranks that get other rows."""
        return parallel_state.get_data_parallel_rank()

    @property
    def data_parallel_world_size(self) -> int:
        """Number of replicas of the model."""
        return parallel_state.get_data_parallel_world_size()

    @property
    def context_and_model_parallel_group(self) -> dist.ProcessGroup:
        """The ranks of this replica."""
        return parallel_state.get_model_parallel_group()

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        """All ranks, on the host."""
        return self._cpu_group

    def current_data_parallel_head(self) -> int:
        """The first rank of this replica."""
        return dist.get_process_group_ranks(self.context_and_model_parallel_group)[0]

    def is_data_parallel_head(self) -> bool:
        """Whether this rank is the first of its replica."""
        return dist.get_rank() == self.current_data_parallel_head()

    def export_stats(self) -> dict[str, float]:
        """Statistics of AReaL's tracker over all replicas, from the stage that computes losses."""
        from areal.utils import stats_tracker

        stats = stats_tracker.export_all(reduce_group=self.data_parallel_group)
        return self.engine.mesh.from_last_stage(stats)

    def get_device_stats(self) -> Any:
        from areal.api.io_struct import DeviceRuntimeInfo

        return DeviceRuntimeInfo.get_current()

    def clear_batches(self, shard_ids: list[str]) -> None:
        """Free this worker's copies of AReaL's distributed batches."""
        from areal.infra.rpc.rtensor import clear_fetch_buffer

        clear_fetch_buffer(shard_ids)
