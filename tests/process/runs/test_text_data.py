"""Text data from files to losses: prompts in Parquet, conversations and preferences."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from chat_folder import CHATML, THINKING, make_chat_folder
from forked import run_python
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.load import PromptReader
from megatron_dta.sampling.prompts.text_rollouts import TextReader, holds_text
from megatron_dta.sampling.prompts.tokenizer import CharacterTokenizer, HuggingFaceTokenizer

transformers = pytest.importorskip("transformers")

MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --swiglu --disable-bias-linear --lr 1e-2 "
    "--max-position-embeddings 160"
)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """``rows`` as JSONL or Parquet, by the suffix."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def reader(folder: Path, **settings: Any) -> TextReader:
    return TextReader(HuggingFaceTokenizer(folder), ChatTemplate(folder), **settings)


def trained_text(folder: Path, rollout: Rollout) -> str:
    """The text of the trained tokens, special ones too."""
    library = transformers.AutoTokenizer.from_pretrained(folder)
    return library.decode(rollout.token_ids[rollout.loss_mask], skip_special_tokens=False)


def train(*arguments: object) -> list[dict[str, Any]]:
    """Run the training command; the records of its metrics and its output."""
    command = ["-m", "megatron_dta.train", *MODEL.split(), *map(str, arguments)]
    done = run_python(command)
    assert done.returncode == 0, done.stderr[-2000:]
    folder = Path(arguments[arguments.index("--save") + 1])
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records[0]["output"] = done.stdout
    return records


# --- masks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_masks_are_those_of_the_library(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)

    def words() -> str:
        return "".join(
            draw.choice(["a", "b", "the ", "\n", " ", "ä", "<|im_start|>"]) for _ in range(draw.randint(1, 9))
        )

    talks = []
    for _ in range(12):
        talk = [user(words())]
        for _ in range(draw.randint(1, 4)):
            talk += [{"role": "tool", "content": words()}] * draw.randint(0, 1) + [assistant("x" + words())]
            talk += [user(words())] * draw.randint(0, 1)
        talks.append(talk)
    folder = make_chat_folder(tmp_path / "model", texts=["the theme of\n\nthe b\n"] * 9 if seed % 2 else None)
    library = transformers.AutoTokenizer.from_pretrained(folder)
    file = write(tmp_path / ("talks.parquet" if seed % 2 else "talks.jsonl"), [{"messages": talk} for talk in talks])
    for talk, rollout in zip(talks, reader(folder).read(file, pairs=False), strict=True):
        expected = library.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        mask = np.array(expected["assistant_masks"], bool)
        end = int(np.flatnonzero(mask)[-1]) + 1
        assert rollout.token_ids.tolist() == expected["input_ids"][:end]
        assert rollout.loss_mask.tolist() == mask[:end].tolist()
        assert rollout.reward is None


def test_a_token_does_not_reach_over_the_beginning_of_a_turn(tmp_path: Path) -> None:
    # Line breaks are merged into one token; the generation prompt ends with one, and the answer begins with one.
    folder = make_chat_folder(tmp_path / "model", texts=["\n\n\n\n"] * 50)
    library = transformers.AutoTokenizer.from_pretrained(folder)
    talk = [user("hi"), assistant("\n\nwell")]
    (rollout,) = reader(folder).read(write(tmp_path / "t.jsonl", [{"messages": talk}]), pairs=False)
    together = library.apply_chat_template(talk, return_dict=False)
    prompt = library.apply_chat_template(talk[:1], add_generation_prompt=True, return_dict=False)
    assert together[: len(prompt)] != prompt  # or this would test nothing
    assert rollout.token_ids[: len(prompt)].tolist() == prompt
    assert trained_text(folder, rollout) == "\n\nwell<|im_end|>"
    assert rollout.loss_mask.tolist() == [False] * len(prompt) + [True] * (len(rollout) - len(prompt))


def test_turns_that_are_written_differently_later(tmp_path: Path) -> None:
    folder = make_chat_folder(tmp_path / "model", THINKING)
    file = write(tmp_path / "t.jsonl", [{"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}])
    with pytest.raises(InputError, match=r"row 1: messages: message 2: .*--rollout-sample-granularity turn"):
        reader(folder).read(file, pairs=False)
    first, second = reader(folder, sample_granularity="turn").read(file, pairs=False)
    assert trained_text(folder, first) == "<think></think>b<|im_end|>"
    assert trained_text(folder, second) == "<think></think>d<|im_end|>"
    assert first.trajectory_id == second.trajectory_id is not None
    library = transformers.AutoTokenizer.from_pretrained(folder)
    assert "<think>" not in library.decode(second.token_ids[~second.loss_mask])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n!{% endif %}"),
            "begins the assist",
        ),
        (CHATML.replace("<|im_end|>", "#"), r"does not end the assistant's turn with the end of sequence \(257\)"),
    ],
)
def test_templates_that_cannot_be_trained(tmp_path: Path, template: str, message: str) -> None:
    folder = make_chat_folder(tmp_path / "model", template)
    with pytest.raises(InputError, match=message):
        reader(folder).read(write(tmp_path / "t.jsonl", [{"messages": [user("a"), assistant("b")]}]), pairs=False)


def test_a_turn_may_end_with_every_token_that_ends_a_response(tmp_path: Path) -> None:
    folder = make_chat_folder(tmp_path / "model", CHATML.replace("<|im_end|>", "<s>"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 258]}')
    (rollout,) = reader(folder).read(write(tmp_path / "t.jsonl", [{"messages": [user("a"), assistant("b")]}]), False)
    assert trained_text(folder, rollout) == "b<s>"
    plain = TextReader(HuggingFaceTokenizer(folder))
    rows = [{"prompt": "a", "response": "b<s>"}, {"prompt": "a", "response": "b"}]
    rollouts = plain.read(write(tmp_path / "p.jsonl", rows), False)
    assert [trained_text(folder, rollout) for rollout in rollouts] == ["b<s>", "b<|im_end|>"]


def test_responses_and_other_names(tmp_path: Path) -> None:
    folder = make_chat_folder(tmp_path / "model")
    talk = [user("a"), assistant("b")]
    (expected,) = reader(folder).read(write(tmp_path / "0.jsonl", [{"messages": talk}]), pairs=False)
    forms = [
        ({"prompt": "a", "response": "b", "source": 3}, {}),
        ({"question": talk[:1], "completion": [talk[1]]}, {}),
        ({"talk": {"said": talk}}, {"input_key": "talk.said"}),
        ({"q": "a", "a": "b"}, {"input_key": "q", "label_key": "a"}),
    ]
    for number, (row, settings) in enumerate(forms, start=1):
        for suffix in ("jsonl", "parquet"):
            file = write(tmp_path / f"{number}.{suffix}", [row])
            assert holds_text(file, settings.get("input_key"))
            (rollout,) = reader(folder, **settings).read(file, pairs=False)
            assert rollout.token_ids.tolist() == expected.token_ids.tolist()
            assert rollout.loss_mask.tolist() == expected.loss_mask.tolist()
    plain = TextReader(CharacterTokenizer())
    (rollout,) = plain.read(write(tmp_path / "p.jsonl", [{"prompt": "1+1=", "response": "2"}]), pairs=False)
    assert CharacterTokenizer().decode(rollout.token_ids) == "1+1=2"
    assert rollout.loss_mask.tolist() == [False] * 4 + [True] * 2  # the end of sequence, too


@pytest.mark.parametrize(
    ("row", "pairs", "message"),
    [
        ({"messages": [user("a")]}, False, "row 2: messages: has no message of the assistant"),
        ({"text": "a"}, False, "row 2: needs messages, or prompt and response"),
        ({"messages": [user("a"), assistant("\ud800")]}, False, "is not valid text"),
        ({"messages": [user("a"), assistant("b")]}, True, "--objective dpo needs the fields chosen and rejected"),
    ],
)
def test_bad_rows(tmp_path: Path, row: dict[str, Any], pairs: bool, message: str) -> None:
    folder = make_chat_folder(tmp_path / "model")
    good = {"messages": [user("a"), assistant("b")]} if not pairs else {"prompt": "a", "chosen": "b", "rejected": "c"}
    file = write(tmp_path / "t.jsonl", [good, row])
    with pytest.raises(InputError, match=message) as caught:
        reader(folder).read(file, pairs)
    assert str(file) in str(caught.value)


def test_preferences_of_all_forms(tmp_path: Path) -> None:
    folder = make_chat_folder(tmp_path / "model")
    talk = [user("a"), assistant("b"), user("c")]
    rows = [
        {"prompt": talk, "chosen": [assistant("good")], "rejected": [assistant("bad")]},
        {"prompt": talk, "chosen": "good", "rejected": "bad"},
        {"chosen": [*talk, assistant("good")], "rejected": [*talk, assistant("bad")]},
        {"prompt": talk, "chosen": [*talk, assistant("good")], "rejected": [*talk, assistant("bad")]},
    ]
    pairs = []
    for number, row in enumerate(rows):
        chosen, rejected = reader(folder).read(write(tmp_path / f"{number}.jsonl", [row]), pairs=True)
        assert (chosen.reward, rejected.reward) == (1.0, 0.0)
        assert chosen.group_id == rejected.group_id
        assert trained_text(folder, chosen) == "good<|im_end|>"  # not the turn of the prompt
        assert trained_text(folder, rejected) == "bad<|im_end|>"
        pairs.append((chosen.token_ids.tolist(), rejected.token_ids.tolist()))
    assert all(pair == pairs[0] for pair in pairs)


# --- prompts -------------------------------------------------------------------------------------------------------


def verl_rows(count: int) -> list[dict[str, Any]]:
    """Rows as verl's preprocessing of GSM8K writes them."""
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [user(f"{i} + {i}?")],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(count)
    ]


def test_prompts_of_verl_and_other_names(tmp_path: Path) -> None:
    folder = make_chat_folder(tmp_path / "model")
    tokenizer, template = HuggingFaceTokenizer(folder), ChatTemplate(folder)
    # Arrow gives all structs the fields of any, so a null stands where there is none.
    rows = verl_rows(3)
    rows[1]["prompt"][0]["name"] = "x"
    rows[1]["extra_info"]["hint"] = "x"
    prompts = PromptReader(tokenizer, template=template).read(write(tmp_path / "v.parquet", rows))
    assert [prompt.record["answer"] for prompt in prompts] == ["0", "2", "4"]
    # What rewards get stays as it is; the template sees no nulls.
    assert prompts[2].record["extra_info"] == {"split": "train", "index": 2, "hint": None}
    library = transformers.AutoTokenizer.from_pretrained(folder)
    expected = library.apply_chat_template(rows[2]["prompt"], add_generation_prompt=True, return_dict=False)
    assert prompts[2].token_ids.tolist() == expected
    named = [{"q": {"text": "1+1="}, "a": {"b": 2}, "prompt": 5}]
    (prompt,) = PromptReader(CharacterTokenizer(), None, None, "q.text", "a.b").read(write(tmp_path / "n.jsonl", named))
    assert prompt.record["answer"] == 2
    assert CharacterTokenizer().decode(prompt.token_ids) == "1+1="
    for keys, message in (
        (("x", None), "no field 'x', which --input-key"),
        (("q.text", "y"), "no field 'y', which --label"),
    ):
        with pytest.raises(InputError, match=f"row 1: has {message}"):
            PromptReader(CharacterTokenizer(), None, None, *keys).read(tmp_path / "n.jsonl")


# --- from the command line -----------------------------------------------------------------------------------------


def test_verls_parquet_trains(tmp_path: Path) -> None:
    folder = make_chat_folder(tmp_path / "model")
    rows = verl_rows(6)
    rows[3]["prompt"][0]["content"] = "x" * 200
    file = write(tmp_path / "train.parquet", rows)
    (tmp_path / "r.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'openai/gsm8k' and ground_truth == str(2 * extra_info['index'])\n"
        "    return {'score': len(solution_str) % 2, 'length': len(solution_str), 'pred': solution_str}\n"
    )
    flags = ["--prompt-data", file, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder]
    flags += ["--apply-chat-template", "--reward-function", f"{tmp_path}/r.py:compute_score", "--rollout-batch-size", 4]
    flags += ["--n-samples-per-prompt", 4, "--rollout-max-response-len", 6, "--train-iters", 2]
    flags += ["--filter-overlong-prompts"]
    records = train(*flags, "--save", tmp_path / "run")
    assert len(records) == 2
    for record in records:
        assert 0 <= record["reward/length"] <= 24
        assert "reward/pred" not in record
    output = records[0]["output"]
    assert f"{file}: left out 1 of 6 prompts: more than 154 tokens" in output


def test_conversations_train(tmp_path: Path) -> None:
    folder = make_chat_folder(tmp_path / "model")
    talk = [user("hi"), assistant("ho"), user("again"), assistant("ho ho")]
    file = write(tmp_path / "sft.parquet", [{"messages": talk}, {"messages": talk[:2]}] * 2)
    flags = ["--objective", "sft", "--rollouts", file, "--global-batch-size", 4, "--train-iters", 30]
    flags += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder, "--apply-chat-template"]
    records = train(*flags, "--save", tmp_path / "run")
    assert records[0]["response_tokens"] == (9 + 3) / 2  # ho, ho ho and their ends
    assert records[-1]["loss"] < 0.5 * records[0]["loss"]
