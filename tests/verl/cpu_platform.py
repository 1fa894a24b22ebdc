"""A platform of verl that runs its engines on CPUs with gloo; verl brings platforms for accelerators only.

Chosen by ``VERL_PLATFORM=cpu`` with ``VERL_USE_EXTERNAL_MODULES=cpu_platform``.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

MEMORY = 1 << 34  # bytes that the device claims to have


def _device_module() -> types.ModuleType:
    """``torch.cpu`` with the functions of ``torch.cuda`` that verl calls."""
    module = types.ModuleType("torch_cpu_device")
    for name in dir(torch.cpu):
        if not name.startswith("__"):
            setattr(module, name, getattr(torch.cpu, name))
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        setattr(module, name, lambda *unused: 0)
    for name in ("empty_cache", "set_device", "reset_peak_memory_stats", "synchronize"):
        setattr(module, name, lambda *unused: None)
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.get_device_name = lambda *unused: "CPU"
    module.mem_get_info = lambda *unused: (MEMORY, MEMORY)
    module.get_rng_state = lambda *unused: torch.get_rng_state()
    module.set_rng_state = lambda state, *unused: torch.set_rng_state(state)
    return module


@PlatformRegistry.register("cpu")
class CpuPlatform(PlatformBase):
    """See ``PlatformBase``."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    # verl's check of a pool counts GPUs and NPUs only, so Ray must be told that there are GPUs.

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {}

    def cudart(self) -> None:
        return None


def _with_one_backend() -> None:
    """verl asks for the backends "cpu:gloo,cpu:gloo"; PyTorch takes a device once."""
    original = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return original("gloo" if backend and backend.startswith("cpu:gloo,cpu") else backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


_with_one_backend()
