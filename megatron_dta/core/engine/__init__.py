"""Runs a step plan on a model: forward in preorder, losses where sequences complete, backward in postorder."""

import megatron_dta.core.model  # noqa: F401 - first, since it decides how Megatron is imported
from megatron_dta.core.engine.batch import StepPart, TreeBatch, prepare_batch
from megatron_dta.core.engine.executor import TreeEngine
from megatron_dta.core.engine.step_result import StepResult, TokenOutputs

__all__ = ["StepPart", "StepResult", "TokenOutputs", "TreeBatch", "TreeEngine", "prepare_batch"]
