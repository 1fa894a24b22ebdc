"""The command line of training, generated from the dataclasses in ``megatron_dta.training.config``.

Every dataclass is a group of flags and every field a flag, with its name (with dashes), type, choices, default and
help. Flags have Megatron's names if Megatron has them. ``@FILE`` stands for the arguments in a file, which may hold
several per line and comments; later arguments override earlier ones. Arguments that cannot be parsed or contradict each
other raise an ``InputError`` that names the flag and the fix.
"""

from __future__ import annotations

import argparse
import shlex
import types
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.config.options import CONFIG_JSON, flag_of
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.config.checks.all import check_config
from megatron_dta.training.config.checks.other_names import name_here
from megatron_dta.training.huggingface.config.arguments import add_hf_settings


class _Parser(CommandLineParser):
    def meant(self, word: str) -> str:
        """The message for an unknown word, with similar flags; it also knows slime's and verl's names."""
        flag = word.partition("=")[0]
        if any(flag_of(setting) == flag for setting in fields(ModelConfig) if setting.metadata["flag"] == CONFIG_JSON):
            return f"{flag} is read from the config.json of --load-hf or --hf-checkpoint; leave it out"
        return name_here(word) or super().meant(word)

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """The words of a line of an argument file, as a shell would take them; # begins a comment."""
        try:
            return shlex.split(arg_line, comments=True)
        except ValueError as error:
            raise InputError(f"an argument file has a line that cannot be read ({error}): {arg_line}") from None


def parse_arguments(argv: Sequence[str] | None = None) -> TrainConfig:
    """The checked settings that ``argv`` (``sys.argv[1:]`` if None) asks for; raises ``InputError``."""
    config = parse_settings(argv)
    check_config(config)
    return config


def parse_settings(argv: Sequence[str] | None = None) -> TrainConfig:
    """The settings of ``argv``, which need not describe a complete run."""
    return settings_from(vars(_parser().parse_args(argv)))


def settings_from(named: dict[str, Any]) -> TrainConfig:
    """The settings of the flags ``named``, by field, and all settings derived from them."""
    given = add_hf_settings(named)
    topics = {}
    for topic, dataclass_type in _topics().items():
        names = [setting.name for setting in fields(dataclass_type)]
        missing = [flag_of(setting) for setting in _flags(dataclass_type) if _is_missing(setting, given)]
        if missing:
            raise InputError(
                f"the following arguments are required: {', '.join(missing)}; give them, or --hf-checkpoint with a "
                "folder that holds a config.json (--help lists all flags)"
            )
        topics[topic] = dataclass_type(**{name: given[name] for name in names if name in given})
    return TrainConfig(**topics)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser, with an argument group per topic of ``TrainConfig``. Its result holds only the given flags."""
    parser = _Parser(
        prog="megatron-dta train",
        description="Exact RL training on prefix trees. An argument @FILE stands for the arguments in that file.",
        formatter_class=argparse.HelpFormatter,
        fromfile_prefix_chars="@",
        argument_default=argparse.SUPPRESS,
    )
    for topic, dataclass_type in _topics().items():
        group = parser.add_argument_group(topic)
        hints = get_type_hints(dataclass_type)
        for setting in _flags(dataclass_type):
            group.add_argument(flag_of(setting), dest=setting.name, **_argparse_options(setting, hints[setting.name]))
    return parser


@cache
def _parser() -> argparse.ArgumentParser:
    return build_parser()


@cache
def _topics() -> dict[str, type]:
    return get_type_hints(TrainConfig)


def _flags(dataclass_type: type) -> list[Field]:
    return [setting for setting in fields(dataclass_type) if setting.metadata["command_line"]]


def _is_missing(setting: Field, given: dict[str, Any]) -> bool:
    return setting.default is MISSING and setting.name not in given


def _argparse_options(setting: Field, hint: Any) -> dict[str, Any]:
    """Keyword arguments of ``add_argument`` for one field; ``hint`` is its type: a scalar, a list, either or None."""
    required = setting.default is MISSING
    help_text = setting.metadata["help"]
    if hint is bool:
        return {"action": "store_true", "help": help_text}
    if get_origin(hint) in (types.UnionType, Union):
        (hint,) = (kind for kind in get_args(hint) if kind is not type(None))
        if hint is bool:
            return {"action": argparse.BooleanOptionalAction, "help": help_text}
    if required:
        help_text += " Required without --hf-checkpoint."
    elif setting.default is not None:
        help_text += f" Default: {setting.default}."
    options: dict[str, Any] = {"help": help_text}
    if get_origin(hint) is list:
        (hint,) = get_args(hint)
        # Values may follow one flag, or the flag be repeated.
        options |= {"nargs": "+", "action": "extend"}
    choices = setting.metadata["choices"]
    if choices:
        options["choices"] = choices
    else:
        options["metavar"] = {int: "N", float: "X", str: "TEXT"}[hint]
    return {**options, "type": hint}
