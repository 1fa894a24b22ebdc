"""``examples/slime_actor.py`` against slime's policy loss written out over samples that run alone in float64.

Where slime is importable, its own losses and advantages run; elsewhere those of a stand-in.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conversion_cases import save_huggingface, tensors_in
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.build import build_stock_model
from megatron_dta.training.huggingface.save import load_hf
from mesh_worker import run_on_ranks
from objective_cases import largest_error
from slime_cases import arguments, load_example, random_samples, reference, train

FORMS = {
    "recomputed": {},
    "rollout logprobs": {"use_rollout_logprobs": True},
    "per token, with a reference": {"calculate_per_token_loss": True, "use_kl_loss": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slime") / "model"
    save_huggingface(path, "qwen3", seed=5, dtype=torch.float64)
    return path


def check(outcome: dict, config, samples: list, args, size: int) -> None:
    stock = build_stock_model(config.model, torch.device("cpu"))
    load_hf(config, stock)
    for step in (0, 1):
        loss, gradients = reference(stock, samples, args, step, size)
        assert largest_error(outcome["gradients"][step], gradients) < 1e-12
        if outcome["logged"]:
            assert outcome["logged"][step]["train/loss"] == pytest.approx(loss, rel=1e-12)
            assert outcome["logged"][step]["train/token_reuse"] > 1.2


@pytest.mark.parametrize("form", FORMS)
def test_the_steps_of_a_rollout(folder: Path, form: str) -> None:
    args, samples = arguments(folder, **FORMS[form]), random_samples(seed=11)
    outcome = train(0, {"args": args, "samples": samples, "size": 1})
    check(outcome, outcome["actor"].config, samples, args, 1)


def test_data_parallel_ranks(folder: Path, tmp_path: Path) -> None:
    args, samples = arguments(folder, use_rollout_logprobs=True), random_samples(seed=11)
    outcomes = run_on_ranks(train, {"args": args, "samples": samples, "size": 2}, 2, tmp_path)
    config = train(0, {"args": args, "samples": samples, "size": 1})["actor"].config
    for rank in outcomes:
        check(rank, config, samples, args, 2)


def test_weights_and_checkpoints(folder: Path, tmp_path: Path) -> None:
    args = arguments(folder, lr=1e-3, save=str(tmp_path / "save"), update_weight_disk_dir=str(tmp_path / "weights"))
    case = {"args": args, "samples": random_samples(seed=11), "size": 1}
    (tmp_path / "weights").mkdir()
    actor = train(0, case)["actor"]
    actor.update_weights()
    written, before = tensors_in(tmp_path / "weights" / "weight_v000001"), tensors_in(folder)
    assert written.keys() == before.keys()
    assert not any(torch.equal(values, before[name]) for name, values in written.items())
    actor.save_model(0)
    assert (tmp_path / "save" / "iter_0000001").is_dir()


def test_what_is_not_supported_is_refused(folder: Path) -> None:
    actor = object.__new__(load_example().TreeActor)
    for name, value in (("update_weight_transport", "nccl"), ("use_critic", True), ("loss_type", "custom_loss")):
        with pytest.raises(InputError, match=f"{name}={value}"):
            actor.init(arguments(folder, **{name: value}), "actor")
