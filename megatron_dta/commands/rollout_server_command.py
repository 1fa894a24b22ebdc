"""Prints or runs the command that starts a vLLM or SGLang rollout server for a training run.

    megatron-dta rollout-server-command @run.args --port 8000 -- --tensor-parallel-size 2
    megatron-dta rollout-server-command --exec --rollout-engine sglang --load-hf MODEL --rollout-speculation das

The flags are those of the training command, so both can share an argument file. The command reads --rollout-engine, the
model, and the settings of speculation (--rollout-speculation das, --das-*) and logprobs (--rollout-temperature).
Arguments after -- are passed to the server. With several servers, give all --rollout-server-url, as the servers share
the window. In a Slurm job: DTA_SERVER_COMMAND="megatron-dta rollout-server-command --exec @run.args --port 8000".
"""

from __future__ import annotations

import os
import shlex
import sys

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.core.common.errors import InputError
from megatron_dta.extras.servers.command import server_command
from megatron_dta.training.arguments import build_parser
from megatron_dta.training.megatron_args import ToolFlags

FLAGS = ToolFlags(
    "megatron-dta rollout-server-command",
    ("model",),
    "load_hf hf_checkpoint rollout_engine temperature rollout_top_p rollout_server_url rollout_speculation das_window "
    "das_depth das_draft_tokens rollout_batch_size over_sampling_batch_size n_samples_per_prompt "
    "rollout_max_response_len rollout_weight_transfer dynamic_sampling "
    "dynamic_sampling_max_rounds",
)
# Sizes that the training command requires and that a server reads from its checkpoint.
_SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_size")


def main(argv: list[str] | None = None) -> None:
    """Print the command of a server, or replace this process by the server."""
    arguments = sys.argv[1:] if argv is None else argv
    at = arguments.index("--") if "--" in arguments else len(arguments)
    flags, more = arguments[:at], arguments[at + 1 :]
    parser = CommandLineParser(__doc__)
    parser.add_argument(
        "--model", help="checkpoint that the server loads at start (default: --load-hf or --hf-checkpoint)"
    )
    parser.add_argument("--host", help="address that the server listens on (default: the server's own)")
    parser.add_argument("--port", type=int, default=8000, help="port of the server (default: 8000)")
    parser.add_argument(
        "--exec", action="store_true", help="run the server in place of this process instead of printing the command"
    )
    options, training = parser.parse_known_args(flags)
    if not 0 < options.port < 2**16:
        raise InputError(f"--port {options.port}: must be a port, 1 to 65535")
    # The output is only the command, so ignored flags of an argument file are not reported.
    config, _ = FLAGS.parse([*_missing_shape(training), *training])
    variables, words = server_command(config, options.model, options.port, options.host, more)
    if words[0] == "python":
        words[0] = sys.executable if options.exec else "python"
    if not options.exec:
        print(" ".join([*(f"{name}={value}" for name, value in variables.items()), shlex.join(words)]))
        return
    os.environ.update(variables)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        raise InputError(f"{words[0]}: cannot be run ({error.strerror}); install the server") from error


def _missing_shape(training: list[str]) -> list[str]:
    """Return placeholder flags for sizes that neither flags nor a Hugging Face configuration give."""
    named = vars(build_parser().parse_args(training))
    if "hf_checkpoint" in named or "load_hf" in named:
        return []
    return [word for name in _SHAPE if name not in named for word in (f"--{name.replace('_', '-')}", "1")]
