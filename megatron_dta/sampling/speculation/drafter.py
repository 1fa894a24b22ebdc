"""Drafts from suffix trees of recent samples: one tree for each problem and one for all problems.

Samples of the same problem are the most similar, so each problem has its own tree. It holds the problem's prompt, past
samples and running samples as they grow. The tree of all problems holds every sample but no prompts. It helps if
problems share phrases or tools, and doubles the memory. Of the two drafts the one with the better score is used.

Only accepted tokens are inserted. Complete samples are kept as plain arrays, which costs next to nothing: a tree gets
those of a problem when a sample of that problem is opened, and ``clear`` drops the trees but no sample. The end of a
policy step evicts all samples older than the window, then the oldest ones until the token budget is met. Age is counted
in steps, not in time, so all ranks and a resumed run agree.

The saved state holds the samples. The trees are canonical, so a restored drafter makes the same drafts once
``insert_all`` was called on both.
"""

from __future__ import annotations

import hashlib
from collections import deque
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


@dataclass(eq=False, slots=True)
class _Sample:
    """A complete sample; ``text``: its number in the forest, 0 while it is in no tree."""

    problem: str
    tokens: np.ndarray
    step: int
    text: int = 0


@dataclass(eq=False)
class _Problem:
    """``tree`` is ``NO_TREE`` until it is needed; ``missing``: complete samples and prompts that are not in it."""

    tree: int = NO_TREE
    running: int = 0
    samples: deque[_Sample] = field(default_factory=deque)
    missing: deque[_Sample] = field(default_factory=deque)
    prompts: dict[bytes, tuple[np.ndarray, int]] = field(default_factory=dict)  # by hash: tokens, number of the text


class Drafter:
    """The trees and their samples. The number of a sample's text in the forest identifies it while it runs."""

    def __init__(self, params: DrafterParams) -> None:
        self.params = params
        self._problems: dict[str, _Problem] = {}
        self._complete: deque[_Sample] = deque()  # in the order of their steps
        self._running: dict[int, str] = {}
        self.stored_tokens = 0
        """Tokens of complete samples and prompts."""
        self.clear()

    def clear(self) -> None:
        """Drop the trees and the running samples; complete ones are inserted again when they are needed."""
        self._forest = SuffixForest(self.params.depth, self.params.early_depth)
        self._all = self._forest.new_tree()
        self._running.clear()
        for name, problem in list(self._problems.items()):
            problem.tree, problem.running, problem.missing = NO_TREE, 0, deque(problem.samples)
            problem.prompts = {key: (tokens, 0) for key, (tokens, _) in problem.prompts.items()}
            self._drop_if_empty(name)
        for sample in self._complete:
            sample.text = 0

    def learn(self, problem: str, context: np.ndarray, response: np.ndarray, step: int) -> None:
        """Keep a complete sample, which is in no tree yet. ``context`` is the problem's prompt if that is not known."""
        if problem not in self._problems:
            self._keep_prompt(problem, context)
        tokens = np.concatenate([context[-(self.params.depth - 1) :], response], dtype=np.int32)
        self._keep(_Sample(problem, tokens, step))

    def missing_tokens(self, problem: str) -> int:
        """Tokens that ``open`` would insert besides those of the opened sample."""
        entry = self._problems.get(problem)
        if entry is None:
            return 0
        prompts = sum(len(tokens) for tokens, text in entry.prompts.values() if not text)
        return prompts + sum(len(sample.tokens) for sample in entry.missing)

    def open(self, problem: str, prompt: np.ndarray, is_branch: bool = False) -> int:
        """Begin a sample after ``prompt`` (int [T], T >= 1), already inserted for a branch. Returns its number."""
        prompt = np.ascontiguousarray(prompt, np.int32)
        if not is_branch or problem not in self._problems:
            self._keep_prompt(problem, prompt)
        self._insert(problem)
        text = self._new_text(problem, prompt[-(self.params.depth - 1) :])
        self._problems[problem].running += 1
        self._running[text] = problem
        return text

    def insert_all(self) -> None:
        """Insert all samples that are in no tree."""
        for problem in self._problems:
            self._insert(problem)

    def extend(self, samples: np.ndarray, tokens: np.ndarray, offsets: np.ndarray, inserts: bool = True) -> None:
        """Append ``tokens[offsets[i] : offsets[i + 1]]`` (accepted tokens, or an answer) to ``samples[i]``; without
        ``inserts`` the trees get them with the next call."""
        self._forest.extend(samples, tokens, offsets, inserts)

    def draft(self, samples: np.ndarray, most: np.ndarray) -> Drafts:
        """Continuations of running samples (int [n]) by up to ``most`` (int [n]) tokens."""
        return self._forest.draft(samples, most, self.params.draft)

    def finish(self, sample: int, step: int) -> None:
        """Complete a sample; it is kept until the end of policy step ``step`` + window."""
        self._forest.finish(sample)
        problem = self._running.pop(sample)
        self._problems[problem].running -= 1
        self._keep(_Sample(problem, self._forest.tokens(sample), step, sample))

    def end_step(self, step: int) -> None:
        """Evict samples by age and token budget after policy step ``step``."""
        oldest = step - self.params.window
        while self._complete and (self._complete[0].step <= oldest or self.stored_tokens > self.params.max_tokens):
            sample = self._complete.popleft()
            entry = self._problems[sample.problem]
            entry.samples.popleft()
            if sample.text:
                self._forest.remove(sample.text)
            else:
                entry.missing.popleft()
            self.stored_tokens -= len(sample.tokens)
            self._drop_if_empty(sample.problem)

    @property
    def num_bytes(self) -> int:
        """Memory of the trees and their texts."""
        return self._forest.num_bytes

    def state_dict(self) -> dict[str, np.ndarray]:
        """The complete samples and their problems' prompts, without the running samples."""
        names = sorted(name for name, entry in self._problems.items() if entry.samples)
        number = {name: i for i, name in enumerate(names)}
        prompts = [(number[name], tokens) for name in names for tokens, _ in self._problems[name].prompts.values()]
        texts = [tokens for _, tokens in prompts] + [sample.tokens for sample in self._complete]
        return {
            "problems": np.array(names, dtype=np.str_),
            "tokens": np.concatenate(texts) if texts else np.zeros(0, np.int32),
            "lengths": np.array([len(text) for text in texts], np.int64),
            "problem": np.array([p for p, _ in prompts] + [number[s.problem] for s in self._complete], np.int64),
            "num_prompts": np.array(len(prompts), np.int64),
            "steps": np.array([sample.step for sample in self._complete], np.int64),
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
                self._keep_prompt(names[problem[i]], text)
            else:
                self._keep(_Sample(names[problem[i]], text, steps[i - num_prompts]))

    def _keep_prompt(self, problem: str, prompt: np.ndarray) -> None:
        entry = self._problems.setdefault(problem, _Problem())
        key = hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
        if key not in entry.prompts:
            entry.prompts[key] = np.array(prompt, np.int32), 0
            self.stored_tokens += len(prompt)

    def _keep(self, sample: _Sample) -> None:
        entry = self._problems[sample.problem]
        entry.samples.append(sample)
        if not sample.text:
            entry.missing.append(sample)
        self._complete.append(sample)
        self.stored_tokens += len(sample.tokens)

    def _drop_if_empty(self, problem: str) -> None:
        entry = self._problems[problem]
        if entry.samples or entry.running:
            return
        for tokens, text in entry.prompts.values():
            if text:
                self._forest.remove(text)
            self.stored_tokens -= len(tokens)
        if entry.tree != NO_TREE:
            self._forest.delete_tree(entry.tree)
        del self._problems[problem]

    def _insert(self, problem: str) -> None:
        """Insert the prompts and complete samples of a problem that are in no tree."""
        entry = self._problems[problem]
        if entry.tree == NO_TREE:
            entry.tree = self._forest.new_tree()
        for key, (tokens, text) in entry.prompts.items():
            if not text:
                # Not finished: suffixes that continue into a sample belong to the sample.
                text = self._forest.new_text((entry.tree, NO_TREE))
                self._forest.extend(np.array([text], np.uint32), tokens, np.array([0, len(tokens)]))
                entry.prompts[key] = tokens, text
        for sample in entry.missing:
            sample.text = self._new_text(problem, sample.tokens)
            self._forest.finish(sample.text)
        entry.missing.clear()

    def _new_text(self, problem: str, tokens: np.ndarray) -> int:
        tree = self._problems[problem].tree
        trees = {"problem": (tree, NO_TREE), "global": (NO_TREE, self._all), "both": (tree, self._all)}
        text = self._forest.new_text(trees[self.params.scope])
        self._forest.extend(np.array([text], np.uint32), tokens, np.array([0, len(tokens)]))
        return text
