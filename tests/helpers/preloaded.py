"""What the forked processes of tests find imported and warm. The collector leaves it alone: a pass over it takes 0.3 s
and writes to pages that the processes share.
"""

import contextlib
import gc
import importlib
import io
import os
import weakref

gc.disable()

import torch._dynamo  # noqa: F401 (every optimizer imports it, which takes 0.5 s)

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

# What these modules made ends with the server; each forked process would take it down again, in 20 ms.
for finalizer in list(weakref.finalize._registry):
    finalizer.atexit = False

gc.collect()
gc.freeze()
gc.set_threshold(20_000, 20, 50)
gc.enable()
