"""Parses training flags on the command lines of tools; each tool declares the settings that it reads.

An argument file (``@FILE``) describes a whole run, so its flags that a tool does not read are ignored and listed. Such
a flag on the tool's own command line is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.options import flag_of
from megatron_dta.training.arguments import build_parser, settings_from
from megatron_dta.training.config import TrainConfig

# Settings of the model and the mesh.
MESH = (
    "tensor_model_parallel_size pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank "
    "pipeline_model_parallel_layout expert_model_parallel_size expert_tensor_parallel_size sequence_parallel "
    "distributed_timeout_minutes"
)
# Settings of the weights to sample from, of the prompts and of the rewards.
TASK = (
    "load load_hf hf_checkpoint skip_checkpoint_checks prompt_data task arithmetic_max_operand "
    "reward_function tokenizer_type tokenizer_model apply_chat_template apply_chat_template_kwargs "
    "eos_id input_key label_key "
    "filter_overlong_prompts"
)
# Settings of the in-process rollout engine.
ENGINE = "rollout_top_p rollout_max_response_len temperature inference_max_requests seed"


@dataclass(frozen=True)
class ToolFlags:
    """The settings that a tool reads: all of some topics of ``TrainConfig``, and others by their fields' names."""

    tool: str
    topics: tuple[str, ...]
    names: str

    @property
    def settings(self) -> set[str]:
        """The names of all settings that the tool reads."""
        return set(self.names.split()) | {name for topic in self.topics for name in _settings()[topic]}

    def parse(self, argv: Sequence[str], **fixed: Any) -> tuple[TrainConfig, list[str]]:
        """The settings of ``argv`` (not checked), and the flags of its argument files that the tool does not read.

        Args:
            fixed: settings that the tool decides itself, by field.

        Raises:
            InputError: a flag is given that the tool does not read.
        """
        given = vars(build_parser().parse_args(argv))
        typed = vars(build_parser().parse_args([word for word in argv if not word.startswith("@")]))
        flags = {
            setting.name: flag_of(setting)
            for topic in get_type_hints(TrainConfig).values()
            for setting in fields(topic)
        }
        known = self.settings
        for name in typed:
            if name not in known:
                raise InputError(f"{flags[name]} has no effect on {self.tool}, which does not read it; leave it out")
        read = {name: value for name, value in given.items() if name in known}
        if "load" in read and "load_hf" in read:
            # The run started from these weights. Its checkpoint holds the current weights, of the same shape.
            read.setdefault("hf_checkpoint", read.pop("load_hf"))
        return settings_from({**read, **fixed}), sorted(flags[name] for name in given if name not in known)


def passed_over(flags: Sequence[str]) -> str:
    """The line that lists the ignored flags of an argument file."""
    return f"not read here, of the argument file: {', '.join(flags)}"


def _settings() -> dict[str, list[str]]:
    return {name: [setting.name for setting in fields(topic)] for name, topic in get_type_hints(TrainConfig).items()}
