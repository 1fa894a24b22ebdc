"""What the forked processes of tests find imported and warm. The collector leaves it alone: a pass over it takes 0.3 s
and writes to pages that the processes share.
"""

import contextlib
import gc
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

    # As at the end of a run; the first figure finds the fonts.
    Figure(layout="constrained").savefig(io.BytesIO(), format="png")

# What runs import when they need it: templates of chats, and servers for agents.
with contextlib.suppress(ImportError):
    import uvicorn  # noqa: F401
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    import megatron_dta.extras.agents.gateway.http.application  # noqa: F401

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
