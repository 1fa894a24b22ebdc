"""The console command ``megatron-dta``: finds the module of a subcommand and runs it."""

from __future__ import annotations

import difflib
import importlib
import sys

import megatron_dta
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError

COMMANDS = {
    "train": "train a model on sampled or stored rollouts",
    "inspect-tree": "show how much rollouts share and how the planner cuts them",
    "plan-run": "predict the memory and time of a run and choose its mesh",
    "convert-hf-to-megatron": "convert a Hugging Face checkpoint",
    "convert-megatron-to-hf": "convert a Megatron checkpoint back",
    "verify-checkpoint": "compare both forms of a checkpoint",
    "check-parity": "compare tree training with one sequence at a time",
    "sample-rollouts": "sample rollouts from a checkpoint",
    "evaluate-sampling": "measure pass@k and maj@k of a checkpoint",
    "gateway": "serve a model to agents and record their sessions as rollouts",
    "teacher": "serve a teacher for distillation from processes of its own",
    "rollout-server-command": "print the command line of a vLLM or SGLang server",
    "report-run": "write the HTML report of a run",
}

# In commands/servers/; "train" is the module of the trainer, all others are in commands/.
_SERVERS = ("gateway", "teacher")


def main() -> int | None:
    """Run ``megatron-dta COMMAND ARGUMENTS``; returns the command's exit status."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"megatron-dta {megatron_dta.__version__}")
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "megatron-dta --help lists the commands"
        raise InputError(f"there is no command '{command}'; {hint}")
    folder = "" if command == "train" else "commands.servers." if command in _SERVERS else "commands."
    module = importlib.import_module(f"megatron_dta.{folder}{command.replace('-', '_')}")
    sys.argv = [f"megatron-dta {command}", *rest]
    return module.main()


def run() -> None:
    """Entry point of the console script."""
    run_entry_point(main)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: megatron-dta COMMAND [ARGUMENTS]",
            "",
            *lines,
            "",
            "megatron-dta COMMAND --help lists a command's flags.",
        ]
    )
