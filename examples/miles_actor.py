"""Trains with Miles on prefix trees: takes the arguments of its ``train.py`` and runs it with ``TreeActor``.

Miles keeps its rollouts, sessions, rewards, advantages, losses and servers. See docs/integrations/slime_and_areal.md.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ray
from megatron.core import parallel_state
from miles.backends.megatron_utils.ft.types import TrainStepOutcome
from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean
from miles.backends.training_utils.data import get_data_iterator, get_num_rollouts, get_rollout_data
from miles.backends.training_utils.loss import compute_advantages_and_returns
from miles.backends.training_utils.loss_hub import losses
from miles.backends.training_utils.parallel import ParallelState, set_parallel_state
from miles.ray.train_actor import TrainRayActor
from miles.utils.ft_utils.process_group_utils import GroupInfo
from miles.utils.tracking_utils import tracking
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.parallel.mesh import Mesh
from megatron_dta.training.checkpoint.writer import refusing_on_all
from megatron_dta.training.huggingface.save import write_hf
from tree_actor import TreeTrainer, join_micro_batches

# Settings of Miles that must have these values.
REQUIRED = {"train_backend": "megatron", "qkv_format": "thd", "true_on_policy_mode": False, "multi_lora": False}
REQUIRED |= {"lora_rank": 0, "indep_dp": False, "enable_witness": False, "enable_mtp_training": False}
REQUIRED |= {"use_rollout_routing_replay": False, "use_indexer_replay": False, "use_rollout_indexer_replay": False}
REQUIRED |= {"colocate": False, "update_weight_transfer_mode": "broadcast", "debug_skip_weight_update": False}
REQUIRED |= dict.fromkeys(("custom_megatron_before_log_prob_hook_path", "custom_megatron_before_train_step_hook_path"))
REQUIRED |= dict.fromkeys(("custom_megatron_init_path", "custom_megatron_post_save_hook_path"))
REQUIRED |= {"custom_model_provider_path": None, "use_rollout_entropy": False}


class TreeActor(TreeTrainer, TrainRayActor):
    """See Miles' ``TrainRayActor`` and ``MegatronTrainRayActor``, whose place it takes."""

    def init(
        self,
        args: Any,
        role: str,
        *,
        with_ref: bool = False,
        with_opd_teacher: bool = False,
        recv_ckpt_src_rank: int | None = None,
        indep_dp_info: Any,
    ) -> int:
        """Build the model; returns the number of the next rollout."""
        self.check(args, REQUIRED)
        if args.update_weight_disk_dir is None:
            raise InputError("--update-weight-disk-dir: give a folder that the trainer and the servers share")
        super().init(args, role, with_ref, with_opd_teacher)
        # Miles' losses call this function for the outputs of the logits. They get logprobs in the place of logits.
        losses.get_log_probs_and_entropy = lambda outputs, **unused: outputs
        start = self.start(args, with_ref)
        set_parallel_state(state_of(self.mesh))
        if self.mesh.rank == 0:
            tracking.init_tracking(args, primary=False)
        return start

    def train(
        self,
        rollout_id: int,
        rollout_data_ref: Any,
        witness_info: Any = None,
        attempt: int = 0,
        external_data: Any = None,
    ) -> TrainStepOutcome:
        """Take the optimizer steps of a rollout."""
        args = self.args
        self._heartbeat.bump()
        data, stored = get_rollout_data(args, rollout_data_ref, witness_info=witness_info)
        with stored:
            if "multimodal_train_inputs" in data:
                raise InputError("multimodal_train_inputs: images are not supported by TreeActor")
            (iterator,), counts = get_data_iterator(args, [], data)
            micro_batches, size = iterator.micro_batch_indices, iterator.micro_batch_size
            if micro_batches is None:
                micro_batches = [list(range(i * size, (i + 1) * size)) for i in range(sum(counts))]
            sizes = get_num_rollouts(args, data, len(counts))
            self.train_rollout(data, join_micro_batches(micro_batches, counts), sizes)
        self._heartbeat.bump()
        return TrainStepOutcome.NORMAL

    def compute_advantages(self, data: dict[str, Any]) -> None:
        """Miles'."""
        compute_advantages_and_returns(self.args, data)

    def loss(self, batch: dict[str, Any], outputs: dict[str, list[Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        """Miles'."""
        args, sums = self.args, batch.get("rollout_mask_sums")
        lengths = batch["total_lengths"], batch["response_lengths"]
        mean = get_sum_of_sample_mean(
            *lengths, batch["loss_masks"], args.calculate_per_token_loss, args.qkv_format, denominators=sums
        )
        return losses.get_loss_function(args)(args, batch, outputs, mean)

    def log(self, metrics: dict[str, float]) -> None:
        """Miles'."""
        tracking.log(self.args, metrics, step_key="train/step")

    def export_hf(self, rollout_id: int, path: str) -> None:
        """Write the weights for an evaluation."""
        write_hf(self.config, self.model, Path(path), "export_hf")

    def update_weights(self, info: Any) -> None:
        """Write the weights and let the servers read them."""
        self._heartbeat.bump()
        folder = self.write_weights()
        with refusing_on_all():
            if self.mesh.rank == 0:
                self._reload(info, folder)

    def _reload(self, info: Any, folder: Path) -> None:
        """The calls of ``UpdateWeightFromDiskDelta``, for a folder of whole weights."""
        mode, engines = self.args.pause_generation_mode, info.rollout_engines
        if info.has_new_engines:
            ray.get(self.rollout_manager.clear_updatable_has_new_engines.remote())
        ray.get([engine.pause_generation.remote(mode=mode) for engine in engines])
        if mode != "in_place":
            ray.get([engine.flush_cache.remote() for engine in engines])
        source = {"model_path": str(folder), "weight_version": str(self.weight_version)}
        for answer in ray.get([engine.update_weights_from_disk.remote(**source) for engine in engines]):
            if not answer.get("success", True):
                raise InputError(f"{folder}: a server could not read the weights: {answer}")
        ray.get([engine.continue_generation.remote() for engine in engines])
        ray.get(self.rollout_manager.set_weight_version.remote(self.weight_version))
        shutil.rmtree(folder.parent / f"weight_v{self.weight_version - 1:06d}", ignore_errors=True)


def state_of(mesh: Mesh) -> ParallelState:
    """Miles' parallel state: every rank of a replica has all logprobs, so only data-parallel ranks differ."""
    alone = dict.fromkeys(("cp", "tp", "pp", "ep", "etp", "indep_dp"), GroupInfo(0, 1, None))
    data = GroupInfo(mesh.data_rank, mesh.data_size, parallel_state.get_data_parallel_group())
    return ParallelState(intra_dp=data, intra_dp_cp=data, **alone)


if __name__ == "__main__":
    import asyncio

    from miles.backends.megatron_utils import actor
    from miles.utils.arguments import parse_args
    from miles.utils.tracking_utils.tracking import finish_tracking

    import train  # Miles' train.py

    # ``actor_factory.allocate_gpus_for_actor`` looks the actor up there.
    actor.MegatronTrainRayActor = TreeActor
    try:
        asyncio.run(train.train(parse_args()))
    finally:
        finish_tracking()
