"""A tokenizer like Llama 2's and Mistral's: a blank before the first word of a text, and pairs of letters merged."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megatron_dta.sampling.prompts.tokenizer import HuggingFaceTokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '</s>' if ends | default(true) }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def blank_tokenizer(folder: Path, merges: tuple[str, ...] = ()) -> HuggingFaceTokenizer:
    """The tokenizer and a chat template in ``folder``; each of ``merges`` is two characters that are one token."""
    letters = [*"abcdefghijklmnopqrstuvwxyz:+=0123456789.\n", "\u2581"]
    vocab = {letter: index for index, letter in enumerate([*letters, *merges])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return HuggingFaceTokenizer(folder)
