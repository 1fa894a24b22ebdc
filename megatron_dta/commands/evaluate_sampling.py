"""Evaluates a checkpoint by pass@k and maj@k, with independent rollouts and with trees of equal decoded tokens.

    megatron-dta evaluate-sampling --load runs/first [the model's and the sampler's flags, --treepo-...]
        [--k 1 4 16] [--answer boxed|text|PATTERN] [--output FILE.json]

The first --eval-iters held-out prompts are answered (default: all). Trees have --n-samples-per-eval-prompt leaves and
the shape of the --treepo flags. Independent rollouts are sampled twice: as many as the trees have leaves, and as
many as the decoded tokens of the trees allow (the same number for each prompt, rounded down, at least 1). The vote of
maj@k compares text: the whole response, its last \\boxed{...}, or the last match of a regular expression (its first
group, if it has one). Sampling runs in this process and without drafts, also if an argument file (@FILE) sets servers
or drafts; the samples are the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dta.common.command_line import CommandLineParser, json_text
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import check_output, replacing
from megatron_dta.sampling.config import TreePOConfig
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.config.checks.all import check_config
from megatron_dta.training.megatron_args import ENGINE, MESH, TASK, ToolFlags, passed_over

if TYPE_CHECKING:
    from megatron_dta.sampling.interface import RolloutEngine
    from megatron_dta.sampling.task import SamplingTask

_SHAPE = " ".join(setting.name for setting in fields(TreePOConfig))
FLAGS = ToolFlags(
    "megatron-dta evaluate-sampling",
    ("model", "reward"),
    f"{MESH} {TASK} {ENGINE} {_SHAPE} eval_prompt_data eval_temperature n_samples_per_eval_prompt eval_iters",
)


def main() -> None:
    """Read the flags, load the weights, sample both ways, print and write the table."""
    parser = CommandLineParser(__doc__)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="values of k for pass@k and maj@k")
    parser.add_argument("--answer", default="text", help="text to vote on: text, boxed or a regular expression")
    parser.add_argument("--output", metavar="FILE", help="JSON file for the results")
    arguments, others = parser.parse_known_args()
    if arguments.output:
        check_output(arguments.output)
    if min(arguments.k) < 1:
        raise InputError(f"--k {min(arguments.k)}: must be at least 1")
    answer_of = _answer_rule(arguments.answer)
    # The checks of evaluation flags require an interval, although this command evaluates once.
    fixed = {"rollout_method": "treepo", "eval_interval": 1}
    leaves = FLAGS.parse(others, **fixed)[0].sampling.n_samples_per_eval_prompt
    if leaves < 2:
        raise InputError("--n-samples-per-eval-prompt is missing: how many leaves the trees are to have, at least 2")
    # Checks read the width of a tree.
    config, left_out = FLAGS.parse(others, **fixed, n_samples_per_prompt=leaves)
    check_config(config)
    if config.checkpoint.load is None:
        raise InputError("--load is missing: the folder of the checkpoint to judge")

    results = _evaluate(config, arguments.k, answer_of)
    if left_out:
        print(passed_over(left_out))
    _print(results)
    if arguments.output:
        with replacing(Path(arguments.output)) as temporary:
            temporary.write_text(json_text(results, indent=1) + "\n", encoding="utf-8")


def _evaluate(config: TrainConfig, ks: list[int], answer_of: Callable[[str], str]) -> dict[str, dict[str, float]]:
    """Compute the metrics of trees and of independent rollouts."""
    from megatron_dta.sampling.treepo.evaluation import compare_at_equal_tokens

    engine, task = load_engine(config)
    return compare_at_equal_tokens(engine, task, config, ks, answer_of)


def load_engine(config: TrainConfig) -> tuple[RolloutEngine, SamplingTask]:
    """An engine in this process with the weights of ``--load``, and the task, which has held-out prompts."""
    # Megatron takes seconds to import, so flags are checked first.
    from megatron_dta.sampling.task import build_task
    from megatron_dta.training.checkpoint.files import required_checkpoint
    from megatron_dta.training.data.template_date import with_date_of
    from megatron_dta.wiring.engines import build_engine
    from megatron_dta.wiring.setup import build_loaded_model

    checkpoint = required_checkpoint("--load", config.checkpoint.load)
    config = with_date_of(config, checkpoint)
    model = config.model
    task = build_task(
        config.sampling, model.max_position_embeddings, model.vocab_size, config.reward, config.checkpoint.hf_checkpoint
    )
    if not task.eval_prompts:
        raise InputError("there are no held-out prompts: give --eval-prompt-data")
    model = build_loaded_model(config, task.tokenizer, checkpoint)
    return build_engine(config.sampling, model, attention_impl=config.tree.tree_attention_impl), task


def _answer_rule(name: str) -> Callable[[str], str]:
    if name == "text":
        return str.strip
    if name == "boxed":
        from megatron_dta.sampling.treepo.stops import boxed_answer

        return lambda text: (boxed_answer(text) or "").strip()
    try:
        pattern = re.compile(name)
    except re.error as error:
        raise InputError(f"--answer {name}: not text, boxed or a regular expression: {error}") from None

    def last_match(text: str) -> str:
        matches = list(pattern.finditer(text))
        return "" if not matches else (matches[-1].group(1) if pattern.groups else matches[-1].group()).strip()

    return last_match


def _print(results: dict[str, dict[str, float]]) -> None:
    names = list(results)
    width = max(map(len, names)) + 2
    print(" " * 16 + "".join(name.rjust(width) for name in names))
    for metric in dict.fromkeys(metric for values in results.values() for metric in values):
        cells = [format(values[metric], ".4f") if metric in values else "-" for values in results.values()]
        print(metric.ljust(16) + "".join(cell.rjust(width) for cell in cells))
