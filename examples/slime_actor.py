"""Trains with slime on prefix trees: takes the arguments of slime's ``train.py`` and runs it with ``TreeActor``.

slime keeps its rollouts, rewards, advantages, losses and servers. See docs/integrations/slime_and_areal.md.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from slime.backends.megatron_utils import loss as slime_loss
from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
from slime.observability import logging_utils
from slime.ray.train_actor import TrainRayActor
from slime.utils.data import process_rollout_data
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from tree_actor import TreeTrainer, join_micro_batches

# Settings of slime that must have these values.
REQUIRED = {"rollout_top_p": 1.0, "update_weight_mode": "full", "update_weight_transport": "disk"}


class TreeActor(TreeTrainer, TrainRayActor):
    """See slime's ``TrainRayActor``."""

    def init(self, args: Any, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int:
        """Build the model; returns the number of the next rollout."""
        self.check(args, REQUIRED)
        super().init(args, role, with_ref, with_opd_teacher)
        # slime's losses call this function for the outputs of the logits. They get logprobs in the place of logits.
        slime_loss.get_log_probs_and_entropy = lambda outputs, **unused: (None, outputs)
        start = self.start(args, with_ref)
        if self.mesh.rank == 0:
            logging_utils.init_tracking(args, primary=False, role=role)
        return start

    def train(self, rollout_id: int, rollout_data_ref: Any, external_data: Any = None) -> None:
        """Take the optimizer steps of a rollout."""
        data = process_rollout_data(self.args, rollout_data_ref, self.mesh.data_rank, self.mesh.data_size)
        if "multimodal_train_inputs" in data:
            raise InputError("multimodal_train_inputs: images are not supported by TreeActor")
        steps = join_micro_batches(data["micro_batch_indices"], data["num_microbatches"])
        self.train_rollout(data, steps, data["global_batch_sizes"])

    def compute_advantages(self, data: dict[str, Any]) -> None:
        """slime's."""
        slime_loss.compute_advantages_and_returns(self.args, data)

    def loss(self, batch: dict[str, Any], outputs: dict[str, list[Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        """slime's."""
        args = self.args
        lengths = batch["total_lengths"], batch["response_lengths"]
        sums = batch["rollout_mask_sums"]
        mean = get_sum_of_sample_mean(*lengths, batch["loss_masks"], sums, args.calculate_per_token_loss)
        return getattr(slime_loss, f"{args.loss_type}_function")(args, batch, outputs, mean)

    def log(self, metrics: dict[str, float]) -> None:
        """slime's."""
        logging_utils.log(self.args, metrics, step_key="train/step")

    def update_weights(self) -> None:
        """Write the weights where ``RayTrainGroup`` lets the servers read them."""
        self.write_weights()


if __name__ == "__main__":
    from slime.utils.arguments import parse_args

    import train  # slime's train.py

    train.create_training_models = partial(train.create_training_models, actor_cls=TreeActor)
    train.train(parse_args())
