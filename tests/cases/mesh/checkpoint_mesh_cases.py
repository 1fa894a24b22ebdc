"""Runs on several meshes, each continuing another one's checkpoint, and the tensors of their checkpoints."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from checkpoint_worker import MODEL, Stretch
from conftest import assert_equal_tensors
from megatron_dta.core.config import ModelConfig, ParallelConfig
from resume_cases import final_tensors

ONE = ParallelConfig()
TP2 = ParallelConfig(tensor_model_parallel_size=2)
EXPERTS = replace(
    MODEL,
    num_experts=4,
    moe_ffn_hidden_size=20,
    moe_shared_expert_intermediate_size=16,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)
# A model by name, and whether its optimizer is distributed.
Cases = dict[str, tuple[ModelConfig, bool]]


def in_bf16(model: ModelConfig) -> ModelConfig:
    return replace(model, bf16=True, params_dtype=torch.bfloat16)


def stretches(folder: Path, cases: Cases, *legs: tuple[ParallelConfig, str, str | None]) -> list[Stretch]:
    """Two steps for every case and leg: a mesh, the name to save under, and the leg that is continued, if any."""
    return [
        Stretch(
            replace(parallel, use_distributed_optimizer=sharded),
            2,
            folder / case / save,
            folder / case / load if load is not None else None,
            seed=17 if load is None else 18,
            model=model,
        )
        for case, (model, sharded) in cases.items()
        for parallel, save, load in legs
    ]


@cache
def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, without the rows that pad the vocabulary."""
    return {
        key: values[: MODEL.vocab_size] if "word_embeddings" in key else values
        for key, values in final_tensors(folder).items()
    }


def assert_same_tensors(left: Path, right: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors, among which are those of the optimizer."""
    actual, expected = tensors_of(left), tensors_of(right)
    assert_equal_tensors(actual, expected)
    assert any(key.startswith("optimizer.") and "exp_avg_sq" in key for key in actual)
    return actual
