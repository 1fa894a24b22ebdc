"""Maps the names of settings in slime and verl to the flags here, for the documentation and for unknown flags."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import NamedTuple


class Names(NamedTuple):
    """A row of the table in docs/from_verl_and_slime.md; the cells are Markdown."""

    slime: str
    verl: str
    here: str


NAMES = (
    Names(
        "`--hf-checkpoint`",
        "`actor_rollout_ref.model.path`",
        "`--load-hf` (weights and settings), `--hf-checkpoint` (settings only)",
    ),
    Names("`--ref-load`", "the reference is the start", "`--ref-load` (default: where the run starts)"),
    Names("`--prompt-data`", "`data.train_files`", "`--prompt-data` (JSONL, Parquet)"),
    Names("`--input-key`, `--label-key`", "`data.prompt_key`", "`--input-key`, `--label-key`"),
    Names("", "`data.filter_overlong_prompts`", "`--filter-overlong-prompts`"),
    Names("`--eval-prompt-data`", "`data.val_files`", "`--eval-prompt-data` with `--eval-interval`"),
    Names("`--rollout-batch-size`", "`data.train_batch_size`", "`--rollout-batch-size` (prompts)"),
    Names("`--n-samples-per-prompt`", "`actor_rollout_ref.rollout.n`", "`--n-samples-per-prompt`"),
    Names(
        "`--global-batch-size`",
        "`actor.ppo_mini_batch_size` (prompts)",
        "`--global-batch-size` (rollouts) or `--num-steps-per-rollout`",
    ),
    Names("", "`actor.ppo_epochs`", "`--ppo-epochs`"),
    Names("`--rollout-max-response-len`", "`data.max_response_length`", "`--rollout-max-response-len`"),
    Names(
        "`--rollout-temperature`, `--rollout-top-p`",
        "`rollout.temperature`, `rollout.top_p`",
        "`--rollout-temperature`, `--rollout-top-p`",
    ),
    Names(
        "`--advantage-estimator`",
        "`algorithm.adv_estimator`",
        "`--advantage-estimator`, `--objective ppo` for GAE with a critic",
    ),
    Names(
        "`--eps-clip`, `--eps-clip-high`",
        "`actor.clip_ratio_low`, `actor.clip_ratio_high`",
        "`--eps-clip`, `--eps-clip-high`",
    ),
    Names("`--eps-clip-c`", "`actor.clip_ratio_c`", "`--dual-clip`"),
    Names(
        "`--use-kl-loss --kl-loss-coef`, `--kl-loss-type`",
        "`actor.use_kl_loss`, `actor.kl_loss_coef`, `actor.kl_loss_type` (`low_var_kl` is k3)",
        "`--kl-loss-coef` above 0, `--kl-loss-type`",
    ),
    Names("`--kl-coef`", "`algorithm.use_kl_in_reward`, `kl_ctrl.kl_coef`", "`--kl-coef`"),
    Names("`--entropy-coef`", "`actor.entropy_coeff`", "`--entropy-coef`"),
    Names(
        "`--use-tis`, `--tis-clip`", "`actor.tis_imp_ratio_cap`", "`--use-tis --old-logprobs recompute`, `--tis-clip`"
    ),
    Names(
        "",
        "`actor.loss_agg_mode`",
        "`--loss-aggregation`: `token-mean`; `sequence-mean` for seq-mean-token-mean; `sequence-sum` for Dr. GRPO",
    ),
    Names(
        "`--disable-grpo-std-normalization`",
        "`algorithm.norm_adv_by_std_in_grpo=False`",
        "`--disable-grpo-std-normalization`",
    ),
    Names(
        "`--over-sampling-batch-size` with a dynamic filter",
        "`algorithm.filter_groups`",
        "`--dynamic-sampling`, or `--over-sampling-batch-size`",
    ),
    Names(
        "`--apply-chat-template`, `--apply-chat-template-kwargs`",
        "(always), `data.apply_chat_template_kwargs`",
        "`--apply-chat-template`, `--apply-chat-template-kwargs`",
    ),
    Names(
        "`--rm-type`, `--custom-rm-path`",
        "`custom_reward_function.path`, `custom_reward_function.name`",
        "`--reward-function NAME` or `FILE.py:NAME`",
    ),
    Names("`--group-rm`", "`reward_model.reward_manager`", "`--reward-function FILE.py:NAME`: a function of lists"),
    Names("`--rm-type remote_rm --rm-url`", "", "`--reward-function remote --reward-server-url`"),
    Names("`--num-rollout`", "`trainer.total_training_steps`", "`--train-iters` (optimizer steps)"),
    Names(
        "`--save-interval`", "`trainer.save_freq`", "`--save-interval`, `--keep-checkpoints`, `--keep-best-checkpoint`"
    ),
    Names(
        "`--tensor-model-parallel-size` ...",
        "`actor.megatron.*_parallel_size`",
        "Megatron's flags, such as `--tensor-model-parallel-size`, on `torchrun`",
    ),
    Names(
        "`--context-parallel-size`",
        "`actor.megatron.context_parallel_size`, `actor.ulysses_sequence_parallel_size`",
        "`--context-parallel-size` (divides the tokens and heads of every segment)",
    ),
    Names("`--save-debug-rollout-data`", "`trainer.rollout_data_dir`", "`--save-rollouts-interval`"),
    Names("`--lr`", "`actor.optim.lr`", "`--lr`"),
    Names(
        "`--max-tokens-per-gpu`",
        "`actor.ppo_max_token_len_per_gpu`, `actor.ppo_micro_batch_size_per_gpu`",
        "`--tree-memory-tokens` (no batch is packed or padded)",
    ),
    Names("`--sglang-router-ip`", "`rollout.name`", "`--rollout-engine` and `--rollout-server-url`"),
    Names(
        "`--update-weight-buffer-size`",
        "`rollout.checkpoint_engine.backend`",
        "`--rollout-weight-transfer` (folder, nccl, ipc)",
    ),
    Names(
        "`--actor-num-nodes`, `--actor-num-gpus-per-node`",
        "`trainer.nnodes`, `trainer.n_gpus_per_node`",
        "the processes that `torchrun` or Slurm starts",
    ),
    Names("`--save`", "`trainer.default_local_dir`", "`--save`"),
    Names("`--eval-interval`", "`trainer.test_freq`", "`--eval-interval`"),
    Names(
        "`--use-wandb`, `--wandb-group`",
        "`trainer.project_name`, `trainer.experiment_name`",
        "`--wandb-project`; the run has the name of its `--save` folder",
    ),
    Names("`--yaml*` (Megatron's)", "`--config*` (Hydra's)", "`@FILE`, a file of arguments"),
)
_NOISE = "sequences that share a prefix would share its noise, unlike sequences trained separately; leave it out"
_DROPS = "the dropped tokens would depend on the other tokens of a segment; leave it out"
_DECIDED = "there is one that does not depend on how a batch is cut into segments; leave it out"
# Flags of Megatron that do not exist here, and why.
REFUSED = {
    "--fp16": "float16 needs loss scaling; use --bf16",
    **dict.fromkeys(("--attention-dropout", "--hidden-dropout", "--lora-dropout", "--moe-input-jitter-eps"), _NOISE),
    **dict.fromkeys(
        ("--moe-expert-capacity-factor", "--moe-pad-expert-input-to-capacity", "--moe-token-drop-policy"), _DROPS
    ),
    "--group-query-attention": "--num-query-groups says it; leave it out",
    "--moe-grouped-gemm": "experts always run as grouped products; leave it out",
    **dict.fromkeys(("--recompute-method", "--recompute-num-layers"), "each layer is recomputed; leave it out"),
    **dict.fromkeys(("--moe-router-load-balancing-type", "--moe-token-dispatcher-type"), _DECIDED),
}
_CODE = re.compile(r"`([^`]+)`")


def markdown_table() -> str:
    """The table as it appears in docs/from_verl_and_slime.md."""
    rows = [Names("slime", "verl", "here"), Names("---", "---", "---"), *NAMES]
    lines = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join(lines).replace("|  |", "| |").replace("| --- | --- | --- |", "|---|---|---|")


def name_here(word: str) -> str | None:
    """What to use for ``word``, a flag of Megatron or slime or a setting of verl (``name=value``); None if unknown."""
    key = word.lstrip("+-").partition("=")[0] if not word.startswith("--") else word.partition("=")[0]
    if key in REFUSED:
        return f"{key} is refused: {REFUSED[key]}"
    for row in NAMES:
        for program, cell in (("slime", row.slime), ("verl", row.verl)):
            if any(_is_named(key, name.partition("=")[0]) for code in _CODE.findall(cell) for name in code.split()):
                return f"{key} is a name from {program}; here: {row.here.replace('`', '')}"
    return None


def _is_named(key: str, name: str) -> bool:
    """Whether ``key`` matches ``name``, which may contain a star and omit the first parts of a dotted name."""
    if not (name.startswith("--") or "." in name):
        return False
    return fnmatchcase(key, name) or (not name.startswith(("-", ".")) and fnmatchcase(key, f"*.{name}"))
