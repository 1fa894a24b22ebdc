"""``examples/slime_actor.py`` and ``miles_actor.py`` against the policy loss over samples that run alone in float64.

Where slime or Miles is importable, its own losses and advantages run; elsewhere those of a stand-in.
"""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import call

import pytest
import torch

from conversion_cases import save_huggingface, tensors_in
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.build import build_stock_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.training.huggingface.save import load_hf
from mesh_worker import run_on_ranks
from objective_cases import largest_error
from slime_cases import arguments, load_example, random_samples, reference, train

HAS_MILES = importlib.util.find_spec("miles") is not None
# Miles' own loss computes the ratio in float32.
TOLERANCE = {"slime": 1e-12, "miles": 1e-6 if HAS_MILES else 1e-12}
PACKAGES = tuple(TOLERANCE)
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


def check(outcomes: list[dict], case: dict[str, Any]) -> None:
    """What every rank found."""
    config, tolerance = outcomes[0]["config"], TOLERANCE[case["package"]]
    stock = build_stock_model(config.model, initialize_parallel(1))
    load_hf(config, stock)
    for step in (0, 1):
        loss, gradients = reference(stock, case["samples"], case["args"], step, case["size"])
        for outcome in outcomes:
            assert largest_error(outcome["gradients"][step], gradients) < tolerance
            if outcome["logged"]:
                assert outcome["logged"][step]["train/loss"] == pytest.approx(loss, rel=tolerance)
                assert outcome["logged"][step]["train/token_reuse"] > 1.2


@pytest.mark.parametrize(("form", "package"), [*((form, "slime") for form in FORMS), (tuple(FORMS)[-1], "miles")])
def test_the_steps_of_a_rollout(folder: Path, form: str, package: str) -> None:
    args, samples = arguments(folder, **FORMS[form]), random_samples(seed=11)
    case = {"args": args, "samples": samples, "size": 1, "package": package}
    check([train(0, case)], case)


@pytest.mark.parametrize("package", PACKAGES)
def test_data_parallel_ranks(folder: Path, tmp_path: Path, package: str) -> None:
    args, samples = arguments(folder, use_rollout_logprobs=True), random_samples(seed=11)
    case = {"args": args, "samples": samples, "package": package, "size": 2}
    check(run_on_ranks(train, case, 2, tmp_path), case)


@pytest.mark.parametrize("package", PACKAGES)
def test_weights_and_checkpoints(folder: Path, tmp_path: Path, package: str) -> None:
    args = arguments(folder, lr=1e-3, save=str(tmp_path / "save"), update_weight_disk_dir=str(tmp_path / "weights"))
    case = {"args": args, "samples": random_samples(seed=11), "size": 1, "package": package}
    (tmp_path / "weights").mkdir()
    actor = train(0, case)["actor"]
    if package == "miles":
        servers = actor.rollout_manager = mock.MagicMock()
        info = SimpleNamespace(rollout_engines=[servers], has_new_engines=True)
        with mock.patch.dict(type(actor).train.__globals__, ray=SimpleNamespace(get=lambda answers: answers)):
            actor.update_weights(info=info)  # as RayTrainGroup calls it
        source = {"model_path": str(tmp_path / "weights" / "weight_v000001"), "weight_version": "1"}
        assert servers.method_calls == [
            *(call.clear_updatable_has_new_engines.remote(), call.pause_generation.remote(mode="retract")),
            *(call.flush_cache.remote(), call.update_weights_from_disk.remote(**source)),
            *(call.continue_generation.remote(), call.set_weight_version.remote(1)),
        ]
        actor.export_hf(rollout_id=0, path=str(tmp_path / "export"))
        assert tensors_in(tmp_path / "export").keys() == tensors_in(folder).keys()
    else:
        actor.update_weights()
    written, before = tensors_in(tmp_path / "weights" / "weight_v000001"), tensors_in(folder)
    assert written.keys() == before.keys()
    assert not any(torch.equal(values, before[name]) for name, values in written.items())
    actor.save_model(0)
    assert (tmp_path / "save" / "iter_0000001").is_dir()


def test_what_is_not_supported_is_refused(folder: Path) -> None:
    cases = [("slime", "update_weight_transport", "nccl"), ("miles", "update_weight_transfer_mode", "p2p")]
    cases += [(package, name, value) for package in PACKAGES for name, value in (("use_critic", True), ("fp16", True))]
    for package, name, value in [*cases, ("miles", "loss_type", "custom_loss")]:
        actor = object.__new__(load_example(package).TreeActor)
        cell = {"indep_dp_info": None} if package == "miles" else {}
        with pytest.raises(InputError, match=f"{name}={value}"):
            actor.init(arguments(folder, **{name: value}), "actor", **cell)
