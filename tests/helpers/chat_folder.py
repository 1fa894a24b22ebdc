"""A folder with a byte tokenizer and a chat template, as models have them."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>"]
# The tags of the library mark what the assistant says: an independent mask.
CHATML = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: thoughts of earlier turns are left out.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% if loop.last %}<think></think>{% endif %}{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_chat_folder(
    path: Path,
    template: str = CHATML,
    config_name: str = "tokenizer_config.json",
    texts: list[str] | None = None,
    special: Sequence[str] = (),
) -> Path:
    """A byte-level tokenizer (with merges learned from ``texts``) that ends turns with <|im_end|>, and its template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if texts is not None:
        tokenizer.train_from_iterator(
            texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
        )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*SPECIAL, *special)])
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if config_name == "tokenizer_config.json":
        config["chat_template"] = template
    else:
        (path / "chat_template.jinja").write_text(template)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path
