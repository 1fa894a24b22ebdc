"""Runs with LoRA: checkpoints of adapters, resume, the base as the reference, merged and PEFT exports, the sampler."""

import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from conftest import seed_all
from conversion_cases import save_huggingface, tensors_in, to_megatron
from lora_cases import is_adapter
from lora_training_cases import convert, hf_rollouts
from megatron_dta.common.console import Console
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.extras.parity import random_training_samples
from megatron_dta.extras.servers.weights.send import RolloutWeights
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.checkpoint.files import find_checkpoint
from megatron_dta.training.huggingface.convert import to_peft
from megatron_dta.training.loop import Trainer
from megatron_dta.wiring.setup import build_trainer
from resume_cases import prompts_and_reward, rows_without_timing
from trainer_cases import MODEL, make_rollouts, make_trainer, run
from tree_engine_cases import tree_config

LORA = "--lora-rank 3 --lora-alpha 6"
GRPO = "--old-logprobs recompute --kl-loss-coef 0.2 --global-batch-size 6"


@pytest.fixture
def rollouts(tmp_path: Path) -> str:
    write_rollouts(tmp_path / "r.jsonl", make_rollouts(seed_all(31), 5, 3))
    return f"--rollouts {tmp_path}/r.jsonl"


def stored_names(checkpoint: Path) -> set[str]:
    """Names of a checkpoint's weights."""
    names = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {name for name in names if name.startswith(("decoder", "embedding", "output_layer"))}


def test_checkpoints_hold_adapters_and_the_base_stands_once(rollouts: str, tmp_path: Path) -> None:
    trainer, _ = run(f"{rollouts} {GRPO} {LORA} --train-iters 2 --save {tmp_path}/run")
    weights = stored_names(find_checkpoint(tmp_path / "run"))
    assert weights
    assert all("_adapter." in name for name in weights)
    assert not any("_adapter." in name for name in stored_names(tmp_path / "run" / "base"))
    base = f"{rollouts} --global-batch-size 6 --train-iters 2 --load {tmp_path}/run/base --finetune"
    plain, _ = make_trainer(base)
    for name, values in plain.model.named_parameters():
        assert torch.equal(values, dict(trainer.model.named_parameters())[name]), name
    again, _ = make_trainer(f"{rollouts} {GRPO} {LORA} --train-iters 2 --load {tmp_path}/run --finetune --seed 9")
    for name, values in again.model.named_parameters():
        assert torch.equal(values, dict(trainer.model.named_parameters())[name]), name
    fresh, _ = make_trainer(f"{base} {LORA} --seed 9")
    for name, values in fresh.model.named_parameters():
        assert torch.equal(values, dict(trainer.model.named_parameters())[name]) != is_adapter(name), name
    with pytest.raises(InputError, match="has LoRA adapters; give --lora-rank 3, or merge them with"):
        make_trainer(f"{rollouts} --global-batch-size 6 --train-iters 2 --load {tmp_path}/run --finetune")
    with pytest.raises(InputError, match="checkpoint of another model: --lora-rank is 3 there and 4 here"):
        make_trainer(f"{rollouts} {GRPO} --lora-rank 4 --train-iters 3 --save {tmp_path}/run")
    (tmp_path / "run" / "base").rename(tmp_path / "moved")
    with pytest.raises(InputError, match="holds adapters alone, and the weights they belong to are not in"):
        make_trainer(f"{rollouts} {GRPO} {LORA} --train-iters 3 --save {tmp_path}/run")


def test_the_base_as_the_reference_is_a_copy_of_the_first_weights(rollouts: str, tmp_path: Path) -> None:
    """Two epochs a rollout batch and a penalty in the reward too, so that every way to use the reference is taken."""
    arguments = f"{rollouts} {GRPO} {LORA} --kl-coef 0.1 --ppo-epochs 2 --train-iters 4"
    base, _ = run(f"{arguments} --save {tmp_path}/base-run")
    assert base.preparation.reference.engine.tree_models == base.engine.tree_models
    rows = rows_without_timing(tmp_path / "base-run")
    assert rows[-1]["ref_kl"] > 1e-6
    assert not (tmp_path / "base-run" / "reference").exists()
    loaded, _ = run(f"{arguments} --ref-load {tmp_path}/base-run/base --save {tmp_path}/load-run")
    assert rows == rows_without_timing(tmp_path / "load-run")
    assert loaded.preparation.reference.engine.config is not loaded.engine.config


def test_the_sampler_has_the_adapters(tmp_path: Path) -> None:
    """Its logprobs are those of the trainer, whose adapters have moved the model away from its base."""
    model = MODEL.split("--vocab-size")[0]
    sampled = "--tokenizer-type CharacterTokenizer --rollout-max-response-len 5 --rollout-batch-size 4"
    arguments = (
        f"{model} {sampled} {prompts_and_reward(tmp_path, seed_all(3))} --eval-interval 4 --n-samples-per-prompt 4 "
        f"--train-iters 4 --lr 3e-2 --kl-loss-coef 0.01 {LORA} --save {tmp_path}/run"
    )
    trainer = build_trainer(parse_arguments(arguments.split()), Console(file=StringIO(), width=400))
    trainer.run()
    trainer.metrics.close()
    rows = rows_without_timing(tmp_path / "run")[1:]
    assert max(row["sampler_logprob_gap"] for row in rows) < 1e-5
    assert rows[0]["ref_kl"] == pytest.approx(0, abs=1e-9)
    assert rows[-1]["ref_kl"] > 1e-3


ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
LATENT = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"]
OF_LATENT = (
    "--lora-target-modules linear_q_down_proj linear_q_up_proj linear_kv_down_proj linear_kv_up_proj linear_proj"
)


# PEFT 0.21 cannot load adapters of experts and of dense layers beside them under transformers 5.
@pytest.mark.parametrize(
    ("case", "modules", "targets"),
    [("qwen3-tied", ALL, ""), ("qwen3-moe", ALL, ""), ("deepseek-v3", LATENT, OF_LATENT)],
)
def test_exports(tmp_path: Path, case: str, modules: list[str], targets: str) -> None:
    save_huggingface(tmp_path / "hf", case, seed=41)
    hf_rollouts(tmp_path / "r.jsonl", 43)
    arguments = (
        f"--rollouts {tmp_path}/r.jsonl --global-batch-size 6 --old-logprobs recompute --train-iters 2 --lr 2e-2 "
        f"--load-hf {tmp_path}/hf --save {tmp_path}/run --save-hf {tmp_path}/merged {LORA} {targets}"
    )
    config = parse_arguments(arguments.split())
    trainer = build_trainer(config, Console(file=StringIO(), width=400))
    trainer.run()
    first, merged = tensors_in(tmp_path / "hf"), tensors_in(tmp_path / "merged")
    assert merged.keys() == first.keys()
    for name, values in first.items():
        adapted = name.split(".")[-2] in modules
        # Not every expert has met a token.
        if ".experts." not in name:
            assert torch.equal(merged[name], values) != adapted, name
    from_files = tensors_in(convert(tmp_path / "run", tmp_path / "hf", tmp_path / "from-files"))
    servers = RolloutWeights(config, trainer.model)
    for_servers = tensors_in(servers.write(1))
    for name, values in merged.items():
        # Pieces of a matrix may be multiplied in another order than the whole.
        assert torch.allclose(from_files[name], values, rtol=0, atol=2e-6), name
        assert torch.equal(for_servers[name], values), name
    servers.close()
    adapter = convert(tmp_path / "run", tmp_path / "hf", tmp_path / "peft", "--adapter-only")
    check_adapter(adapter, modules, first, merged)
    check_logprobs(trainer, tmp_path / "merged")
    pytest.importorskip("peft")
    check_logprobs(trainer, tmp_path / "hf", adapter)


def check_adapter(
    folder: Path, modules: list[str], first: dict[str, torch.Tensor], merged: dict[str, torch.Tensor]
) -> None:
    """PEFT's layout: names, and that B A, scaled, is what export has added to each tensor."""
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"], config["r"], config["lora_alpha"]) == ("LORA", "CAUSAL_LM", 3, 6)
    assert config["target_modules"] == modules
    matrices = load_file(folder / "adapter_model.safetensors")
    names = {name.rpartition(".lora_")[0] for name in matrices}
    assert names == {"base_model.model." + n.removesuffix(".weight") for n in first if n.split(".")[-2] in modules} - {
        "base_model.model." + n.removesuffix(".weight") for n in first if n.endswith("bias")
    }
    for name in names:
        weight = name.removeprefix("base_model.model.") + ".weight"
        product = matrices[f"{name}.lora_B.weight"].double() @ matrices[f"{name}.lora_A.weight"].double() * 2
        assert torch.allclose(first[weight].double() + product, merged[weight].double(), rtol=0, atol=2e-6), name


def check_logprobs(trainer: Trainer, folder: Path, adapter: Path | None = None) -> None:
    """transformers (with PEFT) gives the logprobs that the trainer's engine gives."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if adapter is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 37, 19).astype(np.int32)
    (sample,) = random_training_samples([tokens], seed=1, loss_masks=[np.arange(19) > 0])
    (logprobs,) = TreeEngine(trainer.model).compute_logprobs(prepare_batch([sample], tree_config("dta", 7)))
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0].float()
    expected = torch.log_softmax(logits, -1)[:-1].gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])
    mask = sample.loss_mask
    difference = np.abs(logprobs[mask] - np.append(0, expected[:, 0].numpy())[mask])
    assert difference.max() < 1e-5


def test_an_adapter_alone_needs_a_run_with_adapters(tmp_path: Path) -> None:
    save_huggingface(tmp_path / "hf", "qwen2", seed=41)
    checkpoint = to_megatron(tmp_path / "hf", tmp_path / "megatron")
    with pytest.raises(InputError, match="has no LoRA adapters"):
        to_peft(checkpoint, tmp_path / "hf", tmp_path / "out")
