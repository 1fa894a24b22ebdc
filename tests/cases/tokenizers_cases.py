"""A byte-level BPE tokenizer file."""

from pathlib import Path

import pytest

TEXT = ["the quick brown fox", "jumps over the lazy dog", "12 + 7 = 19", "a b c d e f g"]


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    """A byte-level BPE with an end-of-text token and one more added token beyond a hole in the ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens(["<extra>"])
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    return file
