"""Ranks of verl's ``TrainingWorker`` with this project's engine; ``run_ranks`` starts them.

    torchrun --nproc-per-node N worker.py CASES OUTPUT

CASES is a JSON file with a list of cases, which the same processes run one after another, each on a mesh of its own.
Rank 0 writes the results of ``run_case`` to OUTPUT.
"""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import tensordict_utils
from verl.workers.config import DistillationLossConfig, HFModelConfig, McoreOptimizerConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, value_loss

import forked
from batches import BATCHES, random_rows
from megatron_dta.core.model.parallel.mesh import destroy_parallel
from megatron_dta.integrations.verl.config import (
    MegatronDtaActorConfig,
    MegatronDtaCriticConfig,
    MegatronDtaEngineConfig,
)
from megatron_dta.training.huggingface.save import hf_weights


def run_ranks(cases: list[dict[str, Any]], num_ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Run the cases on several processes and return what rank 0 found, in the order of the cases."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    for done in forked.run_ranks([__file__, folder / "cases.json", folder / "out.pt"], num_ranks):
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return torch.load(folder / "out.pt", weights_only=False)


def loss_of(case: dict[str, Any]) -> partial:
    """verl's loss function for the case."""
    if case.get("value_head"):
        return partial(value_loss, config=MegatronDtaCriticConfig(**_ROLE, **case.get("loss", {})))
    settings = dict(case.get("loss", {}))
    config = MegatronDtaActorConfig(**_ROLE, **{name: value for name, value in settings.items() if name != "loss_mode"})
    object.__setattr__(config.policy_loss, "loss_mode", settings.get("loss_mode", "vanilla"))
    if "distillation" in case:
        distillation = SimpleNamespace(distillation_loss=DistillationLossConfig(**case["distillation"]))
        return partial(distillation_ppo_loss, config=config, distillation_config=distillation)
    return partial(ppo_loss, config=config)


_ROLE = {"rollout_n": 1, "use_dynamic_bsz": True}


def mini_batches(case: dict[str, Any], data_size: int) -> list[list[list[int]]]:
    """Rows of every mini-batch and data-parallel rank, as ``train_mini_batch`` divides them."""
    per_rank, size = case["rows"] // data_size, case["mini_batch_size"] // data_size
    return [
        [list(range(rank * per_rank + begin, rank * per_rank + begin + size)) for rank in range(data_size)]
        for _ in range(case.get("epochs", 1))
        for begin in range(0, per_rank, size)
    ]


def build_worker(case: dict[str, Any]) -> TrainingWorker:
    """verl's worker with our engine and the weights of the case's model."""
    # A distributed optimizer would leave each rank a part of the reduced gradients.
    settings = {"use_distributed_optimizer": False, **case.get("engine", {})}
    optimizer = {"lr": 0.0, "weight_decay": 0.0, "clip_grad": 0.0, "total_training_steps": 10, **case.get("optim", {})}
    config = TrainingWorkerConfig(
        model_type="value_model" if case.get("value_head") else "language_model",
        model_config=HFModelConfig(
            path=case["model"], override_config={"attn_implementation": "sdpa"}, **case.get("model_settings", {})
        ),
        engine_config=MegatronDtaEngineConfig(dtype=case["dtype"], **settings),
        optimizer_config=McoreOptimizerConfig(**optimizer),
        checkpoint_config=CheckpointConfig(**case.get("checkpoint", {})),
    )
    worker = TrainingWorker(config)
    worker.reset()
    worker.set_loss_fn(loss_of(case))
    if case.get("value_head"):
        _set_head(worker.engine.model)
    return worker


def batch_of(case: dict[str, Any], rank: int, size: int, **common: Any) -> TensorDict:
    """The rows of a data-parallel rank."""
    per_rank = case["rows"] // size
    rank_rows = random_rows(case["seed"], case["rows"])[rank * per_rank : (rank + 1) * per_rank]
    return BATCHES[case["form"]](rank_rows, getattr(torch, case["dtype"]), **common)


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Compute logprobs and train on one batch.

    Returns:
        ``gradients`` of every mini-batch under Hugging Face's names, and ``ranks``: for every data-parallel rank its
        number, the outputs of its rows and its metrics.
    """
    worker = build_worker(case)
    engine = worker.engine
    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    entropy = not case.get("value_head")
    inferred = worker.infer_batch(batch_of(case, rank, size, compute_loss=False, calculate_entropy=entropy))
    gradients: list[dict[str, torch.Tensor]] = []
    reduce = engine.optimizer.reduce_gradients

    def recording_reduction() -> None:
        reduce()
        gradients.append(gradients_of(engine))

    engine.optimizer.reduce_gradients = recording_reduction
    common = {"global_batch_size": case["mini_batch_size"], "calculate_entropy": entropy}
    common |= {"mini_batch_size": case["mini_batch_size"], "epochs": case.get("epochs", 1)}
    trained = worker.train_mini_batch(batch_of(case, rank, size, **common))
    outputs = None
    if inferred is not None:
        names = [name for name in list(inferred.keys()) if name != "metrics"]
        outputs = {name: [row.clone() for row in inferred[name].unbind()] for name in names}
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    metrics = None if trained is None else tensordict_utils.get(trained, "metrics")
    torch.distributed.all_gather_object(gathered, (rank, outputs, metrics))
    ranks = sorted((entry for entry in gathered if entry[1] is not None), key=lambda entry: entry[0])
    return {"gradients": gradients, "ranks": ranks}


def run_weights(case: dict[str, Any]) -> dict[str, Any]:
    """Export the weights in all ways, changing one weight in between.

    Returns:
        ``tensors``: the whole tensors of ``get_per_tensor_param``, and ``changed``: the same after the change;
        ``shards`` and ``deltas``: for every rank what ``get_per_tensor_param_shard`` and, after the change,
        ``get_per_tensor_param_delta_shard`` yield.
    """
    engine = build_worker(case).engine
    tensors = {name: values.clone() for name, values in engine.get_per_tensor_param()[0]}
    engine.prime_delta_snapshots()
    rank_shards = [
        (name, values.clone(), spec.full_shape, spec.contributes, spec.place if spec.contributes else None)
        for name, values, spec in engine.get_per_tensor_param_shard()[0]
    ]
    for chunk in engine.tree_engine.tree_models:
        for name, parameter in chunk.named_parameters():
            if name.endswith("linear_fc1.weight"):
                parameter.data[1, 3] += 1
    deltas = [entry[:-1] for entry in engine.get_per_tensor_param_delta_shard()[0]]
    changed = {name: values.clone() for name, values in engine.get_per_tensor_param()[0]}
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, (rank_shards, deltas))
    shards, all_deltas = zip(*ranks, strict=True)
    return {"whole": tensors, "shards": shards, "deltas": all_deltas, "changed": changed}


KINDS = {"training": run_case, "weights": run_weights}


def main() -> None:
    """Run the cases that the command line names."""
    results = []
    for case in json.loads(Path(sys.argv[1]).read_text()):
        results.append(KINDS[case.get("kind", "training")](case))
        destroy_parallel()
    if torch.distributed.get_rank() == 0:
        torch.save(results, sys.argv[2])
    torch.distributed.barrier()


def gradients_of(engine: Any) -> dict[str, torch.Tensor]:
    """The gradient under Hugging Face's names: the gradient buffers take the place of the weights for a moment."""
    parameters = [parameter for chunk in engine.tree_engine.tree_models for parameter in chunk.parameters()]
    weights = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = parameter.main_grad
        exported = hf_weights(engine.settings, engine.model, engine.value_head).iterate()
        gradients = {name: values.clone().cpu() for name, values in exported}
        head = parameters[-1].data if engine.value_head else None
        return gradients if head is None or head.shape[0] != 1 else gradients | {"value_head": head[0].clone().cpu()}
    finally:
        for parameter, values in zip(parameters, weights, strict=True):
            parameter.data = values


def _set_head(model: torch.nn.Module) -> None:
    """Weights of the value head that the reference knows."""
    for chunk in model.model_chunks:
        for name, parameter in chunk.named_parameters():
            if name == "output_layer.weight":
                width = parameter.shape[1]
                begin = chunk.output_layer.begin
                parameter.data.copy_(head_weights(begin + width)[begin:])


def head_weights(width: int) -> torch.Tensor:
    """The reference's value head."""
    return torch.sin(torch.arange(width, dtype=torch.float64))


if __name__ == "__main__":
    main()
