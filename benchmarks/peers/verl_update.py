"""Seconds of verl's old-logprob pass and actor update with this project's engine or one of verl's own.

    torchrun --nproc-per-node 1 benchmarks/peers/verl_update.py --engine megatron_dta --rollouts FILE --max-sequences 40
    ... --engine fsdp2 ...
    ... --groups 16 --group-size 16 --prompt-tokens 2048 --response-tokens 1024

Runs in an environment with verl (``pip install ".[verl]"``). The worker, its data and its loss (clipped PPO with a KL
term) are verl's; only the engine differs. verl's engines run with padding removed and dynamic batch sizes. Weights are
random, of a published shape. The two engines are compared by two runs on one machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import (
    EngineConfig,
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    OptimizerConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common.packed_attention  # noqa: F401 (registers them)
from common.benchmark_model import MODELS, TINY, benchmark_model
from common.report import Report
from megatron_dta.common.command_line import CommandLineParser, check_at_least
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.integrations.verl.config import MegatronDtaEngineConfig
from megatron_dta.training.huggingface.config.config_output import huggingface_config

ENGINES = ("megatron_dta", "fsdp2", "megatron")
Rows = list[tuple[np.ndarray, np.ndarray]]  # token ids and mask of the trained ones


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="megatron_dta")
    parser.add_argument("--rollouts", help="rollouts: .jsonl, .parquet or .npz; or give --groups")
    parser.add_argument("--sample-granularity", choices=("trajectory", "turn"), default="trajectory")
    parser.add_argument("--max-sequences", type=int)
    parser.add_argument("--groups", type=int, help="random groups that share a prompt")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--response-tokens", type=int, default=1024)
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-1.7b")
    parser.add_argument("--num-layers", type=int, help="use this many layers of the model")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--max-token-len-per-gpu", type=int, default=32768, help="of verl's own engines")
    parser.add_argument("--tree-memory-gib", type=float, help="of megatron_dta")
    parser.add_argument(
        "--attn-implementation", default="flash_attention_2", help="of fsdp2; or packed_fa2, packed_fa4"
    )
    parser.add_argument(
        "--fused-kernels-backend",
        choices=("torch", "triton"),
        help="of fsdp2: verl's own fused logprobs. Without them and without flash-attn 2, verl loops over the tokens",
    )
    parser.add_argument("--steps", type=int, default=3, help="timed passes; the median counts")
    parser.add_argument("--model-folder", type=Path, help="write the random model here and use it again next time")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, "max_sequences", "groups", "group_size", "prompt_tokens", "response_tokens", "steps")
    if (arguments.rollouts is None) == (arguments.groups is None):
        raise InputError("give either --rollouts or --groups")
    if arguments.fused_kernels_backend is not None and arguments.engine != "fsdp2":
        raise InputError(f"--fused-kernels-backend is for --engine fsdp2, not {arguments.engine}")
    return arguments


def load_rows(arguments: argparse.Namespace, vocab_size: int) -> Rows:
    """The rows of the file, or random groups of rows with a common prompt."""
    if arguments.rollouts is not None:
        rollouts = load_rollouts(
            arguments.rollouts,
            sample_granularity=arguments.sample_granularity,
            max_sequences=arguments.max_sequences,
        )
        return [(rollout.token_ids.astype(np.int64) % vocab_size, rollout.loss_mask) for rollout in rollouts]
    rng = np.random.default_rng(1)
    rows = []
    for _ in range(arguments.groups):
        prompt = rng.integers(0, vocab_size, arguments.prompt_tokens)
        for _ in range(arguments.group_size):
            length = int(rng.integers(arguments.response_tokens // 2, arguments.response_tokens + 1))
            mask = np.arange(len(prompt) + length) >= len(prompt)
            rows.append((np.concatenate([prompt, rng.integers(0, vocab_size, length)]), mask))
    return rows


def nested_batch(rows: Rows, **common: Any) -> TensorDict:
    """The rows as verl's trainer passes them; what comes before the first trained token is the prompt."""
    starts = [int(np.flatnonzero(mask)[0]) for _, mask in rows]
    rng = np.random.default_rng(2)

    def nested(values: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.as_tensor(row, dtype=dtype) for row in values], layout=torch.jagged)

    masks = [mask[start:] for start, (_, mask) in zip(starts, rows, strict=True)]
    fields = {
        "input_ids": nested([ids for ids, _ in rows], torch.int64),
        "position_ids": nested([np.arange(len(ids)) for ids, _ in rows], torch.int64),
        "prompts": nested([ids[:start] for start, (ids, _) in zip(starts, rows, strict=True)], torch.int64),
        "responses": nested([ids[start:] for start, (ids, _) in zip(starts, rows, strict=True)], torch.int64),
        "response_mask": nested(masks, torch.int64),
        "loss_mask": nested(masks, torch.int64),
        "advantages": nested([np.full(len(mask), rng.normal()) for mask in masks], torch.float32),
        "old_log_probs": nested([np.full(len(mask), -10.0) for mask in masks], torch.float32),
        "ref_log_prob": nested([np.full(len(mask), -10.0) for mask in masks], torch.float32),
    }
    return tensordict_utils.get_tensordict(fields, {"temperature": 1.0, **common})


def engine_settings(arguments: argparse.Namespace) -> tuple[EngineConfig, OptimizerConfig]:
    """Settings of the chosen engine and its optimizer."""
    tensor, tokens = arguments.tensor_model_parallel_size, arguments.max_token_len_per_gpu
    limits = {"max_token_len_per_gpu": tokens, "infer_max_token_len_per_gpu": tokens, "use_dynamic_bsz": True}
    if arguments.engine == "fsdp2":
        engine = FSDPEngineConfig(
            strategy="fsdp2",
            dtype=arguments.dtype,
            model_dtype="fp32",
            ulysses_sequence_parallel_size=tensor,
            use_torch_compile=torch.cuda.is_available(),
            **limits,
        )
        return engine, FSDPOptimizerConfig(lr=1e-6, total_training_steps=100)
    optimizer = McoreOptimizerConfig(lr=1e-6, lr_decay_style="constant", total_training_steps=100)
    if arguments.engine == "megatron":
        return McoreEngineConfig(tensor_model_parallel_size=tensor, dtype=arguments.dtype, **limits), optimizer
    engine = MegatronDtaEngineConfig(
        tensor_model_parallel_size=tensor, dtype=arguments.dtype, tree_memory_gib=arguments.tree_memory_gib
    )
    return engine, optimizer


def write_model(arguments: argparse.Namespace, folder: Path, longest: int) -> int:
    """Write a Hugging Face folder with random weights of the chosen shape; returns the vocabulary size."""
    model = benchmark_model(
        arguments.model, 512 if arguments.model in TINY else None, longest, True, arguments.num_layers
    )
    values = huggingface_config(model)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    if not (folder / "config.json").exists():
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            hf_model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, arguments.dtype))
        hf_model.save_pretrained(folder)
        del hf_model
    return model.vocab_size


def build_worker(arguments: argparse.Namespace, folder: Path) -> TrainingWorker:
    """verl's training worker on the chosen engine."""
    engine, optimizer = engine_settings(arguments)
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(folder),
                load_tokenizer=False,
                override_config={"attn_implementation": arguments.attn_implementation},
                use_fused_kernels=arguments.fused_kernels_backend is not None,
                fused_kernel_options={"impl_backend": arguments.fused_kernels_backend},
            ),
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, use_kl_loss=True)
    worker.set_loss_fn(partial(ppo_loss, config=config))
    return worker


def main() -> int:
    """Measure and report."""
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.model_folder or Path(temporary)
        vocab_size = write_model(arguments, folder, longest=1 << 17)
        worker = build_worker(arguments, folder)
        rows = load_rows(arguments, vocab_size)
        rank, size = worker.engine.get_data_parallel_rank(), worker.engine.get_data_parallel_size()
        rows = rows[: len(rows) // size * size]
        rank_rows = rows[rank::size]
        settings = {name: str(value) for name, value in vars(arguments).items()}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        output = arguments.output if torch.distributed.get_rank() == 0 else None
        report = Report("verl's passes on one engine", settings, device, output)

        def seconds(run: Any) -> float:
            times = []
            for _ in range(1 + arguments.steps):
                torch.distributed.barrier()
                begin = time.perf_counter()
                run()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
            return median(times[1:])

        common = {"global_batch_size": len(rows), "mini_batch_size": len(rows), "epochs": 1, "calculate_entropy": False}
        old = seconds(lambda: worker.infer_batch(nested_batch(rank_rows, compute_loss=False, calculate_entropy=True)))
        update = seconds(lambda: worker.train_mini_batch(nested_batch(rank_rows, **common)))
        tokens = float(sum(len(ids) for ids, _ in rows))
        row = {"engine": arguments.engine, "rows": len(rows), "row_tokens": tokens}
        row |= {"old_logprob_seconds": old, "update_seconds": update}
        if device.type == "cuda":
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if torch.distributed.get_rank() == 0:
            report.add(row)
        torch.distributed.barrier()
    return 0


if __name__ == "__main__":
    run_entry_point(main)
