"""A stand-in for AReaL where it is not installed: what ``megatron_dta.integrations.areal`` imports from it.

``TrainEngine`` has the abstract methods of ``areal.api.TrainEngine`` of AReaL 1.0.4.
"""

import abc
import importlib.util
import sys
import types
from typing import Any

METHODS = [
    "create_process_group",
    "initialize",
    "current_data_parallel_head",
    "is_data_parallel_head",
    "train",
    "update_weights",
    "connect_engine",
    "rollout_batch",
    "prepare_batch",
    "set_version",
    "get_version",
    "save",
    "load",
    "optimizer_zero_grad",
    "optimizer_step",
    "lr_scheduler_step",
    "forward_backward_batch",
    "train_batch",
    "eval_batch",
    "forward_batch",
    "export_stats",
    "onload",
    "offload",
    "get_device_stats",
]
PROPERTIES = [
    "data_parallel_group",
    "data_parallel_rank",
    "data_parallel_world_size",
    "context_and_model_parallel_group",
    "cpu_group",
    "initialized",
]


class PPOActor:
    """AReaL's actor keeps its engine and calls ``forward`` and ``train_batch``."""

    def __init__(self, config: Any, engine: Any) -> None:
        self.config, self.engine = config, engine

    def compute_logp(self, data: list[dict[str, Any]]) -> Any:
        return self.engine.forward_batch(data)

    def compute_advantages(self, data: Any) -> Any:
        return data

    def ppo_update(self, data: Any) -> None:
        raise NotImplementedError


def provide_areal() -> bool:
    """Make ``import areal`` work. True if it is AReaL itself."""
    if "areal" in sys.modules:
        return hasattr(sys.modules["areal"], "__path__")
    if importlib.util.find_spec("areal") is not None:
        return True

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    body = {name: abc.abstractmethod(method) for name in METHODS}
    body |= {name: property(abc.abstractmethod(lambda self: None)) for name in PROPERTIES}
    published = {
        "areal.api": {"TrainEngine": abc.ABCMeta("TrainEngine", (), body)},
        "areal.trainer.ppo.actor": {"PPOActor": PPOActor},
        "areal.infra.dist_rollout": {"DistRolloutCoordinator": types.SimpleNamespace},
        "areal.utils.names": {"update_weights_from_disk": lambda *parts: "/".join(map(str, parts))},
        "areal.utils.name_resolve": {"add": lambda *args, **kwargs: None},
    }
    for path, contents in published.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            sys.modules.setdefault(name, types.ModuleType(name))
            if depth > 1:
                setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], sys.modules[name])
        vars(sys.modules[path]).update(contents)
    return False
