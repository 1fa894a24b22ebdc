"""Prints the command that starts a rollout server of vLLM or SGLang as a training run needs it, or runs it.

    python tools/rollout_server_command.py @run.args --port 8000 -- --tensor-parallel-size 2
    python tools/rollout_server_command.py --exec --rollout-engine sglang --load-hf MODEL --rollout-speculation das

Its flags are those of the training command, so both can share an argument file; of them it needs --rollout-engine, the
model, and what speculation (--rollout-speculation das, --das-*) and logprobs (--rollout-temperature) depend on. What
follows -- is handed on to the server. Give all --rollout-server-url where there are several: they share the window.
In a Slurm job: DTA_SERVER_COMMAND="python tools/rollout_server_command.py --exec @run.args --port 8000".
"""

from __future__ import annotations

import os
import shlex
import sys

from megatron_dta.arguments import build_parser
from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.errors import InputError
from megatron_dta.sampling.engines.servers.command import server_command
from megatron_dta.training_flags import ToolFlags

FLAGS = ToolFlags(
    "tools/rollout_server_command.py",
    ("model",),
    "load_hf hf_checkpoint rollout_engine temperature rollout_top_p rollout_server_url rollout_speculation das_window "
    "das_max_tokens das_depth das_draft_tokens rollout_batch_size over_sampling_batch_size n_samples_per_prompt "
    "rollout_max_response_len treepo_preset",
)
# Shapes that the training command must know and a server reads from its checkpoint.
_SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_size")


def main(argv: list[str] | None = None) -> None:
    """Print the command of a server, or become the server."""
    arguments = sys.argv[1:] if argv is None else argv
    at = arguments.index("--") if "--" in arguments else len(arguments)
    own, more = arguments[:at], arguments[at + 1 :]
    parser = CommandLineParser(__doc__)
    parser.add_argument("--model", help="what the server loads at first (default: --load-hf or --hf-checkpoint)")
    parser.add_argument("--host", help="address that the server listens on (default: the server's)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--exec", action="store_true", help="become the server instead of printing")
    given, training = parser.parse_known_args(own)
    if not 0 < given.port < 2**16:
        raise InputError(f"--port {given.port}: must be a port, 1 to 65535")
    # Nothing is said of what an argument file has for the run: the output is the command.
    config, _ = FLAGS.parse([*_missing_shape(training), *training])
    variables, words = server_command(config, given.model, given.port, given.host, more)
    if words[0] == "python":
        words[0] = sys.executable if given.exec else "python"
    if not given.exec:
        print(" ".join([*(f"{name}={value}" for name, value in variables.items()), shlex.join(words)]))
        return
    os.environ.update(variables)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        raise InputError(f"{words[0]}: cannot be run ({error.strerror}); install the server") from error


def _missing_shape(training: list[str]) -> list[str]:
    """Numbers for the shapes that neither the flags nor a Hugging Face configuration says: the server knows them."""
    said = vars(build_parser().parse_args(training))
    if "hf_checkpoint" in said or "load_hf" in said:
        return []
    return [word for name in _SHAPE if name not in said for word in (f"--{name.replace('_', '-')}", "1")]
