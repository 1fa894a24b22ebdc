"""Rollouts from servers that draft: reports their metrics and gives SGLang recent rollouts as a corpus.

SGLang discards what it has sampled whenever its weights are updated (``engines.servers.speculation``). So the window of
recent rollouts (``--das-window`` rollout batches, ``--das-max-tokens`` tokens) is kept here and sent before every
rollout batch, as a file of JSON strings with one rollout per line, the format of SGLang's
--speculative-ngram-external-corpus-path. The server reads the file itself, so it is written next to the weights.
Siblings within the current batch are in the server's own trie.

The file contains text instead of token ids, because that is what the server accepts. The server tokenizes the text
again. Where the result differs from the sampled tokens, drafts are rejected; samples do not change.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.core.rollouts.batch_source import RolloutError, RolloutSource, WrappedSource
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.extras.servers.engine import HttpEngine
from megatron_dta.extras.servers.speculation import DraftCounts
from megatron_dta.sampling.prompts.tokenizer import Tokenizer


class RolloutCorpus:
    """Texts of the rollout batches in the window, the newest last.

    Args:
        folder: where the file is written; servers see it under the same path.
        window: number of rollout batches kept.
        max_tokens: maximum number of tokens in the file; the oldest texts are left out first.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, window: int, max_tokens: int) -> None:
        self._folder, self._tokenizer, self._max_tokens = folder, tokenizer, max_tokens
        self._batches: deque[list[tuple[str, int]]] = deque(maxlen=window)
        # A checkpoint may be written while a thread samples ahead.
        self._lock = threading.Lock()
        self._path: Path | None = None

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Add a rollout batch: the text of each rollout from its first trained token on."""
        texts = []
        for rollout in rollouts:
            sampled = rollout.token_ids[int(np.argmax(rollout.loss_mask)) :]
            text = self._tokenizer.decode(sampled)
            if text:
                texts.append((text, len(sampled) + 1))  # the server separates them by one
        with self._lock:
            self._batches.append(texts)

    def write(self, number: int) -> Path | None:
        """Write the file for rollout batch ``number`` and return its path; None if there is nothing to write.

        Raises:
            RolloutError: the file cannot be written.
        """
        with self._lock:
            texts = [entry for batch in self._batches for entry in batch]
        kept, tokens = [], 0
        for text, length in reversed(texts):
            tokens += length
            if tokens > self._max_tokens:
                break
            kept.append(text)
        if not kept:
            return None
        path = self._folder / f"corpus-{number}.jsonl"
        unfinished = path.with_suffix(".unfinished")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_text("".join(json.dumps(text) + "\n" for text in reversed(kept)), encoding="utf-8")
            os.replace(unfinished, path)
        except OSError as error:
            raise RolloutError(f"{path}: cannot be written ({error.strerror or error})") from error
        self.delete(keep=path)
        self._path = path
        return path

    def delete(self, keep: Path | None = None) -> None:
        """Delete the file of the previous rollout batch unless it is ``keep``."""
        if self._path is not None and self._path != keep:
            self._path.unlink(missing_ok=True)
            self._path = None

    def state_dict(self) -> list[list[list[Any]]]:
        """The texts and their numbers of tokens."""
        with self._lock:
            return [[[text, length] for text, length in batch] for batch in self._batches]

    def load_state_dict(self, state: list[list[list[Any]]]) -> None:
        """Restore the texts from ``state_dict``."""
        with self._lock:
            self._batches.clear()
            self._batches.extend([(text, length) for text, length in batch] for batch in state)


class DraftingServersSource(WrappedSource):
    """``inner``, sampled on servers that draft.

    Args:
        corpus: sent to the servers before each rollout batch; None if they keep their own.
    """

    def __init__(self, inner: RolloutSource, engine: HttpEngine, corpus: RolloutCorpus | None) -> None:
        super().__init__(inner)
        self._engine, self._corpus = engine, corpus
        self._counts = DraftCounts()

    def next_batch(self, step: int) -> list[Rollout]:
        path = None if self._corpus is None else self._corpus.write(step)
        if path is not None:
            self._engine.load_corpus(path)
        before = self._engine.drafts.counts
        rollouts = self._inner.next_batch(step)
        self._counts = self._engine.drafts.counts - before
        if self._corpus is not None:
            self._corpus.add(rollouts)
        return rollouts

    def state_dict(self) -> dict[str, Any]:
        state = self._inner.state_dict()
        return state if self._corpus is None else state | {"corpus": self._corpus.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.load_state_dict({name: value for name, value in state.items() if name != "corpus"})
        if self._corpus is not None and "corpus" in state:
            self._corpus.load_state_dict(state["corpus"])

    def timing(self) -> dict[str, float]:
        """Adds the draft counts, which are not reproducible: drafting depends on the server's state at the time."""
        return self._inner.timing() | self._counts.metrics()

    def close(self) -> None:
        if self._corpus is not None:
            self._corpus.delete()
        self._inner.close()
