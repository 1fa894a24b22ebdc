"""What the runs of a real model showed: held-out rewards, seconds by phase, curves, and answers before and after.

    python examples/real_model/report.py OUT RUN... --start FOLDER --questions HELD_OUT.jsonl [--sessions]

Reads the metrics of ``OUT/RUN`` and answers three held-out questions greedily with the model of ``FOLDER`` and with
that of ``OUT/RUN-hf`` for the first run (or ``--trained``), both loaded by transformers; with ``--sessions`` the agent
of ``repairs.py`` plays three sampled sessions with each of them. Writes ``OUT/curves.png`` and
``OUT/summary.json``; the status is 1 if the first run did not improve the held-out reward.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.common.measurement import measured_on
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import replacing
from megatron_dta.training.monitor.metrics import read_metrics

PHASES = {"sampling": "collect", "logprobs": "logprobs", "planning": "plan", "training": "train", "update": "update"}


def main() -> int:
    """Print the report; status 1 if the model did not learn."""
    parser = CommandLineParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("runs", nargs="+", metavar="run", help="folders of runs in it")
    parser.add_argument("--start", type=Path, required=True, help="Hugging Face folder that the runs started from")
    parser.add_argument("--questions", type=Path, required=True, help="held-out prompts")
    parser.add_argument("--trained", type=Path, help="Hugging Face folder of the trained model (default: OUT/RUN-hf)")
    parser.add_argument("--max-new-tokens", type=int, default=160, help="tokens of an answer")
    parser.add_argument("--sessions", action="store_true", help="sessions of the coding agent instead of answers")
    arguments = parser.parse_args()
    records = {run: read_metrics(arguments.out / run / "metrics.jsonl") for run in arguments.runs}
    curves = {
        run: [(record["iteration"], record["eval_reward"]) for record in steps if "eval_reward" in record]
        for run, steps in records.items()
    }
    if not all(len(curve) > 1 for curve in curves.values()):
        raise InputError(f"{arguments.out}: no metrics of finished runs")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    summary = {
        **measured_on("GRPO of SmolLM2-135M-Instruct, examples/real_model/report.py", vars(arguments), device),
        "runs": {run: {"held_out": curves[run], **seconds_of(steps)} for run, steps in records.items()},
    }
    with replacing(arguments.out / "summary.json") as unfinished:
        unfinished.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    plot(curves, records, arguments.out / "curves.png")
    trained = arguments.trained or arguments.out / f"{arguments.runs[0]}-hf"
    rows = [json.loads(line) for line in arguments.questions.read_text(encoding="utf-8").splitlines()[:3]]
    if arguments.sessions:
        print_sessions({"before": arguments.start, "after": trained}, rows)
        print_tokens(records[arguments.runs[0]])
    else:
        print_answers(arguments.start, trained, rows, arguments.max_new_tokens)
    print("\nheld-out reward, sampled at temperature 1, by number of GRPO steps:")
    for run, curve in curves.items():
        print(f"  {run:8}" + "".join(f"  {step}: {reward:.3f}" for step, reward in curve))
    print("\nseconds a step (mean without the first two), and of them:")
    for run, figures in summary["runs"].items():
        parts = ", ".join(f"{phase} {value:.3f}" for phase, value in figures["phases"].items())
        print(f"  {run:8}  {figures['step_seconds']:.3f}: {parts}; token reuse {figures['token_reuse']:.2f}")
    before, after = curves[arguments.runs[0]][0][1], curves[arguments.runs[0]][-1][1]
    print(f"\nGRPO took the held-out reward from {before:.3f} to {after:.3f}")
    return int(after <= before)


def seconds_of(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean seconds of a step and of its phases; the first two steps compile kernels and capture graphs."""
    later = [record for record in steps if "tokens" in record][2:] or [r for r in steps if "tokens" in r]
    timing = [record["timing"] for record in later]

    def mean(name: str) -> float:
        return sum(step.get(f"{name}_seconds", 0.0) for step in timing) / len(timing)

    return {
        "step_seconds": mean("step"),
        "phases": {phase: mean(name) for phase, name in PHASES.items()},
        "token_reuse": sum(r["tokens"] for r in later) / sum(r["unique_tokens"] for r in later),
        "decoded_tokens": sum(r.get("decoded_tokens", 0) for r in later) / len(later),
    }


def plot(curves: dict[str, list], records: dict[str, list[dict[str, Any]]], picture: Path) -> None:
    """Held-out rewards as lines with points, training rewards faintly."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (run, curve) in enumerate(curves.items()):
        colour = f"C{index}"
        trained = [(r["iteration"], r["reward"]) for r in records[run] if "reward" in r]
        axes.plot(*zip(*trained, strict=True), color=colour, alpha=0.25, linewidth=1)
        axes.plot(*zip(*curve, strict=True), "o-", color=colour, label=f"{run}, held-out problems")
    axes.set(xlabel="GRPO step", ylabel="reward", ylim=(0, 1), title="SmolLM2-135M-Instruct")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    with replacing(picture) as unfinished:
        figure.savefig(unfinished, format="png", dpi=150)


def completion(folder: Path, max_new_tokens: int, **sampling: Any) -> Callable[[list[dict[str, str]]], str]:
    """What the folder's model answers to messages, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def complete(messages: list[dict[str, str]]) -> str:
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, max_new_tokens=max_new_tokens, **sampling)
        return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()

    return complete


def print_sessions(models: dict[str, Path], rows: list[dict[str, Any]]) -> None:
    """A session of each model in each repository, sampled at temperature 1."""
    import repairs

    torch.manual_seed(1)
    for label, folder in models.items():
        complete = completion(folder, 24, do_sample=True, temperature=1.0, top_k=0)
        for row in rows:
            reward, messages = repairs.play(row, complete)
            print(f"\n{label}: a session with the reward {reward:g} (the repair: {row['repair']})")
            for message in messages[1:]:
                print(f"  {message['role']:9} " + message["content"].replace("\n", "\n" + " " * 12))


def print_tokens(steps: list[dict[str, Any]]) -> None:
    """Tokens of a step: computed, as one row a session, and as one row a call."""
    sums = [sum(step.get(name, 0) for step in steps) for name in ("unique_tokens", "tokens", "session_row_tokens")]
    print("\ntokens of all steps: computed {:,.0f}; a row a session {:,.0f}; a row a call {:,.0f}".format(*sums))


def print_answers(start: Path, trained: Path, rows: list[dict[str, Any]], max_new_tokens: int) -> None:
    """Three questions, each with the greedy answers of both models."""
    answers = []
    for folder in (start, trained):
        complete = completion(folder, max_new_tokens, do_sample=False)
        answers += [complete([{"role": "user", "content": row["prompt"]}]) for row in rows]
    print("\nthree held-out questions, answered greedily (both folders loaded by transformers):")
    for row, before, after in zip(rows, answers[:3], answers[3:], strict=True):
        for label, text in (
            ("question", row["prompt"]),
            ("right", row["answer"]),
            ("before", before),
            ("after", after),
        ):
            print(f"  {label:9} " + text.replace("\n", "\n" + " " * 12))
        print()


if __name__ == "__main__":
    run_entry_point(main)
