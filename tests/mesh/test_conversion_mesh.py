"""Hugging Face weights on a mesh: every rank reads its parts, all ranks export the whole, training saves it."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import assert_equal_tensors, seed_all
from conversion_cases import (
    architecture_in,
    save_huggingface,
    settings_of,
    shape_of,
    tensors_in,
    to_huggingface,
    to_megatron,
)
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.huggingface.files import prefix_in
from megatron_dta.training.huggingface.weights import HfWeights
from mesh_worker import run_on_ranks
from trainer_cases import make_rollouts

ONE = ParallelConfig()
TP2 = ParallelConfig(tensor_model_parallel_size=2)
PP2 = ParallelConfig(pipeline_model_parallel_size=2)
MODELS = ("llama", "qwen2-tied", "qwen3-tied")
EP2 = ParallelConfig(expert_model_parallel_size=2)
SP2 = replace(EP2, tensor_model_parallel_size=2, sequence_parallel=True)
EXPERTS = [
    ("mixtral", replace(EP2, pipeline_model_parallel_size=2)),
    ("nemotron-3", SP2),
    ("nemotron-3", PP2),
    ("qwen3-moe-some", replace(SP2, expert_model_parallel_size=4, expert_tensor_parallel_size=1)),
]


def on_mesh(rank: int, jobs: list[tuple[Path, ParallelConfig]]) -> list[dict[str, Any]]:
    """Load each folder ``hf``, and its conversion ``megatron``, on the mesh; then export."""
    from megatron_dta.core.model.build import build_model
    from megatron_dta.core.model.parallel.mesh import current_mesh, destroy_parallel, initialize_parallel
    from megatron_dta.training.checkpoint.save_load import load_weights, save_weights

    results = []
    for folder, parallel in jobs:
        destroy_parallel()
        device = initialize_parallel(3, parallel)
        config = ModelConfig(**settings_of(folder / "hf"))
        model = build_model(config, device, parallel)
        weights = HfWeights(
            list(getattr(model, "model_chunks", [model])),
            architecture_in(folder / "hf"),
            shape_of(folder / "hf"),
            current_mesh().host_group,
            prefix=prefix_in(folder / "hf"),
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        weights.load(folder / "hf")
        loaded = [parameter.detach().clone() for parameter in model.parameters()]
        shards = [(s.name, s.shape, s.offsets, s.values.clone()) for s in weights.iterate_shards()]
        first = {name: values.clone() for name, values in weights.iterate(to_all=False)}
        everywhere = {name: values.clone() for name, values in weights.iterate()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        load_weights(folder / "megatron" / "release", config, model)
        same = all(torch.equal(a, b) for a, b in zip(loaded, model.parameters(), strict=True))
        saved = folder / f"saved-{len(results)}"
        save_weights(saved, TrainConfig(model=config, parallel=parallel), model)
        results.append({"same": same, "shards": shards, "first": first, "all": everywhere, "saved": saved})
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder_of_case = {}
    for index, case in enumerate(MODELS):
        folder_of_case[case] = tmp_path_factory.mktemp(case)
        save_huggingface(folder_of_case[case] / "hf", case, 20 + index)
        to_megatron(folder_of_case[case] / "hf", folder_of_case[case] / "megatron")
    return folder_of_case


def check_mesh(folders: dict[str, Path], cases: list[tuple[str, ParallelConfig]], world: int, folder: Path) -> None:
    jobs = [(folders[case], parallel) for case, parallel in cases]
    results = run_on_ranks(on_mesh, jobs, world, folder)
    for index, (source, _) in enumerate(jobs):
        ranks, expected = [result[index] for result in results], tensors_in(source / "hf")
        covered = {name: torch.zeros_like(values) for name, values in expected.items()}
        for rank, rank_result in enumerate(ranks):
            assert rank_result["same"]
            assert_equal_tensors(rank_result["all"], expected)
            assert_equal_tensors(rank_result["first"], expected if rank == 0 else {})
            for name, shape, offsets, values in rank_result["shards"]:
                assert shape == tuple(expected[name].shape)
                where = tuple(slice(start, start + size) for start, size in zip(offsets, values.shape, strict=True))
                assert torch.equal(expected[name][where], values), name
                covered[name][where] += 1
        assert all((counts >= 1).all() for counts in covered.values())
        back = to_huggingface(ranks[0]["saved"], source / "hf", folder / f"back{index}")
        assert_equal_tensors(tensors_in(back), expected)


def test_two_ranks(folders: dict[str, Path], tmp_path: Path) -> None:
    cases = [("llama", TP2), ("qwen3-tied", PP2), ("qwen2-tied", ONE)]
    check_mesh(folders, cases, 2, tmp_path)


def test_experts_on_four_ranks(tmp_path: Path) -> None:
    """Divided among data-parallel ranks, tensor ranks and stages, in the model that is trained."""
    folders = {}
    for index, case in enumerate(("mixtral", "qwen3-moe-some", "nemotron-3")):
        folders[case] = tmp_path / case
        save_huggingface(folders[case] / "hf", case, 40 + index)
        to_megatron(folders[case] / "hf", folders[case] / "megatron")
    check_mesh(folders, EXPERTS, 4, tmp_path / "run")


FLAGS = "--rollouts {0}/rollouts.jsonl --global-batch-size 8 --train-iters 2 --lr 1e-3 --tree-segment-tokens 9"


def train(rank: int, commands: list[str]) -> list[tuple[dict[str, torch.Tensor], str]]:
    """Run commands one after another; the trained weights under Hugging Face's names, and what was printed."""
    import os

    from megatron_dta.common.console import Console
    from megatron_dta.core.model.parallel.mesh import destroy_parallel
    from megatron_dta.training.huggingface.save import hf_weights
    from megatron_dta.wiring.setup import build_trainer

    os.environ["WORLD_SIZE"] = str(torch.distributed.get_world_size()) if torch.distributed.is_initialized() else "1"
    results = []
    for command in commands:
        if torch.distributed.is_initialized():
            destroy_parallel()
        output = io.StringIO()
        trainer = build_trainer(parse_arguments(command.split()), Console(file=output, width=300))
        trainer.run()
        trainer.metrics.close()
        weights = hf_weights(trainer.config, trainer.model).iterate()
        results.append(({name: values.detach().clone() for name, values in weights}, output.getvalue()))
    return results


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    save_huggingface(folder / "hf", "qwen3", 40)
    write_rollouts(folder / "rollouts.jsonl", make_rollouts(seed_all(41), 2, 4))
    return folder


def test_training_starts_from_and_leaves_a_checkpoint(run_folder: Path, tmp_path: Path) -> None:
    """On a mesh and on one process; what is saved loads in transformers and computes what was trained."""
    import transformers

    command = f"{FLAGS.format(run_folder)} --load-hf {run_folder}/hf --save-hf"
    together = run_on_ranks(train, [f"{command} {tmp_path}/mesh --tensor-model-parallel-size 2"], 2, tmp_path / "run")
    (trained, printed), *_ = run_on_ranks(train, [f"{command} {tmp_path}/one"], 1, tmp_path / "run1")[0]
    start = tensors_in(run_folder / "hf")
    for (weights, text), *_ in together:
        assert_equal_tensors(weights, tensors_in(tmp_path / "mesh"))
        for name, values in trained.items():
            assert torch.allclose(weights[name], values, atol=1e-5), name
        assert f"saved {tmp_path}/mesh" in text
    assert f"starting from the weights of {run_folder}/hf" in printed
    assert_equal_tensors(trained, tensors_in(tmp_path / "one"))
    assert sum(not torch.equal(values, start[name]) for name, values in trained.items()) > 20
    assert (tmp_path / "mesh" / "tokenizer.model").read_bytes() == (run_folder / "hf" / "tokenizer.model").read_bytes()
    assert not list(tmp_path.glob("*.unfinished"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mesh", dtype="auto")
    assert_equal_tensors({name: model.state_dict()[name] for name in trained}, tensors_in(tmp_path / "mesh"))
