"""Stand-ins for slime and Miles where they are not installed: what ``examples/*_actor.py`` import from them.

Functions have the signatures of slime at commit 624b824 and of Miles at commit 31f1ca9 and are written for settings
without context parallelism.
"""

import importlib.util
import sys
import types
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

MILES_LOSSES = "miles.backends.training_utils.loss_hub.losses"


class TrainRayActor:
    """The base class starts torch.distributed and notes the arguments."""

    def init(self, args: Any, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> None:
        self.args, self.role, self._heartbeat = args, role, SimpleNamespace(bump=lambda: None)


def get_sum_of_sample_mean(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list, denominators: Any, per_token: bool = False
) -> Callable[[Tensor], Tensor]:
    """The sum over samples of the masked values, each divided by its rollout's number of trained tokens."""

    def reduce(values: Tensor) -> Tensor:
        sums = [(x * mask).sum() for x, mask in zip(values.split(response_lengths), loss_masks, strict=True)]
        if per_token:
            return sum(sums)
        return sum(x / denominator.clamp(min=1) for x, denominator in zip(sums, denominators, strict=True))

    return reduce


def miles_mean(total, lengths, masks, per_token=False, qkv_format="thd", max_seq_lens=None, *, denominators=None):
    """The same with Miles' signature."""
    return get_sum_of_sample_mean(total, lengths, masks, denominators, per_token)


def compute_advantages_and_returns(args: Any, rollout_data: dict[str, Any]) -> None:
    """GRPO: every token has the reward of its sample."""
    rewards = zip(rollout_data["rewards"], rollout_data["loss_masks"], strict=True)
    rollout_data["advantages"] = rollout_data["returns"] = [torch.full(mask.shape, reward) for reward, mask in rewards]


def policy_loss(module: str, args: Any, batch: dict, logits: Any, mean: Callable) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss with an entropy bonus and a penalty (k3) against the reference."""
    lengths = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    outputs = sys.modules[module].get_log_probs_and_entropy(logits, args=args, with_entropy=True, **lengths)
    outputs = outputs[1] if isinstance(outputs, tuple) else outputs
    logprobs, advantages = torch.cat(outputs["log_probs"]), torch.cat(batch["advantages"])
    old = torch.cat(batch["rollout_log_probs"] if args.use_rollout_logprobs else batch["log_probs"])
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    loss = mean(torch.maximum(-ratio * advantages, -clipped * advantages))
    loss = loss - args.entropy_coef * mean(torch.cat(outputs["entropy"]))
    if args.use_kl_loss:
        difference = torch.cat(batch["ref_log_probs"]) - logprobs
        loss = loss + args.kl_loss_coef * mean(difference.exp() - 1 - difference)
    return loss, {"loss": loss.detach()}


def get_data_iterator(args: Any, model: Any, data: dict[str, Any]) -> tuple[list[Any], list[int]]:
    """The schedule that the rollout side made."""
    indices = data["micro_batch_indices"]
    return [SimpleNamespace(micro_batch_indices=indices, micro_batch_size=None)], data["num_microbatches"]


SLIME_LOSS = "slime.backends.megatron_utils.loss"
TRACKING = {"init_tracking": None, "log": None}
PUBLISHED = {
    SLIME_LOSS: {
        "compute_advantages_and_returns": compute_advantages_and_returns,
        "policy_loss_function": partial(policy_loss, SLIME_LOSS),
    },
    "slime.backends.megatron_utils.cp_utils": {"get_sum_of_sample_mean": get_sum_of_sample_mean},
    "slime.observability.logging_utils": TRACKING,
    "slime.ray.train_actor": {"TrainRayActor": TrainRayActor},
    "slime.utils.data": {"process_rollout_data": None},
    "ray": {},
    "miles.backends.megatron_utils.ft.types": {"TrainStepOutcome": SimpleNamespace(NORMAL="normal")},
    "miles.backends.training_utils.cp_utils": {"get_sum_of_sample_mean": miles_mean},
    "miles.backends.training_utils.data": {
        "get_data_iterator": get_data_iterator,
        "get_num_rollouts": lambda args, data, num_steps: data["num_rollouts"],
        "get_rollout_data": None,
    },
    "miles.backends.training_utils.loss": {"compute_advantages_and_returns": compute_advantages_and_returns},
    MILES_LOSSES: {"get_loss_function": lambda args: partial(policy_loss, MILES_LOSSES)},
    "miles.backends.training_utils.parallel": {"ParallelState": SimpleNamespace, "set_parallel_state": id},
    "miles.ray.train_actor": {"TrainRayActor": TrainRayActor},
    "miles.utils.ft_utils.process_group_utils": {"GroupInfo": lambda *fields: fields},
    "miles.utils.tracking_utils.tracking": TRACKING,
}


def provide(*packages: str) -> None:
    """Make ``import`` of slime, or of Miles and Ray, work."""
    missing = [name for name in packages if name not in sys.modules and importlib.util.find_spec(name) is None]
    for path, contents in PUBLISHED.items():
        parts = path.split(".")
        if parts[0] not in missing:
            continue
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            sys.modules.setdefault(name, types.ModuleType(name))
        vars(sys.modules[path]).update(contents)
