"""Batches in AReaL's form, and AReaL's combination of micro-batches written out over rows that run alone in float64."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_standin import provide_areal
from conversion_cases import COMMON

TEMPERATURE = 0.7
SETTINGS = {"tree_segment_tokens": 7, "logprob_chunk_tokens": 5}


def actor_config(folder: Path, **changes: Any) -> Any:
    """AReaL's ``PPOActorConfig``, or the fields of it that the engine reads."""
    optimizer = {"lr": 1e-3, "weight_decay": 0.0, "gradient_clipping": 0.0, "warmup_steps_proportion": 0.0}
    fields = {"path": str(folder), "dtype": "float64", "temperature": TEMPERATURE}
    fields |= {"experiment_name": "experiment", "trial_name": "trial"} | changes
    if provide_areal():
        from areal.api.cli_args import OptimizerConfig, PPOActorConfig

        dtype = fields.pop("dtype")
        config = PPOActorConfig(backend="megatron:d1", optimizer=OptimizerConfig(**optimizer), **fields)
        config.dtype = dtype  # AReaL's own check knows no float64
        return config
    defaults = {"type": "adam", "min_lr_ratio": 0.0, "lr_scheduler_type": "constant"}
    defaults |= {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    return SimpleNamespace(optimizer=SimpleNamespace(**defaults, **optimizer), **fields)


def random_batch(seed: int, count: int) -> dict[str, Tensor]:
    """A right-padded batch after ``compute_advantages``: rows share prompts and turns, tool output is not trained."""
    generator = np.random.default_rng(seed)
    vocabulary = COMMON["vocab_size"]
    prompts = [generator.integers(0, vocabulary, size) for size in (5, 8)]
    turns = [generator.integers(0, vocabulary, size) for size in (4, 6, 3)]
    rows, masks = [], []
    for index in range(count):
        prompt = prompts[generator.integers(2)]
        response = np.concatenate([*(turns[generator.integers(3)] for _ in range(2)), generator.integers(0, 9, 3)])
        trained = generator.random(len(response)) < 0.8
        trained[-1] = True
        # One row is rejected: nothing is trained of it.
        masks.append(np.concatenate([np.zeros(len(prompt), bool), trained & (index != 1)]))
        rows.append(np.concatenate([prompt, response]))
    width = max(map(len, rows)) + 2
    shape = (count, width)
    data = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "attention_mask", "loss_mask")}
    for index, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        data["input_ids"][index, : len(row)] = torch.from_numpy(row)
        data["attention_mask"][index, : len(row)] = 1
        data["loss_mask"][index, : len(row) - 1] = torch.from_numpy(mask[1:].astype(np.int64))
    for name, mean, spread in (("logprobs", -4.0, 0.3), ("prox_logp", -4.0, 0.3), ("advantages", 0.0, 1.0)):
        data[name] = torch.from_numpy(generator.normal(mean, spread, shape)) * data["loss_mask"]
    return data | {"rewards": torch.from_numpy(generator.normal(size=count))}


def ppo_loss(logprobs: Tensor, entropy: Tensor, data: dict[str, Any]) -> Tensor:
    """A decoupled PPO loss with ratios of whole rows, an entropy bonus, and the mean over trained positions."""
    mask = data["loss_mask"].bool()
    log_ratio = torch.where(mask, logprobs - data["prox_logp"], 0)
    bounds = data["cu_seqlens"].tolist()
    of_row = [log_ratio[a:b].sum() / mask[a:b].sum().clamp(min=1) for a, b in itertools.pairwise(bounds)]
    lengths = torch.tensor(np.diff(bounds))
    ratio = (0.5 * log_ratio + 0.5 * torch.stack(of_row).repeat_interleave(lengths)).exp()
    surrogate = torch.minimum(ratio * data["advantages"], ratio.clamp(0.8, 1.2) * data["advantages"])
    behaviour = (data["prox_logp"] - data["logprobs"]).exp()
    return torch.where(mask, -behaviour * surrogate - 0.05 * entropy, 0).sum() / mask.sum()


def count_trained(data: dict[str, Any]) -> Tensor:
    """AReaL's ``loss_weight_fn``."""
    return data["loss_mask"].count_nonzero()


def rows_of(data: dict[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    """Some rows of a padded batch."""
    return {name: value[begin:end] for name, value in data.items()}


def reference(stock: torch.nn.Module, data: dict[str, Tensor], loss: Any, size: int) -> tuple[float, Any, list[Tensor]]:
    """The loss of micro-batches of ``size`` rows, its gradients, and the logprobs of every row."""
    packed: list[dict[str, Any]] = []
    weights, losses, logprobs = [], [], []
    for begin in range(0, len(data["input_ids"]), size):
        part = rows_of(data, begin, begin + size)
        lengths = part["attention_mask"].sum(1).tolist()
        computed = [_alone(stock, ids[:length]) for ids, length in zip(part["input_ids"], lengths, strict=True)]
        packed.append({"cu_seqlens": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)})
        for name, values in part.items():
            if values.dim() == 2 and name != "attention_mask":
                packed[-1][name] = torch.cat([row[:length] for row, length in zip(values, lengths, strict=True)])
        weights.append(int(count_trained(packed[-1])))
        losses.append(loss(*(torch.cat(parts) for parts in zip(*computed, strict=True)), packed[-1]))
        logprobs += [actual.detach() for actual, _ in computed]
    total = sum(value * weight / sum(weights) for value, weight in zip(losses, weights, strict=True) if weight)
    total.backward()
    gradients = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    return float(total.detach()), gradients, logprobs


def _alone(stock: torch.nn.Module, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    length = len(token_ids)
    hidden_from = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    logits = stock(token_ids[None], torch.arange(length)[None], hidden_from)[0] / TEMPERATURE
    distribution = torch.log_softmax(logits, -1)
    # AReaL's label of the last position is that of no token; nothing may use it.
    logprobs = distribution.gather(1, token_ids.roll(-1)[:, None])[:, 0]
    return logprobs, -(distribution.exp() * distribution).sum(-1)


def make_actor(folder: Path, config: Any = None, **settings: Any) -> Any:
    """An initialized actor on this process's ranks."""
    config = config or actor_config(folder)
    from megatron_dta.integrations.areal.engine import TreePPOActor

    kind = type("Actor", (TreePPOActor,), {"settings": SETTINGS | settings})
    actor = kind(config)
    sizes = ("tensor", "pipeline", "context", "expert", "expert_tensor")
    actor.create_process_group(SimpleNamespace(**{f"{size}_parallel_size": 1 for size in sizes}))
    actor.initialize(None, SimpleNamespace(total_train_steps=10))
    return actor


def train_rank(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    """One step of a rank on its rows: the summed gradients, the loss, and the rank's logprobs before the step."""
    actor = make_actor(case["folder"])
    begin, end = case["rows"][rank]
    rank_rows = rows_of(case["data"], begin, end)
    logprobs = actor.forward_batch(rank_rows)
    return step(actor, rank_rows, case["loss"]) | {"logprobs": logprobs}


def step(actor: Any, data: Any, loss: Any) -> dict[str, Any]:
    """``train_batch``, and the gradients that it applied."""
    gradients: dict[str, Tensor] = {}
    reduce = actor.optimizer.reduce_gradients

    def recording() -> None:
        reduce()
        for name, parameter in actor.model.named_parameters():
            gradients[name] = parameter.main_grad.clone()

    actor.optimizer.reduce_gradients = recording
    stats = actor.train_batch(data, loss, count_trained)
    assert math.isfinite(stats["grad_norm"])
    return {"gradients": gradients, "loss": actor._loss, "stats": stats}
