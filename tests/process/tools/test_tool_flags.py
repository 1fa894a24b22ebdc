"""Every flag that a tool accepts has an effect: training flags that it does not read are refused."""

import argparse
import importlib
import sys
import types
from dataclasses import fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from conftest import REPOSITORY
from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.options import flag_of
from megatron_dta.training.config import TrainConfig

TOOLS = ("evaluate_sampling", "sample_rollouts", "rollout_server_command")
MODEL = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 64"


def settings() -> dict[str, tuple[str, str]]:
    """Flag and a value (maybe none) of every setting of training, by field."""
    flags = {}
    for topic in get_type_hints(TrainConfig).values():
        hints = get_type_hints(topic)
        for setting in fields(topic):
            if not setting.metadata["command_line"]:
                continue
            kind = hints[setting.name]
            if get_origin(kind) in (types.UnionType, Union):
                (kind,) = (option for option in get_args(kind) if option is not type(None))
            if get_origin(kind) is list:
                (kind,) = get_args(kind)
            choices = setting.metadata["choices"]
            value = choices[0] if choices else {bool: "", int: "1", float: "1"}.get(kind, "x")
            flags[setting.name] = (flag_of(setting), value)
    return flags


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_names_what_it_does_not_read_of_an_argument_file(tool: str, tmp_path: Path) -> None:
    flags, known = importlib.import_module(f"megatron_dta.commands.{tool}").FLAGS, settings()
    assert set(flags.names.split()) <= set(known)  # every declared setting exists
    unread = {name: pair for name, pair in known.items() if name not in flags.settings}
    file = tmp_path / "run.args"
    file.write_text(MODEL + "\n" + "\n".join(" ".join(pair) for pair in unread.values()))
    _, left_out = flags.parse([f"@{file}"])
    assert left_out == sorted(flag for flag, _ in unread.values())


@pytest.mark.parametrize(
    ("tool", "flags"),
    [
        *((tool, flags) for tool in TOOLS for flags in ("--lr 1e-5", "--objective ppo")),
        # Tools that sample do so in this process.
        *((tool, flags) for tool in TOOLS[:2] for flags in ("--rollout-speculation das", "--rollout-engine vllm")),
    ],
)
def test_a_flag_that_a_tool_does_not_read_is_refused(tool: str, flags: str) -> None:
    parse = importlib.import_module(f"megatron_dta.commands.{tool}").FLAGS.parse
    command = f"megatron-dta {tool.replace('_', '-')}"
    with pytest.raises(InputError, match=f"{flags.split()[0]} has no effect on {command}, "):
        parse(f"{MODEL} {flags}".split())


def test_what_tools_do_read_arrives() -> None:
    evaluate, sample = (importlib.import_module(f"megatron_dta.commands.{tool}").FLAGS for tool in TOOLS[:2])
    config, _ = evaluate.parse(f"{MODEL} --inference-max-requests 7 --treepo-segment-length 3".split())
    assert (config.sampling.inference_max_requests, config.treepo.treepo_segment_length) == (7, 3)
    config, _ = sample.parse(f"{MODEL} --rollout-stop-degenerate --overlong-buffer-len 7".split())
    assert config.speculation.rollout_stop_degenerate
    assert config.filtering.overlong_buffer_len == 7


def test_output_is_checked_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in TOOLS[:2]:
        monkeypatch.setattr(sys, "argv", [tool, "--output", "none/x.jsonl"])
        with pytest.raises(InputError, match=r"--output none/x\.jsonl: its folder does not exist"):
            importlib.import_module(f"megatron_dta.commands.{tool}").main()


class Recording(argparse.Namespace):
    """Remembers which flags a tool has read, other than to check their bounds."""

    def __getattribute__(self, name: str) -> Any:
        code = sys._getframe(1).f_code
        checks = code.co_name in ("check_arguments", "check_at_least") or code.co_filename.endswith("argparse.py")
        if not name.startswith("_") and not checks:
            object.__getattribute__(self, "__dict__").setdefault("_read", set()).add(name)
        return object.__getattribute__(self, name)


@pytest.mark.parametrize(
    "command",
    [
        "rollout tree-tokens --queries 2 --max-length 300 --mean-length 50 --segment-length 64",
        "rollout decode --batch 2 --prompt-tokens 3 --response-tokens 3 --runs 1 --burst 2 --memory-bandwidth-gbs 10",
        "inspect_tree ROLLOUTS --max-sequences 3",
        "report_run RUN",
    ],
)
def test_own_flags_are_read(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"iteration": 1, "loss": 1.0, "timing": {}}\n')
    words = command.replace("ROLLOUTS", str(REPOSITORY / "examples" / "rollouts.example.jsonl")).replace(
        "RUN", str(run)
    )
    seen: list[Recording] = []
    parse = CommandLineParser.parse_args

    def recorded(self: CommandLineParser, args: Any = None, namespace: Any = None) -> Recording:
        seen.append(parse(self, args, Recording()))
        return seen[-1]

    monkeypatch.setattr(CommandLineParser, "parse_args", recorded)
    name, *arguments = words.split()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    importlib.import_module("rollout" if name == "rollout" else f"megatron_dta.commands.{name}").main()
    values = dict(vars(seen[0]))
    assert set(values) - values.pop("_read") - {"_read"} == set()
