"""What the actors for slime and Miles share: optimizer steps on prefix trees over the samples of a rollout.

``slime_actor.py`` and ``miles_actor.py`` add what differs. See docs/integrations/slime_and_areal.md.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.engine import TreeEngine
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import current_mesh, initialize_parallel
from megatron_dta.core.model.parallel.staged_model import Model
from megatron_dta.core.objectives.fields import SequenceLoss
from megatron_dta.integrations.build import build_tree_engine
from megatron_dta.integrations.plans import Planner, RowPlan
from megatron_dta.integrations.rows import Row
from megatron_dta.training.arguments import settings_from
from megatron_dta.training.checkpoint.files import find_checkpoint
from megatron_dta.training.checkpoint.save_load import load_checkpoint, save_checkpoint
from megatron_dta.training.checkpoint.writer import on_rank0
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.config.checks.all import check_engine
from megatron_dta.training.config.train import settings_of
from megatron_dta.training.huggingface.save import load_hf, write_hf
from megatron_dta.training.optimizer.build import TrainingOptimizer

# Settings that must have these values.
REQUIRED = {"offload_train": False, "use_critic": False, "use_opd": False, "keep_old_actor": False}
REQUIRED |= {"use_routing_replay": False, "context_parallel_size": 1, "pipeline_model_parallel_layout": None}
REQUIRED |= {"use_fault_tolerance": False, "rollout_data_postprocess_path": None, "ref_update_interval": None}
REQUIRED |= {"fp16": False, "debug_rollout_only": False, "debug_train_only": False}
# Megatron replaces these names by dtypes.
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "fp8"}
LOSSES = ("policy_loss", "sft_loss")
# What the losses read of a sample.
FIELDS = ("tokens", "total_lengths", "response_lengths", "loss_masks", "rollout_mask_sums", "log_probs")
FIELDS += ("ref_log_probs", "rollout_log_probs", "advantages", "returns")


class TreeTrainer:
    """A trainer of slime's form; the subclass is also a ``TrainRayActor`` of slime or Miles."""

    def check(self, args: Any, required: dict[str, Any]) -> None:
        """Refuse settings that the trees do not support."""
        for name, value in (REQUIRED | required).items():
            if getattr(args, name) != value:
                raise InputError(f"{name}={getattr(args, name)} is not supported by TreeActor; use {value}")
        if args.loss_type not in LOSSES:
            raise InputError(f"loss_type={args.loss_type} is not supported by TreeActor; use {', '.join(LOSSES)}")

    def start(self, args: Any, with_ref: bool) -> int:
        """Build the model with the weights of ``--hf-checkpoint``; returns the number of the next rollout."""
        self.config = train_config(args)
        self.device = initialize_parallel(args.seed, self.config.parallel)
        self.model, self.reference = self._load(args.hf_checkpoint), None
        self.optimizer = TrainingOptimizer(self.model, self.config.optimization, self.config.parallel)
        self.mesh, frozen = current_mesh(), []
        if with_ref:
            reference = self._load(args.ref_load).requires_grad_(False)
            self.reference, _ = build_tree_engine(self.config, reference, None, args.rollout_temperature)
            frozen = reference.model_chunks
        self.engine, tuner = build_tree_engine(
            self.config, self.model, self.optimizer, args.rollout_temperature, frozen
        )
        self.planner = Planner(self.engine, self.config.tree, tuner)
        self.train_parallel_config = self._get_parallel_config()
        self.weight_version, self.step = getattr(args, "update_weight_start_version", 0), 0
        saved = find_checkpoint(args.save) if args.save and Path(args.save).is_dir() else None
        return 0 if saved is None else load_checkpoint(saved, self.config, self.model, self.optimizer)[0]

    def _load(self, folder: str) -> Model:
        model = build_model(self.config.model, self.device, self.config.parallel)
        self.config.checkpoint.load_hf = folder
        load_hf(self.config, model)
        return model

    def _get_parallel_config(self) -> dict[str, int]:
        size = current_mesh().data_size
        return {"dp_size": size, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}

    # What differs between slime and Miles

    def compute_advantages(self, data: dict[str, Any]) -> None:
        """Add "advantages" and "returns" to a rollout."""
        raise NotImplementedError

    def loss(self, batch: dict[str, Any], outputs: dict[str, list[Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the samples' losses, and metrics; ``outputs`` take the place of logits."""
        raise NotImplementedError

    def log(self, metrics: dict[str, float]) -> None:
        """Report a step; called on rank 0."""
        raise NotImplementedError

    # A rollout

    def train_rollout(self, data: dict[str, Any], steps: list[list[int]], sizes: list[int]) -> None:
        """Take the optimizer steps of a rollout.

        Args:
            data: this rank's samples, a list for each name.
            steps: numbers of the samples of every step.
            sizes: rollouts of every step, over all ranks.
        """
        args = self.args
        for name in FIELDS:
            if name in data:
                data[name] = [x.to(self.device) if isinstance(x, Tensor) else x for x in data[name]]
        plans = [self.planner.plan([row_of(data, number) for number in numbers]) for numbers in steps]
        if args.compute_advantages_and_returns:
            is_scored = not getattr(args, "skip_actor_forward_only", False)
            if is_scored and (not args.use_rollout_logprobs or args.get_mismatch_metrics):
                data["log_probs"] = self._logprobs(self.engine, steps, plans, data)
            if self.reference is not None:
                data["ref_log_probs"] = self._logprobs(self.reference, steps, plans, data)
            self.compute_advantages(data)
        for numbers, plan, size in zip(steps, plans, sizes, strict=True):
            self._train_step(data, numbers, plan, size)

    def _logprobs(self, engine: TreeEngine, steps: list, plans: list[RowPlan], data: dict[str, Any]) -> list[Tensor]:
        """Logprobs of every response token."""
        by_number: dict[int, Tensor] = {}
        for numbers, plan in zip(steps, plans, strict=True):
            values = plan.to_owners(engine.compute_logprobs(plan.batch), engine)
            for number, row in zip(numbers, values, strict=True):
                response = row[len(row) - data["response_lengths"][number] :]
                by_number[number] = torch.from_numpy(response).to(self.device)
        return [by_number[number] for number in range(len(data["tokens"]))]

    def _train_step(self, data: dict[str, Any], numbers: list[int], plan: RowPlan, num_rollouts: int) -> None:
        args, mesh = self.args, self.mesh
        samples = [{name: data[name][number] for name in FIELDS if name in data} for number in numbers]
        samples = [{name: x.cpu() if isinstance(x, Tensor) else x for name, x in fields.items()} for fields in samples]
        table = [fields for part in mesh.gather_over_data(samples) for fields in part]
        tokens = sum(max(1, int(fields["loss_masks"].sum())) for fields in table)
        denominator = tokens if args.calculate_per_token_loss else num_rollouts
        metrics: dict[str, float] = {}

        def function(logprobs_BT: Tensor, entropy_BT: Tensor, sequences: np.ndarray) -> Tensor:
            chosen = [table[plan.computed[sequence]] for sequence in sequences]
            batch = {name: [fields[name] for fields in chosen] for name in chosen[0]}
            for name, values in batch.items():
                batch[name] = [x.to(self.device) if isinstance(x, Tensor) else x for x in values]
            batch["unconcat_tokens"] = batch["tokens"]
            outputs = {"log_probs": logprobs_BT, "entropy": entropy_BT}
            lengths = batch["response_lengths"]
            outputs = {name: [x[:n] for x, n in zip(xs, lengths, strict=True)] for name, xs in outputs.items()}
            value, log = self.loss(batch, outputs)
            for name, total in log.items():
                metrics[name] = metrics.get(name, 0.0) + float(total) / denominator
            return value / denominator

        self.optimizer.zero_grad()
        result = self.engine.forward_backward(plan.batch, SequenceLoss(function))
        outcome = self.optimizer.step(float(result.loss))
        everywhere = mesh.gather_from_all(metrics if mesh.tensor_rank == 0 else {})
        names = sorted({name for part in everywhere for name in part})
        log = {f"train/{name}": sum(part.get(name, 0.0) for part in everywhere) for name in names}
        log |= {"train/grad_norm": outcome.grad_norm, "train/step": self.step}
        log["train/token_reuse"] = result.sequence_tokens / max(1, result.computed_tokens)
        self.step += 1
        if mesh.rank == 0:
            self.log(log)

    # Weights

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write a checkpoint of this project into ``--save``."""
        save_checkpoint(self.args.save, self.config, self.model, self.optimizer, rollout_id + 1, {})
        if self.args.save_hf is not None:
            write_hf(self.config, self.model, Path(self.args.save_hf.format(rollout_id=rollout_id)), "--save-hf")

    def write_weights(self) -> Path:
        """Write the weights of the next version into ``--update-weight-disk-dir``; returns the folder."""
        self.weight_version += 1
        folder = Path(self.args.update_weight_disk_dir) / f"weight_v{self.weight_version:06d}"
        on_rank0(folder, lambda: shutil.rmtree(folder, ignore_errors=True))
        write_hf(self.config, self.model, folder, "--update-weight-disk-dir")
        return folder


def train_config(args: Any) -> TrainConfig:
    """This project's settings: the fields that ``args`` has too, such as ``lr`` and ``tensor_model_parallel_size``."""
    named = {"load_hf": args.hf_checkpoint, "hf_checkpoint": args.hf_checkpoint, "bf16": args.bf16}
    for topic, setting, default in settings_of(settings_from(named)):
        value = getattr(args, setting.name, None)
        value = DTYPES.get(value, value) if isinstance(value, torch.dtype) else value
        # Megatron fills in sizes of experts for every model.
        is_meant = args.num_experts is not None or "expert" not in setting.name
        if topic in ("optimization", "parallel", "tree") and value not in (None, default) and is_meant:
            named[setting.name] = value
    named["train_iters"] = args.num_rollout * args.rollout_batch_size * args.n_samples_per_prompt
    named["train_iters"] = max(1, named["train_iters"] // args.global_batch_size)
    config = settings_from(named)
    check_engine(config)
    return config


def row_of(data: dict[str, Any], number: int) -> Row:
    """A sample whose whole response is computed; the losses mask it themselves."""
    token_ids = data["tokens"][number].cpu().numpy().astype(np.int64)
    return Row(token_ids, np.arange(len(token_ids)) >= max(1, len(token_ids) - data["response_lengths"][number]))


def join_micro_batches(micro_batches: list[list[int]], counts: list[int]) -> list[list[int]]:
    """The samples of every optimizer step, of which ``counts`` says how many micro-batches it has."""
    ends = np.cumsum(counts)
    parts = [micro_batches[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return [[number for part in of_step for number in part] for of_step in parts]
