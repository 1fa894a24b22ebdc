"""Compares a Megatron checkpoint with the Hugging Face checkpoint that it was made from, or that was made from it.

    megatron-dta verify-checkpoint --hf-checkpoint models/llama --load checkpoints/llama

Both models run in float64 on the same tokens, one after the other. The command compares logits, logprobs and the
gradient of every tensor, relative to the largest magnitude in the tensor, and every weight by itself; the exit status
is 1 if a difference is above the tolerance. An exact conversion differs by 1e-12 and not at all in weights; another
epsilon of a single norm gives 1e-7 or more. A checkpoint that was rounded when it was exported differs by what rounding
does. Tokens are random unless a rollout file is given. The command needs Hugging Face transformers (pip install
"megatron_dta[parity]") and 28 bytes of memory a parameter.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from pathlib import Path

import torch
from rich.table import Table

from megatron_dta.common.command_line import CommandLineParser, check_at_least, print_json
from megatron_dta.common.console import Console
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.training.huggingface.config.config import architecture, read_hf_config, settings_from_hf
from megatron_dta.training.huggingface.files import carried_text, weight_map_of


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("--hf-checkpoint", required=True, metavar="DIR", help="Hugging Face checkpoint (safetensors)")
    parser.add_argument("--load", required=True, metavar="DIR", help="folder of the Megatron checkpoint")
    parser.add_argument("--tokens", metavar="FILE", help="rollouts (.jsonl, .parquet, .npz); default: random tokens")
    parser.add_argument("--num-sequences", type=int, default=4, metavar="N", help="sequences to compare (default 4)")
    parser.add_argument(
        "--seq-length", type=int, default=128, metavar="N", help="maximum tokens of a sequence (default 128)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of random tokens (default 0)")
    parser.add_argument(
        "--tolerance", type=float, default=1e-9, metavar="X", help="maximum relative difference (default 1e-9)"
    )
    parser.add_argument("--rows", type=int, default=10, metavar="N", help="worst tensors of each kind in the table")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every tensor as the last line")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, "num_sequences")
    check_at_least(arguments, 2, "seq_length")
    check_at_least(arguments, 0, "seed", "rows", "tolerance")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    config = read_hf_config(arguments.hf_checkpoint)
    family = architecture(config, f"{arguments.hf_checkpoint}/config.json")
    # Megatron takes seconds to import, so the command line is checked first.
    from megatron_dta.core.model.build import build_model
    from megatron_dta.core.model.parallel.mesh import initialize_parallel
    from megatron_dta.extras.parity.huggingface import load_huggingface, to_huggingface, train_padding
    from megatron_dta.extras.parity.one_pass import differences, run_ours, run_reference
    from megatron_dta.training.checkpoint.files import required_checkpoint
    from megatron_dta.training.checkpoint.save_load import load_weights

    path = required_checkpoint("--load", arguments.load)
    settings = settings_from_hf(arguments.hf_checkpoint, {"max_position_embeddings": arguments.seq_length})
    model_config = ModelConfig(**settings, params_dtype=torch.float64)
    samples = load_samples(arguments, model_config.vocab_size)

    device = initialize_parallel(arguments.seed)
    model = build_model(model_config, device)
    load_weights(path, model_config, model)
    ours = run_ours(model, lambda tensors: to_huggingface(tensors, model_config, family.architecture), samples)
    del model
    reference = load_huggingface(arguments.hf_checkpoint).to(device)
    padding = train_padding(reference)
    rows = differences(ours, run_reference(reference, samples))

    tokens = sum(len(sample.token_ids) for sample in samples)
    table = Table(title=f"{path} and {arguments.hf_checkpoint}: {len(samples)} sequences, {tokens} tokens")
    for heading in ("kind", "tensor", "absolute", "relative"):
        table.add_column(heading, overflow="fold")
    worst = {}
    for kind in dict.fromkeys(row.kind for row in rows):
        of_kind = sorted((row for row in rows if row.kind == kind), key=lambda row: -row.relative)
        worst[kind] = of_kind[0]
        for row in of_kind[: max(1, arguments.rows)]:
            table.add_row(row.kind, row.name, f"{row.absolute:.1e}", f"{row.relative:.1e}")
    Console(soft_wrap=True).print(table)
    carried = carried_text(weight_map_of(Path(arguments.hf_checkpoint)))
    if carried is not None:
        print(f"not compared: {carried}, which lie beside the text model")
    if padding is not None:
        print(
            f"pad_token_id {padding}: transformers gives this row of the embedding no gradient; here it gets one on "
            "both sides, as in training"
        )
    failed = {kind: row for kind, row in worst.items() if not row.relative <= arguments.tolerance}
    for kind, row in failed.items():
        print(f"{kind} {row.name} differs by {row.relative:.1e}, above the tolerance {arguments.tolerance:g}")
    if not failed:
        print(f"{len(rows)} comparisons are within tolerance")
    if arguments.json:
        summary = {f"max_{kind}_difference": _plain(row.relative) for kind, row in worst.items()}
        tensors = [{name: _plain(value) for name, value in asdict(row).items()} for row in rows]
        print_json({**summary, "passed": not failed, "tokens": tokens, "tensors": tensors})
    return 1 if failed else 0


def _plain(value: float | str) -> float | str | None:
    """Replace infinity, the difference of a tensor that only one side has, by None, as JSON has no infinity."""
    return None if value == math.inf else value


def load_samples(arguments: argparse.Namespace, vocab_size: int) -> list[TrainingSample]:
    """Return the file's first sequences, cut, or random ones."""
    from megatron_dta.extras.parity.one_pass import random_samples, training_sample

    if arguments.tokens is None:
        return random_samples(vocab_size, arguments.num_sequences, arguments.seq_length, arguments.seed)
    rollouts = load_rollouts(arguments.tokens, vocab_size=vocab_size, max_sequences=arguments.num_sequences)
    sequences = [rollout.token_ids[: arguments.seq_length] for rollout in rollouts]
    samples = [training_sample(token_ids) for token_ids in sequences if len(token_ids) > 1]
    if not samples:
        raise InputError(f"--tokens {arguments.tokens}: no sequence has two tokens")
    return samples
