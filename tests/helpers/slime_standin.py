"""A stand-in for slime where it is not installed: what ``examples/slime_actor.py`` imports from it.

Functions have the signatures of slime at commit 624b824 and are written for settings without context parallelism.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class TrainRayActor:
    """slime's base class starts torch.distributed and notes the arguments."""

    def init(self, args: Any, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> None:
        self.args, self.role = args, role


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


def compute_advantages_and_returns(args: Any, data: dict[str, Any]) -> None:
    """GRPO: every token has the reward of its sample."""
    rewards = zip(data["rewards"], data["loss_masks"], strict=True)
    data["advantages"] = data["returns"] = [torch.full(mask.shape, reward) for reward, mask in rewards]


def policy_loss_function(args: Any, batch: dict, logits: Any, mean: Callable) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss with an entropy bonus and a penalty (k3) against the reference."""
    module = sys.modules["slime.backends.megatron_utils.loss"]
    lengths = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    _, outputs = module.get_log_probs_and_entropy(logits, args=args, with_entropy=True, **lengths)
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


def provide_slime() -> None:
    """Make ``import slime`` work."""
    if "slime" in sys.modules or importlib.util.find_spec("slime") is not None:
        return
    published = {
        "slime.backends.megatron_utils.loss": {
            "compute_advantages_and_returns": compute_advantages_and_returns,
            "policy_loss_function": policy_loss_function,
            "sft_loss_function": None,
        },
        "slime.backends.megatron_utils.cp_utils": {"get_sum_of_sample_mean": get_sum_of_sample_mean},
        "slime.observability.logging_utils": {"init_tracking": None, "log": None},
        "slime.ray.train_actor": {"TrainRayActor": TrainRayActor},
        "slime.utils.data": {"process_rollout_data": None},
    }
    for path, contents in published.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            sys.modules.setdefault(name, types.ModuleType(name))
            if depth > 1:
                setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], sys.modules[name])
        vars(sys.modules[path]).update(contents)
