"""Writes docs/reference.md: every flag of training and every metric, from the code that has them.

    python docs/scripts/make_reference.py [--check] [--output docs/reference.md]

--check writes nothing and ends with status 1 if the file is not up to date.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_type_hints

# This checkout, whichever one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import replacing
from megatron_dta.core.config.options import flag_of
from megatron_dta.training.arguments import build_parser
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.monitor.metric_names import METRICS

DEFAULT = Path(__file__).resolve().parent.parent / "reference.md"
HEAD = """# Reference

Every flag of `python -m megatron_dta.train` and every metric it reports.
Written by `python docs/scripts/make_reference.py`: do not edit it. Tools have flags of their own, which `--help` lists.

"""


def reference() -> str:
    """The whole page."""
    topics = get_type_hints(TrainConfig)
    parts = [HEAD, "## Flags\n\n", f"{_links(topics)}\n\n"]
    # argparse knows how a value is written; the dataclass knows everything else.
    written = {action.option_strings[0]: action for action in build_parser()._actions}
    for topic, dataclass_type in topics.items():
        parts.append(f"### {topic}\n\n{_about(dataclass_type)}\n\n| flag | value | default | |\n|---|---|---|---|\n")
        for setting in fields(dataclass_type):
            if setting.metadata["command_line"]:
                parts.append(_row(setting, written[flag_of(setting)]))
        parts.append("\n")
    parts.append("## Metrics\n\n" + inspect.cleandoc(METRICS_ABOUT) + "\n\n")
    for topic, metrics in METRICS.items():
        parts.append(f"### {topic}\n\n| metric | |\n|---|---|\n")
        parts += [f"| `{name}` | {_cell(text)} |\n" for name, text in metrics.items()]
        parts.append("\n")
    return "".join(parts).rstrip("\n") + "\n"


METRICS_ABOUT = """
One JSON object a step in `metrics.jsonl`, the same numbers in TensorBoard and Weights & Biases (those under `timing` as
`timing/NAME`). A metric is there where the settings give it a meaning; a value that is not finite is null.
"""


def _links(topics: dict[str, Any]) -> str:
    return ", ".join(f"[{topic}](#{topic})" for topic in topics)


def _about(dataclass_type: type) -> str:
    return " ".join(inspect.cleandoc(dataclass_type.__doc__ or "").split())


def _row(setting: Field, action: argparse.Action) -> str:
    choices = setting.metadata["choices"]
    if action.nargs == 0:
        value = ""
    elif choices:
        value = ", ".join(f"`{choice}`" for choice in choices)
    else:
        value = {int: "integer", float: "number", str: "text"}[action.type]  # type: ignore[index]
        value += _bounds(setting.metadata) + (", several" if action.nargs == "+" else "")
    default = ""
    if setting.default is MISSING:
        default = "required"
    elif setting.default is not None and action.nargs != 0:
        default = f"`{setting.default}`"
    return f"| `{flag_of(setting)}` | {_cell(value)} | {_cell(default)} | {_cell(setting.metadata['help'])} |\n"


def _bounds(metadata: Any) -> str:
    """What numbers are allowed, in words."""
    parts = []
    if metadata["minimum"] is not None:
        parts.append(f"at least {metadata['minimum']:,}")
    if metadata["above"] is not None:
        parts.append(f"above {metadata['above']:,}")
    if metadata["maximum"] is not None:
        parts.append(f"at most {metadata['maximum']:,}")
    return " " + ", ".join(parts) if parts else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    parser = CommandLineParser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if the file is not up to date")
    parser.add_argument("--output", type=Path, default=DEFAULT, help="the file (default: docs/reference.md)")
    arguments = parser.parse_args()
    text = reference()
    if arguments.check:
        try:
            same = arguments.output.read_text(encoding="utf-8") == text
        except OSError as error:
            raise InputError(f"{arguments.output}: cannot be read: {error.strerror or error}") from None
        print(f"{arguments.output} is up to date" if same else "it is not: run python docs/scripts/make_reference.py")
        return 0 if same else 1
    with replacing(arguments.output) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(f"wrote {arguments.output}")
    return 0


if __name__ == "__main__":
    run_entry_point(main)
