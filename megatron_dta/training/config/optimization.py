"""Settings of the optimizer, its schedule, the number of steps, and randomness."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron_dta.core.config.options import option

state_option = partial(option, needs="use_precision_aware_optimizer")
offload_option = partial(option, needs="optimizer_cpu_offload")


@dataclass
class OptimizationConfig:
    """Megatron's optimizer (``OptimizerConfig``) and schedule (``OptimizerParamScheduler``), under Megatron's names."""

    train_iters: int = option(
        100, "Total number of optimizer steps, including those before the loaded checkpoint.", minimum=0
    )
    lr: float = option(1e-6, "Maximum learning rate.", minimum=0)
    min_lr: float = option(0.0, "Minimum learning rate of the decay.", minimum=0, needs="lr_decay_style!=constant")
    lr_decay_style: str = option(
        "constant", "Shape of the decay.", choices=("constant", "linear", "cosine", "inverse-square-root")
    )
    lr_decay_iters: int | None = option(
        None,
        "Steps until the minimum learning rate is reached (default: --train-iters).",
        minimum=1,
        needs="lr_decay_style!=constant",
    )
    lr_warmup_iters: int = option(0, "Steps of linear warm-up.", minimum=0)
    weight_decay: float = option(0.01, "Weight decay; not applied to biases and norms.", minimum=0)
    adam_beta1: float = option(0.9, "Decay of Adam's first moment.", minimum=0, maximum=1)
    adam_beta2: float = option(0.999, "Decay of Adam's second moment.", minimum=0, maximum=1)
    adam_eps: float = option(1e-8, "Epsilon of Adam.", above=0)
    clip_grad: float = option(1.0, "Clip the gradient to this norm; 0 disables clipping.", minimum=0)
    use_precision_aware_optimizer: bool = option(
        False,
        "Keep optimizer states in the dtypes below; needs --use-distributed-optimizer, --bf16, and either Transformer"
        " Engine's Adam or --optimizer-cpu-offload.",
    )
    main_grads_dtype: str = state_option("fp32", "Dtype of the gradient buffer.", choices=("fp32", "bf16"))
    main_params_dtype: str = state_option("fp32", "Dtype of the master weights.", choices=("fp32", "fp16"))
    exp_avg_dtype: str = state_option("fp32", "Dtype of Adam's first moment.", choices=("fp32", "fp16", "bf16", "fp8"))
    exp_avg_sq_dtype: str = state_option(
        "fp32", "Dtype of Adam's second moment.", choices=("fp32", "fp16", "bf16", "fp8")
    )
    optimizer_cpu_offload: bool = option(
        False,
        "Keep optimizer states in host memory and update them there; needs a CUDA GPU and "
        "--use-precision-aware-optimizer.",
    )
    optimizer_offload_fraction: float = offload_option(
        1.0, "Fraction of the states that --optimizer-cpu-offload keeps on the host.", minimum=0, maximum=1
    )
    seed: int = option(
        1234, "Seed of the initial weights, the order of the data, and sampling.", minimum=0, maximum=2**63
    )
    deterministic_mode: bool = option(
        False,
        "Use only deterministic CUDA kernels and make drafting independent of measured times, so that runs repeat bit"
        " for bit.",
    )
