"""The tree engine, for a training loop of one's own (``examples/grpo_on_trees.py`` is one).

    from megatron_dta.core import ModelConfig, TreeConfig, TreeEngine, build_model, initialize_parallel, prepare_batch

A name is imported from the module that defines it when it is used first, so that a loop loads only what it needs.
"""

import importlib

_MODULES = {
    "common.errors": ("InputError",),
    "config": ("CriticConfig", "ModelConfig", "ObjectiveConfig", "ParallelConfig", "TreeConfig"),
    "engine": ("StepPart", "StepResult", "TokenOutputs", "TreeBatch", "TreeEngine", "prepare_batch"),
    "model.build": ("build_model", "build_stock_model"),
    "model.parallel.mesh": ("current_mesh", "destroy_parallel", "initialize_parallel"),
    "objectives.advantages": ("estimate_advantages", "group_advantages"),
    "objectives.fields": ("LossFields", "Objective", "SequenceLoss", "TokenLosses"),
    "objectives.registry": ("make_objective",),
    "objectives.weights": ("TrainedCounts", "count_trained"),
    "planning.plan_step": ("plan_step",),
    "planning.step.passes": ("PipelineShape", "StepBudget"),
    "planning.step.plan": ("StepPlan",),
    "planning.step.sample": ("TrainingSample",),
    "rollouts.load": ("load_rollouts", "write_rollouts"),
    "rollouts.record": ("Rollout",),
    "tree": ("PrefixTree", "build_prefix_tree", "tree_statistics"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
