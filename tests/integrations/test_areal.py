"""AReaL's engine interface on trees against rows that run alone in float64 through Megatron's stock model.

Where AReaL is installed, its own ``TrainEngine``, ``PPOActor`` and loss run; elsewhere those of a stand-in.
"""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from areal_cases import actor_config, count_trained, make_actor, ppo_loss, random_batch, reference, rows_of, step
from areal_cases import train_rank as train_rank
from areal_standin import provide_areal
from conversion_cases import save_huggingface, tensors_in
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.build import build_stock_model
from megatron_dta.training.huggingface.save import load_hf
from mesh_worker import run_on_ranks
from objective_cases import largest_error

ROWS = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("areal") / "model"
    save_huggingface(path, "qwen3", seed=5, dtype=torch.float64)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path):
    """Data, loss, gradients and logprobs of rows one by one, in micro-batches of 2."""
    actor = make_actor(folder)
    stock = build_stock_model(actor._config.model, torch.device("cpu"))
    load_hf(actor._config, stock)
    data = random_batch(seed=3, count=ROWS)
    return data, *reference(stock, data, ppo_loss, 2)


def check_logprobs(logprobs: torch.Tensor, data: dict[str, torch.Tensor], expected: list[torch.Tensor]) -> None:
    for row, computed, mask in zip(expected, logprobs, data["loss_mask"].bool(), strict=True):
        difference = torch.where(mask[: len(row)], computed[: len(row)] - row, 0)
        assert difference.abs().max() < 1e-12


@pytest.mark.parametrize("settings", [{}, {"tree_mode": "dense"}, {"tree_activation_tokens": 0}])
def test_a_batch_equals_rows_one_by_one(folder: Path, expected, settings: dict) -> None:
    data, loss, gradients, logprobs = expected
    actor = make_actor(folder, **settings)
    check_logprobs(actor.forward_batch(data), data, logprobs)
    assert float(actor.eval_batch(data, ppo_loss, count_trained)) == pytest.approx(loss, rel=1e-12)
    outcome = step(actor, data, ppo_loss)
    assert outcome["loss"] == pytest.approx(loss, rel=1e-12)
    assert largest_error(outcome["gradients"], gradients) < 1e-12
    assert (outcome["stats"]["token_reuse"] > 1.3) == (settings.get("tree_mode") != "dense")


def test_lists_of_trajectories_and_masks_of_tokens(folder: Path, expected) -> None:
    """Rollouts mark the tokens themselves; AReaL's trainers pass lists of batches of different widths."""
    data, _, gradients, logprobs = expected
    first, second = rows_of(data, 0, 4), rows_of(data, 4, ROWS)
    narrow = int(second["attention_mask"].sum(1).max())
    second = {name: value[:, :narrow] if value.dim() == 2 else value for name, value in second.items()}
    actor = make_actor(folder)
    marked = [part | {"loss_mask": part["loss_mask"].roll(1, dims=1)} for part in (first, second)]
    outputs = actor.compute_logp(marked)
    check_logprobs(outputs[0], first, logprobs[:4])
    check_logprobs(outputs[1], second, logprobs[4:])
    assert outputs[1].shape == second["input_ids"].shape
    assert largest_error(step(actor, [first, second], ppo_loss)["gradients"], gradients) < 1e-12


def test_data_parallel_ranks_share_prefixes(folder: Path, expected, tmp_path: Path) -> None:
    data, loss, gradients, logprobs = expected
    case = {"folder": folder, "data": data, "loss": ppo_loss, "rows": [(0, 3), (3, ROWS)]}
    for rank, outcome in enumerate(run_on_ranks(train_rank, case, 2, tmp_path)):
        begin, end = case["rows"][rank]
        assert outcome["loss"] == pytest.approx(loss, rel=1e-12)
        assert largest_error(outcome["gradients"], gradients) < 1e-12
        check_logprobs(outcome["logprobs"], rows_of(data, begin, end), logprobs[begin:end])


def test_weights_go_to_the_rollout_engine_through_a_folder(folder: Path, tmp_path: Path) -> None:
    actor, calls = make_actor(folder), []

    def read(meta):
        calls.append("read")
        done: Future = Future()
        done.set_result(None)
        return done

    rollout = SimpleNamespace(
        pause_generation=lambda: calls.append("pause"),
        continue_generation=lambda: calls.append("continue"),
        update_weights_from_disk=read,
    )
    if provide_areal():
        from areal.api.cli_args import NameResolveConfig
        from areal.utils import name_resolve

        name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=str(tmp_path / "names")))
    meta = SimpleNamespace(type="disk", path=str(tmp_path / "weights" / "v1"))
    actor.rollout_engine = rollout
    actor.update_weights(meta)
    assert calls == ["pause", "read", "continue"]
    before = tensors_in(folder)
    assert {name: torch.equal(values, before[name]) for name, values in tensors_in(Path(meta.path)).items()} == {
        name: True for name in before
    }


def test_a_checkpoint_brings_back_weights_and_optimizer(folder: Path, tmp_path: Path) -> None:
    data, actor = random_batch(seed=3, count=4), make_actor(folder)
    actor.train_batch(data, ppo_loss, count_trained)
    meta = SimpleNamespace(path=str(tmp_path / "saved"), weight_format="dcp", with_optim=True)
    actor.save(meta)
    actor.train_batch(data, ppo_loss, count_trained)
    other = make_actor(folder)
    other.load(meta)
    other.train_batch(data, ppo_loss, count_trained)
    for restored, two in zip(actor.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(restored, two)


def test_areals_own_update(folder: Path, expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ppo_update`` of AReaL, which logs statistics of the rows and calls its GRPO loss on their groups."""
    if not provide_areal():
        pytest.skip("AReaL is not installed")
    from areal.api.cli_args import RejectionSamplingConfig
    from areal.utils import stats_tracker

    stat = stats_tracker.stat

    def in_float32(denominator: str, **values) -> None:
        stat(denominator=denominator, **{name: value.float() for name, value in values.items()})

    monkeypatch.setattr(stats_tracker, "stat", in_float32)  # the tracker takes no float64
    data = random_batch(seed=3, count=ROWS) | {"loss_mask": expected[0]["loss_mask"].roll(1, dims=1)}
    changes = {"use_decoupled_loss": True, "importance_sampling_level": "sequence", "ppo_n_minibatches": 1}
    sampling = RejectionSamplingConfig(level="token", metric="ratio", upper=1.4)
    config = actor_config(folder, rejection_sampling=sampling, **changes)
    actor = make_actor(folder, config)
    rollouts = actor.compute_advantages([rows_of(data, 0, 5), rows_of(data, 5, ROWS)])
    updated: list = []
    train_batch = actor.train_batch

    def recording(batch, loss_fn, loss_weight_fn):
        stock = build_stock_model(actor._config.model, torch.device("cpu"))
        load_hf(actor._config, stock)
        updated.append(reference(stock, batch, loss_fn, 2))
        stats_tracker.export_all()
        actor.train_batch = train_batch
        outcome = step(actor, batch, loss_fn)
        updated.append(outcome)
        return outcome["stats"]

    actor.train_batch = recording
    actor.ppo_update(rollouts)
    (loss, gradients, _), repeated = updated
    assert repeated["loss"] == pytest.approx(loss, rel=1e-12)
    assert largest_error(repeated["gradients"], gradients) < 1e-12
    assert actor.export_stats()["ppo_actor/update/actor_loss/avg"] == pytest.approx(loss, rel=1e-5)


def test_what_is_not_supported_is_refused(folder: Path) -> None:
    provide_areal()
    from megatron_dta.integrations.areal.engine import TreePPOActor

    for name, value in (("is_critic", True), ("m2_threshold", 0.1), ("dtype", "float16")):
        with pytest.raises(InputError, match=name):
            TreePPOActor(actor_config(folder, **{name: value}))
    actor, data = make_actor(folder), random_batch(seed=3, count=4)
    with pytest.raises(InputError, match="weight_update_mode"):
        actor.connect_engine(None, SimpleNamespace(type="xccl"))
    with pytest.raises(InputError, match="nothing can be trained"):
        actor.train_batch(data | {"loss_mask": 0 * data["loss_mask"]}, ppo_loss, count_trained)
