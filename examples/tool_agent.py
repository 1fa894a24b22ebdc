"""A tool task for agents, and two agents for it that know nothing of training.

A drawer for each letter holds a number from 0 to 3 that the prompt does not tell. The user asks for the sum of two
drawers, ``b+e?``. The model must look both of them up, one call of a tool at a time, and then answer. The reward is 1
for the right sum, else 0.

    openai_agent    a loop around the package openai: chat completions, tools, until an answer without a tool call
    sdk_agent       the same task in OpenAI's Agents SDK (package openai-agents), whose Runner has its own loop

    python examples/tool_agent.py --output DIR

writes ``DIR/tokenizer`` (a tokenizer of words, with a chat template in Qwen's form), ``DIR/prompts.jsonl``,
``DIR/held_out.jsonl`` and ``DIR/warmup.jsonl``: dialogues of a careless teacher who often looks up only one of the two
drawers and guesses. ``examples/tool_agent.sh`` trains on them and then by GRPO with the agent.
"""

from __future__ import annotations

import asyncio
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.tokenizer import HuggingFaceTokenizer

LETTERS, VALUES = "abcdefgh", 4
SYSTEM = "Add two drawers. Look up both."
CALL, END_OF_CALL = '<tool_call>\n{"name": "look_up", "arguments": {"drawer": "', '"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "number in a drawer",
            "parameters": {
                "type": "object",
                "properties": {"drawer": {"type": "string"}},
                "required": ["drawer"],
                "additionalProperties": False,
            },
        },
    }
]
MOST_TURNS = 4
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@lru_cache
def client(base_url: str) -> Any:
    """One client for all threads, with its pool of connections; each call gives its session's key."""
    from openai import OpenAI

    return OpenAI(base_url=base_url, api_key="none", max_retries=0)


def openai_agent(record: dict[str, Any], access: Any) -> float:
    """Answer a record with the package openai; returns the reward."""
    own = client(access.base_url).with_options(api_key=access.api_key)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": record["prompt"]}]
    for _ in range(MOST_TURNS):
        reply = own.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        if not reply.tool_calls:
            return float((reply.content or "").strip() == record["answer"])
        messages.append(reply)
        for call in reply.tool_calls:
            drawer = str(json.loads(call.function.arguments).get("drawer"))
            content = str(record["drawers"].get(drawer, "none"))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return 0.0


def sdk_agent(record: dict[str, Any], access: Any) -> float:
    """Answer a record with OpenAI's Agents SDK; returns the reward."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from agents.exceptions import MaxTurnsExceeded
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def look_up(drawer: str) -> str:
        """number in a drawer"""
        return str(record["drawers"].get(drawer, "none"))

    async def run() -> str:
        async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0) as own:
            model = OpenAIChatCompletionsModel("policy", own)
            agent = Agent(name="adder", instructions=SYSTEM, tools=[look_up], model=model)
            try:
                return str((await Runner.run(agent, record["prompt"], max_turns=MOST_TURNS)).final_output)
            except MaxTurnsExceeded:
                return ""

    return float(asyncio.run(run()).strip() == record["answer"])


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose tokens are the words of the task, and its chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    words = [CALL, END_OF_CALL, SYSTEM, "system", "user", "assistant", "tool", "none", "\n", "+", "?", " "]
    words += [*LETTERS, *"0123456789", *"ijklmnopqrstuvwxyz", '"', "{", "}", ":", ",", "<", ">", "/", "_", ".", "-"]
    words = list(dict.fromkeys(words))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*words, "<unk>"])}, unk_token="<unk>"))
    longest_first = sorted(words, key=len, reverse=True)
    pattern = "|".join(
        "".join(f"\\{c}" if not c.isalnum() and c != "\n" else c for c in word) for word in longest_first
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def draw_record(random: np.random.Generator) -> dict[str, Any]:
    """A prompt's row: the question, what the drawers hold, the sum."""
    drawers = {letter: int(value) for letter, value in zip(LETTERS, random.integers(VALUES, size=8), strict=True)}
    first, second = random.choice(list(LETTERS), 2, replace=False).tolist()
    return {"prompt": f"{first}+{second}?", "drawers": drawers, "answer": str(drawers[first] + drawers[second])}


def warmup_rollout(
    record: dict[str, Any], care: float, random: np.random.Generator, template: ChatTemplate, tokenizer: Any
) -> Rollout:
    """A dialogue of the careless teacher; what the assistant says is trained."""
    asked = [record["prompt"][0], record["prompt"][2]]
    if random.random() >= care:
        asked = asked[: int(random.integers(2))]
    known = sum(record["drawers"][letter] for letter in asked)
    answer = known + sum(int(random.integers(VALUES)) for _ in range(2 - len(asked)))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": record["prompt"]},
    ]
    token_ids, loss_mask = [], []
    for turn in [*asked, None]:
        own = {"role": "assistant", "content": "" if turn else str(answer)}
        if turn:
            own["tool_calls"] = [{"function": {"name": "look_up", "arguments": {"drawer": turn}}}]
        before = template.text(messages, TOOLS, True)
        after = template.text([*messages, own], TOOLS, False)
        prompt = tokenizer.encode(before).tolist()
        spoken = tokenizer.encode(after[len(before) :].rstrip("\n")).tolist()
        loss_mask += [False] * (len(prompt) - len(token_ids)) + [True] * len(spoken)
        token_ids = prompt + spoken
        messages += [own, {"role": "tool", "content": str(record["drawers"].get(turn, ""))}]
    return Rollout(token_ids=np.array(token_ids, np.int32), loss_mask=np.array(loss_mask))


def main() -> int:
    """Write the files of the task."""
    parser = CommandLineParser(main.__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--care", type=float, default=0.3, help="how often the teacher is careful (default: %(default)s)"
    )
    parser.add_argument("--count", type=int, default=2400, help="dialogues of the teacher (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=2000, help="prompts to write (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=64, help="prompts to hold out (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    arguments = parser.parse_args()
    random, folder = np.random.default_rng(arguments.seed), arguments.output
    write_tokenizer(folder / "tokenizer")
    template, tokenizer = ChatTemplate(folder / "tokenizer"), HuggingFaceTokenizer(folder / "tokenizer")
    dialogues = [
        warmup_rollout(draw_record(random), arguments.care, random, template, tokenizer) for _ in range(arguments.count)
    ]
    write_rollouts(folder / "warmup.jsonl", dialogues)
    for name, count in (("prompts", arguments.prompts), ("held_out", arguments.held_out)):
        lines = [json.dumps(draw_record(random)) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{folder}: a vocabulary of {tokenizer.vocab_size}, dialogues of up to {max(map(len, dialogues))} tokens")
    return 0


if __name__ == "__main__":
    run_entry_point(main)
