"""Drafts from suffix trees of recent samples: one tree for each problem and one for all problems.

Samples of the same problem are the most similar, so each problem has its own tree. It holds the problem's prompt, past
samples and running samples as they grow. The tree of all problems holds every sample but no prompts. It helps if
problems share phrases or tools, and doubles the memory. Of the two drafts the one with the better score is used.

Only accepted tokens are inserted. The end of a policy step evicts all samples older than the window, then the oldest
ones until the token budget is met. A problem without samples loses its tree. Age is counted in steps, not in time, so
all ranks and a resumed run agree.

The saved state holds the samples' tokens in plain arrays. Loading inserts them again (about half a microsecond a
token). The trees are canonical, so a restored drafter makes the same drafts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from megatron_dta.sampling.speculation.suffix_forest import NO_TREE, DraftParams, Drafts, SuffixForest

SCOPES = ("problem", "global", "both")
"""Trees in which drafts are looked up: those of the problem, the tree of all problems, or both."""


@dataclass(frozen=True)
class DrafterParams:
    """Attributes:
    depth: tokens of a match and its draft together.
    early_depth: tokens after which a suffix of a running sample is first inserted.
    window: policy steps for which a sample is kept.
    max_tokens: maximum number of sample tokens kept; each is in its problem's tree and in that of all problems.
    draft: parameters of a draft.
    scope: one of ``SCOPES``; "problem" and "global" are for comparison.
    """

    depth: int = 32
    early_depth: int = 8
    window: int = 16
    max_tokens: int = 20_000_000
    draft: DraftParams = field(default_factory=DraftParams)
    scope: str = "both"


@dataclass
class _Problem:
    tree: int
    samples: int = 0
    prompts: dict[bytes, int] = field(default_factory=dict)  # hash of the prompt -> its text
    prompt_tokens: int = 0


@dataclass
class _Sample:
    problem: str
    tokens: int
    step: int | None = None  # None while it runs


class Drafter:
    """The trees and their samples. The number of a sample's text in the forest identifies it."""

    def __init__(self, params: DrafterParams) -> None:
        self.params = params
        self._forest = SuffixForest(params.depth, params.early_depth)
        self._all = self._forest.new_tree()
        self._problems: dict[str, _Problem] = {}
        self._samples: dict[int, _Sample] = {}  # complete samples in the order of completion
        self.stored_tokens = 0
        """Tokens of samples and prompts in the trees."""

    def open(self, problem: str, prompt: np.ndarray, is_branch: bool = False) -> int:
        """Begin a sample after ``prompt`` (int [T], T >= 1), already inserted for a branch. Returns its number."""
        prompt = np.ascontiguousarray(prompt, np.int32)
        if not is_branch or problem not in self._problems:
            self._add_prompt(problem, prompt)
        return self._open_text(problem, prompt[-(self.params.depth - 1) :])

    def extend(self, samples: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Append ``tokens[offsets[i] : offsets[i + 1]]`` (accepted tokens, or an answer) to ``samples[i]``."""
        self._forest.extend(samples, tokens, offsets)
        for sample, more in zip(samples.tolist(), np.diff(offsets).tolist(), strict=True):
            self._samples[sample].tokens += more
        self.stored_tokens += int(offsets[-1])

    def draft(self, samples: np.ndarray, most: np.ndarray) -> Drafts:
        """Continuations of running samples (int [n]) by up to ``most`` (int [n]) tokens."""
        return self._forest.draft(samples, most, self.params.draft)

    def finish(self, sample: int, step: int) -> None:
        """Complete a sample; it is kept until the end of policy step ``step`` + window."""
        self._forest.finish(sample)
        entry = self._samples.pop(sample)
        entry.step = step
        self._samples[sample] = entry

    def discard(self, sample: int) -> None:
        """Remove a running or complete sample."""
        entry = self._samples.pop(sample)
        self._forest.remove(sample)
        self.stored_tokens -= entry.tokens
        problem = self._problems[entry.problem]
        problem.samples -= 1
        if not problem.samples:
            for text in problem.prompts.values():
                self._forest.remove(text)
            self.stored_tokens -= problem.prompt_tokens
            self._forest.delete_tree(problem.tree)
            del self._problems[entry.problem]

    def end_step(self, step: int) -> int:
        """Evict samples by age and token budget after policy step ``step``. Returns the number of evicted samples."""
        evicted = 0
        for text in list(self._samples):  # in the order of their steps, so the first one to keep ends the search
            completed = self._samples[text].step
            if completed is None:
                continue
            if completed > step - self.params.window and self.stored_tokens <= self.params.max_tokens:
                break
            self.discard(text)
            evicted += 1
        return evicted

    @property
    def num_bytes(self) -> int:
        """Memory of the trees and their texts."""
        return self._forest.num_bytes

    def state_dict(self) -> dict[str, np.ndarray]:
        """The complete samples and their problems' prompts, without the running samples."""
        complete = {text: entry for text, entry in self._samples.items() if entry.step is not None}
        names = sorted({entry.problem for entry in complete.values()})
        number = {name: i for i, name in enumerate(names)}
        prompts = [(number[name], text) for name in names for text in self._problems[name].prompts.values()]
        texts = [self._forest.tokens(text) for _, text in prompts] + [self._forest.tokens(text) for text in complete]
        return {
            "problems": np.array(names, dtype=np.str_),
            "tokens": np.concatenate(texts) if texts else np.zeros(0, np.int32),
            "lengths": np.array([len(text) for text in texts], np.int64),
            "problem": np.array([p for p, _ in prompts] + [number[e.problem] for e in complete.values()], np.int64),
            "num_prompts": np.array(len(prompts), np.int64),
            "steps": np.array([entry.step for entry in complete.values()], np.int64),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Replace the state by a saved one."""
        num_prompts, lengths = int(state["num_prompts"]), np.asarray(state["lengths"], np.int64)
        names, problem, steps = state["problems"].tolist(), state["problem"].tolist(), state["steps"].tolist()
        tokens = np.ascontiguousarray(state["tokens"], np.int32)
        self.__init__(self.params)
        texts = np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else []
        for i, text in enumerate(texts):
            if i < num_prompts:
                self._add_prompt(names[problem[i]], text)
            else:
                self.finish(self._open_text(names[problem[i]], text), steps[i - num_prompts])

    def _add_prompt(self, problem: str, prompt: np.ndarray) -> None:
        entry = self._problems.get(problem)
        if entry is None:
            entry = self._problems[problem] = _Problem(self._forest.new_tree())
        key = hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
        if key not in entry.prompts:
            # Not finished: suffixes that continue into a sample belong to the sample.
            entry.prompts[key] = self._new_text((entry.tree, NO_TREE), prompt)
            entry.prompt_tokens += len(prompt)
            self.stored_tokens += len(prompt)

    def _open_text(self, problem: str, tokens: np.ndarray) -> int:
        entry = self._problems[problem]
        entry.samples += 1
        trees = {"problem": (entry.tree, NO_TREE), "global": (NO_TREE, self._all), "both": (entry.tree, self._all)}
        text = self._new_text(trees[self.params.scope], tokens)
        self._samples[text] = _Sample(problem, len(tokens))
        self.stored_tokens += len(tokens)
        return text

    def _new_text(self, trees: tuple[int, int], tokens: np.ndarray) -> int:
        text = self._forest.new_text(trees)
        self._forest.extend(np.array([text], np.uint32), tokens, np.array([0, len(tokens)]))
        return text
