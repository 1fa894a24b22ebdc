"""verl's settings become this project's, and what has no counterpart is refused by name."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, McoreOptimizerConfig, TorchtitanOptimizerConfig

from megatron_dta.core.common.errors import InputError
from megatron_dta.integrations.verl.config import (
    MegatronDtaActorConfig,
    MegatronDtaCriticConfig,
    MegatronDtaEngineConfig,
)
from megatron_dta.integrations.verl.settings import train_config


def _model(folder: Path, **settings: Any) -> HFModelConfig:
    return HFModelConfig(**{"path": str(folder), "override_config": {"attn_implementation": "sdpa"}, **settings})


def test_one_word_selects_the_engine_for_all_roles():
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            [
                "model_engine=megatron_dta",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.actor.use_dynamic_bsz=True",
                "actor_rollout_ref.actor.megatron_dta.tensor_model_parallel_size=2",
                "actor_rollout_ref.actor.optim.lr=3e-6",
                "critic.use_dynamic_bsz=True",
            ],
        )
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert isinstance(actor, MegatronDtaActorConfig)
    assert actor.engine.strategy == "megatron_dta"
    assert actor.engine.tensor_model_parallel_size == 2
    assert isinstance(actor.optim, McoreOptimizerConfig)
    assert (actor.optim.lr, actor.optim.lr_decay_style) == (3e-6, "constant")
    assert config.actor_rollout_ref.ref.strategy == "megatron_dta"
    assert config.actor_rollout_ref.ref.megatron_dta.tensor_model_parallel_size == 2
    assert config.actor_rollout_ref.ref.megatron_dta.forward_only
    assert config.critic._target_ == f"{MegatronDtaCriticConfig.__module__}.{MegatronDtaCriticConfig.__name__}"


def test_settings_are_translated(model_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    engine = MegatronDtaEngineConfig(
        tensor_model_parallel_size=2,
        tree_memory_tokens=4096,
        tree_segment_tokens=512,
        override_settings={"recompute_granularity": "full"},
    )
    optimizer = McoreOptimizerConfig(
        lr=2e-6,
        lr_warmup_steps_ratio=0.1,
        total_training_steps=200,
        lr_decay_style="cosine",
        min_lr=1e-7,
        betas=(0.8, 0.99),
        override_optimizer_config={"adam_eps": 1e-6},
    )
    lora = {"lora_rank": 4, "lora_alpha": 8, "lora": {"merge": True}}
    config = train_config(_model(model_folder, **lora), engine, optimizer)
    assert (config.parallel.tensor_model_parallel_size, config.parallel.sequence_parallel) == (2, True)
    assert (config.tree.tree_memory_tokens, config.model.recompute_granularity) == (4096, "full")
    assert (config.model.lora_rank, config.model.lora_alpha, config.model.bf16) == (4, 8, True)
    settings = config.optimization
    assert (settings.lr, settings.min_lr, settings.lr_decay_style, settings.adam_eps) == (2e-6, 1e-7, "cosine", 1e-6)
    assert (settings.train_iters, settings.lr_warmup_iters, settings.adam_beta1) == (200, 20, 0.8)
    torch_adam = FSDPOptimizerConfig(lr=1e-5, lr_scheduler_type="cosine", min_lr_ratio=0.1, lr_warmup_steps=3)
    settings = train_config(_model(model_folder), MegatronDtaEngineConfig(), torch_adam).optimization
    assert (settings.lr_decay_style, settings.lr_warmup_iters) == ("cosine", 3)
    assert settings.min_lr == pytest.approx(1e-6)


def _refused(model_folder: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any], Any]]:
    return {
        "engine.dtype=float16": ({}, {"dtype": "float16"}, None),
        "engine.override_settings.*no_such_setting": ({}, {"override_settings": {"no_such_setting": 1}}, None),
        "model.override_config.num_hidden_layers=1": ({"override_config": {"num_hidden_layers": 1}}, {}, None),
        "model.use_liger=True": ({"use_liger": True}, {}, None),
        "model.lora.merge=False": ({"lora_rank": 4}, {}, None),
        "model.target_modules": ({"lora_rank": 4, "lora": {"merge": True}, "target_modules": ["q_proj"]}, {}, None),
        "optim.optimizer=muon": ({}, {}, McoreOptimizerConfig(optimizer="muon")),
        "optim.num_cycles=2": ({}, {}, FSDPOptimizerConfig(num_cycles=2)),
        "optim=TorchtitanOptimizerConfig": ({}, {}, TorchtitanOptimizerConfig()),
    }


def test_settings_without_counterpart_are_refused_in_one_line(model_folder: Path):
    for message, (model, engine, optimizer) in _refused(model_folder).items():
        with pytest.raises(InputError, match=message) as caught:
            train_config(_model(model_folder, **model), MegatronDtaEngineConfig(**engine), optimizer)
        assert "\n" not in str(caught.value), message
    for name, value in (("strategy", "fsdp"), ("loss_scope", "rows")):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            MegatronDtaEngineConfig(**{name: value})
