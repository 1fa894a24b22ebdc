"""What the forked processes of tests find imported and warm. The collector leaves it alone: a pass over it takes 0.3 s
and writes to pages that the processes share.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import os
import re
import types
import weakref
from datetime import timedelta

gc.disable()

import torch._dynamo  # noqa: F401 (every optimizer imports it, which takes 0.5 s)
from torch.distributed import ProcessGroupGloo, Store, distributed_c10d

import mesh_worker  # noqa: F401
from megatron_dta.wiring.attach import attach_extras

attach_extras()

# Where only the core's requirements are installed, only its tests run.
with contextlib.suppress(ModuleNotFoundError):
    import rich._emoji_codes  # noqa: F401
    from matplotlib.figure import Figure

    import mesh_trainer_cases  # noqa: F401 (with it pytest and the trainer)
    import rollout_runs  # noqa: F401 (with it servers)
    from megatron_dta.training import arguments

    arguments._parser()

    # As at the end of a run; the first figure finds the fonts.
    Figure(layout="constrained").savefig(io.BytesIO(), format="png")

# What tests and runs import when they need it: layers with kernels, models and templates of chats, servers for agents.
PACKAGE = (
    "commands.inspect_tree commands.plan_run core.model.experts.spec core.model.layers.fused_autograd_layer "
    "core.model.layers.fused_layer extras.agents.gateway.http.application extras.expert_parallel.planning.group_step "
    "families.gated_delta_net.huggingface families.latent_attention.huggingface families.mamba2.huggingface"
)
MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3")]
for name in ("torch.utils.serialization", "uvicorn", *MODELS, *(f"megatron_dta.{part}" for part in PACKAGE.split())):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
with contextlib.suppress(ImportError):
    from transformers import PreTrainedTokenizerFast  # noqa: F401

if os.environ.get("TRITON_INTERPRET") == "1":
    import fused_layers_cases  # noqa: F401 (with it the kernels)
    import quick_interpreter

    quick_interpreter.make_quick()
    quick_interpreter.rewrite_kernels()


class _SharingGloo(ProcessGroupGloo):
    """All groups of a process share one device: the thread of a device wakes a hundred times a second."""

    _device = staticmethod(functools.cache(ProcessGroupGloo.create_default_device))

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta):
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout, options._threads = [self._device()], timeout, 2
        super().__init__(store, rank, size, options)


distributed_c10d.ProcessGroupGloo = _SharingGloo


def _join_pages() -> None:
    """Put the memory on pages of 2 MiB where the system can: a fork then copies, and an end takes down, a few hundred
    entries in place of ninety thousand."""
    advise, size, collapse = ctypes.CDLL(None).madvise, 2 << 20, 25  # MADV_COLLAPSE, of Linux 6.1
    with open("/proc/self/maps", encoding="ascii") as maps:
        for begin, end in re.findall(r"^(\w+)-(\w+) rw-p 0{8} 00:00 0 ", maps.read(), re.MULTILINE):
            first, last = -(-int(begin, 16) // size) * size, int(end, 16) // size * size
            if first < last:
                advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), collapse)


# What these modules made ends with the server; each forked process would take it down again, in 20 ms.
for finalizer in list(weakref.finalize._registry):
    finalizer.atexit = False
for function in gc.get_objects():
    if isinstance(function, types.FunctionType) and function.__code__.co_filename == "<internal>":
        atexit.unregister(function)  # Triton's, which clears the caches of typing: 10 ms, too

gc.collect()
gc.freeze()
_join_pages()
gc.set_threshold(20_000, 20, 50)
gc.enable()
