"""A rank of verl's ``TrainingWorker`` with this project's engine, started by torchrun; ``run_ranks`` starts the ranks.

    torchrun --nproc-per-node N worker.py CASE OUTPUT

CASE is a JSON file with the fields that ``main`` reads. Rank 0 writes to OUTPUT the gradient of every mini-batch under
Hugging Face's names, the metrics, and the rows' outputs from a pass without gradients.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import HFModelConfig, McoreOptimizerConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, value_loss

from batches import BATCHES, random_rows
from megatron_dta.integrations.verl.config import (
    MegatronDtaActorConfig,
    MegatronDtaCriticConfig,
    MegatronDtaEngineConfig,
)
from megatron_dta.training.weights.huggingface import hf_weights


def run_ranks(case: dict[str, Any], num_ranks: int, folder: Path) -> dict[str, Any]:
    """Run ``case`` on several processes and return what rank 0 wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "case.json").write_text(json.dumps(case))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, __file__, str(folder / "case.json"), str(folder / "out.pt")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return torch.load(folder / "out.pt", weights_only=False)


def loss_of(case: dict[str, Any]) -> partial:
    """verl's loss function for the case."""
    if case.get("value_head"):
        return partial(value_loss, config=MegatronDtaCriticConfig(**_ROLE, **case.get("loss", {})))
    settings = dict(case.get("loss", {}))
    config = MegatronDtaActorConfig(**_ROLE, **{name: value for name, value in settings.items() if name != "loss_mode"})
    object.__setattr__(config.policy_loss, "loss_mode", settings.get("loss_mode", "vanilla"))
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


def main() -> None:
    """Run the case that the command line names."""
    case = json.loads(Path(sys.argv[1]).read_text())
    dtype = getattr(torch, case["dtype"])
    # A distributed optimizer would leave each rank a part of the reduced gradients.
    settings = {"use_distributed_optimizer": False, **case.get("engine", {})}
    engine_config = MegatronDtaEngineConfig(dtype=case["dtype"], **settings)
    config = TrainingWorkerConfig(
        model_type="value_model" if case.get("value_head") else "language_model",
        model_config=HFModelConfig(path=case["model"], override_config={"attn_implementation": "sdpa"}),
        engine_config=engine_config,
        optimizer_config=McoreOptimizerConfig(lr=0.0, weight_decay=0.0, clip_grad=0.0, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    worker = TrainingWorker(config)
    worker.reset()
    worker.set_loss_fn(loss_of(case))
    engine = worker.engine
    if case.get("value_head"):
        _set_head(engine.model)
    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    per_rank = case["rows"] // size
    own = random_rows(case["seed"], case["rows"])[rank * per_rank : (rank + 1) * per_rank]
    make = BATCHES[case["form"]]
    entropy = not case.get("value_head")
    inferred = worker.infer_batch(make(own, dtype, compute_loss=False, calculate_entropy=entropy))
    gradients: list[dict[str, torch.Tensor]] = []
    reduce = engine.optimizer.reduce_gradients

    def recording_reduction() -> None:
        reduce()
        gradients.append(_gradients(engine))

    engine.optimizer.reduce_gradients = recording_reduction
    common = {"global_batch_size": case["mini_batch_size"], "calculate_entropy": entropy}
    common |= {"mini_batch_size": case["mini_batch_size"], "epochs": case.get("epochs", 1)}
    trained = worker.train_mini_batch(make(own, dtype, **common))
    outputs = None
    if inferred is not None:
        outputs = {
            name: [row.clone() for row in inferred[name].unbind()]
            for name in list(inferred.keys())
            if name != "metrics"
        }
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    metrics = None if trained is None else tensordict_utils.get(trained, "metrics")
    torch.distributed.all_gather_object(gathered, (rank, outputs, metrics))
    if torch.distributed.get_rank() == 0:
        with_outputs = sorted((entry for entry in gathered if entry[1] is not None), key=lambda entry: entry[0])
        torch.save({"gradients": gradients, "ranks": with_outputs}, sys.argv[2])
    torch.distributed.barrier()


def _gradients(engine: Any) -> dict[str, torch.Tensor]:
    """The gradient under Hugging Face's names: the gradient buffers take the place of the weights for a moment."""
    parameters = [parameter for chunk in engine.tree_engine.tree_models for parameter in chunk.parameters()]
    weights = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = parameter.main_grad
        found = hf_weights(engine.settings, engine.model, engine.value_head).iterate()
        gradients = {name: values.clone().cpu() for name, values in found}
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
