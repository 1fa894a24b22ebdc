"""Rollouts in the form of slime and Miles, and their policy loss over samples that run alone in float64."""

import sys
import types
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from conftest import REPOSITORY
from conversion_cases import COMMON
from slime_standins import TrainRayActor, provide
from tool_runs import load_script

TEMPERATURE = 0.7
# Local numbers of every rank's samples in each optimizer step and micro-batch, as slime's scheduler divides them.
RANKS = {1: [[[[0, 3], [1, 2]], [[4, 5, 6, 7]]]], 2: [[[[0], [1]], [[2, 3]]], [[[0], [1]], [[2, 3]]]]}


def arguments(folder: Path, **changes: Any) -> SimpleNamespace:
    """Arguments of slime and Miles that the actors and the losses read."""
    required = [load_example(package).REQUIRED for package in ("slime", "miles")]
    off = "calculate_per_token_loss use_tis use_opsm get_mismatch_metrics use_rollout_logprobs use_unbiased_kl bf16"
    off += " normalize_advantages use_kl_loss use_distributed_optimizer recompute_loss_function"
    off += " skip_actor_forward_only observe_training_entropy use_dynamic_global_batch_size"
    none = "custom_advantage_function_path eps_clip_c save save_hf num_experts custom_tis_function_path"
    none += " custom_pg_loss_reducer_function_path"
    settings = dict.fromkeys(off.split(" "), False) | dict.fromkeys(none.split(" "))
    settings |= {**required[0], **required[1], **sys.modules["tree_actor"].REQUIRED}
    settings |= {"lr": 0.0, "weight_decay": 0.0, "clip_grad": 0.0, "seed": 1, "pause_generation_mode": "retract"}
    settings |= {"rollout_temperature": TEMPERATURE, "loss_type": "policy_loss", "advantage_estimator": "grpo"}
    settings |= {"eps_clip": 0.2, "eps_clip_high": 0.28, "entropy_coef": 0.05, "kl_coef": 0.0, "kl_loss_coef": 0.1}
    settings |= {"kl_loss_type": "low_var_kl", "num_rollout": 1, "rollout_batch_size": 4, "n_samples_per_prompt": 2}
    settings |= {"global_batch_size": 4, "tree_segment_tokens": 7, "compute_advantages_and_returns": True}
    settings |= {"main_grads_dtype": torch.float32, "exp_avg_dtype": torch.float32, "expert_tensor_parallel_size": 1}
    settings |= {"update_weight_disk_dir": "weights", "hf_checkpoint": str(folder), "ref_load": str(folder)}
    return SimpleNamespace(**settings | changes)


def random_samples(seed: int) -> list[dict[str, Any]]:
    """8 samples of 6 rollouts; a rollout may have several samples, whose tokens have one common denominator."""
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(0, COMMON["vocab_size"], size) for size in (5, 7)]
    turn = generator.integers(0, COMMON["vocab_size"], 6)
    samples = []
    for index in range(8):
        response = np.append(turn[: generator.integers(2, 7)], generator.integers(0, 9, 3))
        mask = generator.random(len(response)) < 0.7
        mask[-1] = index != 1
        samples.append(
            {
                "tokens": torch.from_numpy(np.append(prompts[index % 2], response)),
                "response_lengths": len(response),
                "total_lengths": len(prompts[index % 2]) + len(response),
                "loss_masks": torch.from_numpy(mask.astype(np.int32)),
                "rewards": int(generator.integers(-9, 9)) / 8,  # exact in the float32 of slime's advantages
                "rollout_log_probs": torch.from_numpy(generator.normal(-4, 0.3, len(response))),
            }
        )
    rollouts = [0, 1, 2, 3, 2, 4, 5, 5]
    for index, sample in enumerate(samples):
        same = [other for other, rollout in zip(samples, rollouts, strict=True) if rollout == rollouts[index]]
        sample["rollout_mask_sums"] = torch.tensor(float(sum(int(other["loss_masks"].sum()) for other in same)))
    return samples


def data_of_rank(samples: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """What slime's ``process_rollout_data`` and Miles' ``get_rollout_data`` return on a rank."""
    rank_samples = samples[rank * len(samples) // size : (rank + 1) * len(samples) // size]
    data: dict[str, Any] = {name: [sample[name] for sample in rank_samples] for name in samples[0]}
    data["rollout_mask_sums"] = torch.stack(data["rollout_mask_sums"])
    steps = RANKS[size][rank]
    return data | {
        "micro_batch_indices": [part for step in steps for part in step],
        "num_microbatches": [len(step) for step in steps],
        "global_batch_sizes": [4, 3],  # slime's name
        "num_rollouts": [4, 3],  # Miles'
    }


def load_example(package: str) -> types.ModuleType:
    """``examples/slime_actor.py`` or ``examples/miles_actor.py``."""
    provide(package, "ray")
    with mock.patch.object(sys, "path", [str(REPOSITORY / "examples"), *sys.path]):
        return load_script(f"examples/{package}_actor.py")


def train(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    """The optimizer steps of a rollout: loss and gradients of each. Ray and the devices are left out."""
    module, size, args = load_example(case["package"]), case["size"], case["args"]
    is_miles, data = case["package"] == "miles", data_of_rank(case["samples"], rank, size)
    shared, tracking = sys.modules["tree_actor"], module.tracking if is_miles else module.logging_utils
    settings, logged, gradients = shared.train_config, [], []

    def in_float64(args: Any) -> Any:
        config = settings(args)
        return replace(config, model=replace(config.model, params_dtype=torch.float64))

    reader, found = ("get_rollout_data", (data, nullcontext())) if is_miles else ("process_rollout_data", data)
    with ExitStack() as stack:
        for owner, name, value in (
            (shared, "train_config", in_float64),
            (module.TrainRayActor, "init", TrainRayActor.init),
            (module, reader, lambda *arguments, **named: found),
            (tracking, "init_tracking", lambda args, primary, role=None: None),
            (tracking, "log", lambda args, metrics, step_key: logged.append(metrics)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        actor = object.__new__(module.TreeActor)
        # As RayTrainCell and RayTrainGroup call it.
        cell = {"indep_dp_info": None, "recv_ckpt_src_rank": None} if is_miles else {}
        assert actor.init(args=args, role="actor", with_ref=args.use_kl_loss, with_opd_teacher=False, **cell) == 0
        reduce = actor.optimizer.reduce_gradients

        def recording() -> None:
            reduce()
            gradients.append({name: p.main_grad.clone() for name, p in actor.model.named_parameters()})

        actor.optimizer.reduce_gradients = recording
        attempt = {"witness_info": None, "attempt": 0} if is_miles else {}
        outcome = actor.train(rollout_id=0, rollout_data_ref=None, **attempt)
        assert outcome == (module.TrainStepOutcome.NORMAL if is_miles else None)
    outcome = {"gradients": gradients, "logged": logged, "config": actor.config}
    return outcome | ({"actor": actor} if size == 1 else {})


def reference(stock: torch.nn.Module, samples: list[dict[str, Any]], args: Any, step: int, size: int) -> tuple:
    """Loss and gradients of an optimizer step of slime."""
    per_rank = len(samples) // size
    numbers = [rank * per_rank + n for rank in range(size) for part in RANKS[size][rank][step] for n in part]
    stock.zero_grad()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for number in numbers:
        sample = samples[number]
        begin = sample["total_lengths"] - sample["response_lengths"]
        token_ids, length = sample["tokens"], sample["total_lengths"]
        hidden_from = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        logits = stock(token_ids[None], torch.arange(length)[None], hidden_from)[0] / TEMPERATURE
        distribution = torch.log_softmax(logits, -1)[begin - 1 : -1]
        logprobs = distribution.gather(1, token_ids[begin:, None])[:, 0]
        old = sample["rollout_log_probs"] if args.use_rollout_logprobs else logprobs.detach()
        ratio = (logprobs - old).exp()
        loss = -torch.minimum(ratio * sample["rewards"], ratio.clamp(0.8, 1.28) * sample["rewards"])
        loss = loss + 0.05 * (distribution.exp() * distribution).sum(-1)
        if args.use_kl_loss:  # the reference is the model itself
            loss = loss + 0.1 * ((logprobs.detach() - logprobs).exp() - 1 - logprobs.detach() + logprobs)
        loss = (loss * sample["loss_masks"]).sum()
        tokens += max(1, int(sample["loss_masks"].sum()))
        total = total + (loss if args.calculate_per_token_loss else loss / sample["rollout_mask_sums"].clamp(min=1))
    total = total / (tokens if args.calculate_per_token_loss else [4, 3][step])
    total.backward()
    return float(total.detach()), {name: p.grad.clone() for name, p in stock.named_parameters() if p.grad is not None}
