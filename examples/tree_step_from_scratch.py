"""A training step on a prefix tree in plain PyTorch: the idea of this library, without the library.

    python examples/tree_step_from_scratch.py

Rollouts of a prompt begin with the same tokens, and so do the turns of a conversation. A causal decoder computes the
same keys, values and logprobs for these tokens in every sequence, so computing them once is enough. Laid over each
other, the sequences are a forest. This file cuts it at its forks into *segments* and walks it depth first:

    forward   A segment attends to itself and to the K and V of its ancestors, the path to the root.
    loss      Where a sequence ends, its logprobs are gathered along the path. Its loss is an ordinary function of
              them; the gradient of each logprob is added up where the sequences share it.
    backward  Once the children of a segment are done, each has added its dK and dV to those of its ancestors, so
              everything that depends on the segment is known. Its backward runs, and its K and V are freed.

So K and V are held for one root-to-leaf path, however large the forest is. The gradient is that of training every
sequence alone, because backward is linear: run once on a sum of gradients, it gives the sum of its results. ``main``
asserts this to 1e-12. The library adds what makes it fast: segments of even sizes with several branches in each,
kernels that read the path without copying it, a planner that decides what to recompute, and Megatron's parallelism.

Shapes: T tokens of a segment, P positions of the path including them, C channels, H heads of queries, G heads of keys
and values, D channels of a head, E edges (an edge is a token and one that follows it; it has a logprob).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

LAYERS, CHANNELS, HEADS, GROUPS, HEAD_SIZE, FEED_FORWARD, VOCABULARY = 2, 24, 4, 2, 8, 40, 11
FLOAT = torch.float64


@dataclass
class Rollout:
    """A sequence, and for every token but the first what its loss needs: that may differ where tokens are shared."""

    tokens: list[int]
    advantages: Tensor
    old_logprobs: Tensor
    loss_weights: Tensor  # 0 for the prompt


def policy_loss(logprobs: Tensor, rollout: Rollout) -> Tensor:
    """PPO's clipped surrogate of one sequence. Nothing below depends on this formula."""
    ratio = torch.exp(logprobs - rollout.old_logprobs)
    surrogate = torch.minimum(ratio * rollout.advantages, ratio.clamp(0.8, 1.2) * rollout.advantages)
    return -(rollout.loss_weights * surrogate).sum()


# A small Llama. All it knows of trees is that attention gets the K and V of earlier positions.


def random_weights(tied: bool) -> dict[str, Tensor]:
    """Weights by Hugging Face's names. If ``tied``, the embedding is the output layer as well."""
    shapes = {"model.embed_tokens": (VOCABULARY, CHANNELS), "model.norm": (CHANNELS,)}
    if not tied:
        shapes["lm_head"] = (VOCABULARY, CHANNELS)
    rows = {"q": HEADS * HEAD_SIZE, "k": GROUPS * HEAD_SIZE, "v": GROUPS * HEAD_SIZE}
    for layer in (f"model.layers.{number}." for number in range(LAYERS)):
        shapes |= {layer + name: (CHANNELS,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {layer + f"self_attn.{x}_proj": (rows[x], CHANNELS) for x in "qkv"}
        shapes |= {layer + f"mlp.{x}_proj": (FEED_FORWARD, CHANNELS) for x in ("gate", "up")}
        shapes |= {layer + "self_attn.o_proj": (CHANNELS, rows["q"]), layer + "mlp.down_proj": (CHANNELS, FEED_FORWARD)}
    weights = {f"{name}.weight": 0.2 * torch.randn(shape, dtype=FLOAT) for name, shape in shapes.items()}
    return {name: weight + ("norm" in name) for name, weight in weights.items()}  # weights of norms are near one


def rms_norm(x_TC: Tensor, weight_C: Tensor) -> Tensor:
    return weight_C * x_TC * torch.rsqrt(x_TC.square().mean(-1, keepdim=True) + 1e-6)


def rotate(x_THD: Tensor, start: int) -> Tensor:
    """Rotary positions. They count along the path: ``start`` tokens come before the segment."""
    frequencies = 10000 ** -(torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)  # float32, as in transformers
    angles_T1D = torch.outer(torch.arange(start, start + len(x_THD)), frequencies).repeat(1, 2)[:, None]
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * angles_T1D.cos() + torch.cat([-second, first], dim=-1) * angles_T1D.sin()


def attend(q_THD: Tensor, k_PGD: Tensor, v_PGD: Tensor) -> Tensor:
    """Attention of the last T of P positions. A path contains no siblings, so the usual causal mask is right."""
    k_PHD, v_PHD = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k_PGD, v_PGD))
    scores_HTP = torch.einsum("thd,phd->htp", q_THD, k_PHD) / HEAD_SIZE**0.5
    future_TP = torch.ones(scores_HTP.shape[1:], dtype=torch.bool).triu(len(k_PGD) - len(q_THD) + 1)
    return torch.einsum("htp,phd->thd", scores_HTP.masked_fill(future_TP, -torch.inf).softmax(-1), v_PHD).flatten(1)


def run_decoder(weights: dict[str, Tensor], tokens: list[int], start: int, ancestors: list) -> tuple[Tensor, list]:
    """Hidden states [T, C] of a segment at position ``start``; its K and V as [layer][0 or 1], like ``ancestors``."""
    x_TC, keys_values = weights["model.embed_tokens.weight"][tokens], []
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        w = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        y_TC = rms_norm(x_TC, w["input_layernorm.weight"])
        q, k, v = (linear(y_TC, w[f"self_attn.{x}_proj.weight"]).unflatten(1, (-1, HEAD_SIZE)) for x in "qkv")
        q, k = rotate(q, start), rotate(k, start)
        keys_values.append((k, v))
        k_PGD, v_PGD = (torch.cat([segment[layer][i] for segment in [*ancestors, keys_values]]) for i in (0, 1))
        x_TC = x_TC + linear(attend(q, k_PGD, v_PGD), w["self_attn.o_proj.weight"])
        y_TC = rms_norm(x_TC, w["post_attention_layernorm.weight"])
        gated = silu(linear(y_TC, w["mlp.gate_proj.weight"])) * linear(y_TC, w["mlp.up_proj.weight"])
        x_TC = x_TC + linear(gated, w["mlp.down_proj.weight"])
    return rms_norm(x_TC, weights["model.norm.weight"]), keys_values


def edge_logprobs(weights: dict[str, Tensor], x_EC: Tensor, next_tokens: list[int]) -> Tensor:
    """Logprobs [E] of tokens, from the hidden states of the tokens before them."""
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return linear(x_EC, head).log_softmax(-1)[range(len(next_tokens)), next_tokens]


# The forest, and the walk over it.


@dataclass
class Segment:
    """A run of tokens without a fork, and what it holds from its forward to its backward."""

    tokens: list[int]
    start: int  # position of its first token
    branch: int  # its number among its siblings
    ends: list[int]  # numbers of the rollouts that end with it
    children: list[Segment]
    keys_values: list | None = None
    logprobs: Tensor | None = None  # [E]: edges within the segment, then those to the first tokens of its children
    gradient: Tensor | None = None  # [E]: of the logprobs, summed over the sequences through each edge


def grow_forest(sequences: list[list[int]], members: list[int], start: int = 0) -> list[Segment]:
    """The segments after the first ``start`` tokens of ``members``, which share these tokens and all go on."""
    groups, forest = {}, []
    for number in members:
        groups.setdefault(sequences[number][start], []).append(number)
    for branch, group in enumerate(groups.values()):
        end = start + 1
        # A segment grows until a sequence ends or two of them differ.
        while len({tuple(sequences[i][: end + 1]) for i in group}) == 1 and len(sequences[group[0]]) > end:
            end += 1
        ends = [i for i in group if len(sequences[i]) == end]
        children = grow_forest(sequences, [i for i in group if i not in ends], end)
        forest.append(Segment(sequences[group[0]][start:end], start, branch, ends, children))
    return forest


class TreeStep:
    """Adds the gradients of the rollouts' losses to ``weights[...].grad``."""

    def __init__(self, weights: dict[str, Tensor], rollouts: list[Rollout], keep_activations: bool) -> None:
        self.weights, self.rollouts, self.keep_activations = weights, rollouts, keep_activations
        self.loss, self.logprobs = 0.0, {}
        self.computed_tokens = self.peak_positions = 0
        self.path: list[Segment] = []  # segments whose forward has run and whose backward has not
        for root in grow_forest([rollout.tokens for rollout in rollouts], list(range(len(rollouts)))):
            self.visit(root)

    def visit(self, segment: Segment) -> None:
        """Forward of the segment, everything below it, backward of the segment: this is the whole schedule."""
        # Without kept activations the forward builds no graph and is repeated before the backward. That of a leaf
        # follows at once, so its activations are kept in any case.
        keep = self.keep_activations or not segment.children
        with torch.set_grad_enabled(keep):
            logprobs, keys_values = self.forward(segment)
        # Descendants see K and V detached from this graph. Their backwards end there and sum dK and dV in ``.grad``.
        segment.keys_values = [[x.detach().requires_grad_() for x in layer] for layer in keys_values]
        segment.logprobs, segment.gradient = logprobs.detach(), torch.zeros_like(logprobs)
        self.path.append(segment)
        self.peak_positions = max(self.peak_positions, sum(len(above.tokens) for above in self.path))

        for number in segment.ends:
            self.add_loss(number)
        for child in segment.children:
            self.visit(child)

        self.path.pop()
        if not keep:
            logprobs, keys_values = self.forward(segment)
        outputs, gradients = [logprobs], [segment.gradient]
        if segment.children:  # their backwards have run: dK and dV of this segment are complete
            outputs += [x for layer in keys_values for x in layer]
            gradients += [x.grad for layer in segment.keys_values for x in layer]
        torch.autograd.backward(outputs, gradients)  # frees the activations, too
        segment.keys_values = segment.logprobs = segment.gradient = None

    def forward(self, segment: Segment) -> tuple[Tensor, list]:
        """Logprobs of the segment's edges, and its K and V."""
        self.computed_tokens += len(segment.tokens)
        ancestors = [above.keys_values for above in self.path]
        x_TC, keys_values = run_decoder(self.weights, segment.tokens, segment.start, ancestors)
        rows = [*range(len(segment.tokens) - 1)] + [-1] * len(segment.children)
        next_tokens = segment.tokens[1:] + [child.tokens[0] for child in segment.children]
        return edge_logprobs(self.weights, x_TC[rows], next_tokens), keys_values

    def add_loss(self, number: int) -> None:
        """The loss of a rollout that ends here. Its gradients go back to the edges of the path."""
        edges = [[*range(len(segment.tokens) - 1)] for segment in self.path]
        for chosen, below in zip(edges[:-1], self.path[1:], strict=True):
            chosen.append(len(chosen) + below.branch)
        parts = [segment.logprobs[chosen] for segment, chosen in zip(self.path, edges, strict=True)]
        logprobs = torch.cat(parts).requires_grad_()
        loss = policy_loss(logprobs, self.rollouts[number])
        (gradient,) = torch.autograd.grad(loss, logprobs)
        gradients = gradient.split([len(chosen) for chosen in edges])
        for segment, chosen, part in zip(self.path, edges, gradients, strict=True):
            segment.gradient[chosen] += part
        self.loss, self.logprobs[number] = self.loss + loss.item(), logprobs.detach()


# The same, one sequence at a time, and the comparison.


def separate_step(weights: dict[str, Tensor], rollouts: list[Rollout]) -> tuple[float, dict[int, Tensor]]:
    """Loss and logprobs of training every rollout alone; gradients are added to ``weights[...].grad``."""
    total, logprobs = 0.0, {}
    for number, rollout in enumerate(rollouts):
        x_TC, _ = run_decoder(weights, rollout.tokens, 0, [])
        logprobs[number] = edge_logprobs(weights, x_TC[:-1], rollout.tokens[1:])
        loss = policy_loss(logprobs[number], rollout)
        loss.backward()
        total += loss.item()
    return total, logprobs


def random_rollouts(count: int = 16) -> list[Rollout]:
    """Rollouts that continue beginnings of earlier ones, with random numbers for the loss, and a duplicate."""
    generator, sequences = random.Random(1), [[3] * 40]
    while len(sequences) < count:
        beginning = generator.choice(sequences)[: generator.randrange(50)]
        sequences.append(beginning + generator.choices(range(VOCABULARY), k=generator.randrange(1, 20)))
    sequences.append(sequences[2])
    trained = sum(max(len(tokens) - 3, 0) for tokens in sequences)  # three tokens are the prompt
    rollouts = []
    for tokens in sequences:
        advantages, noise = torch.randn(2, len(tokens) - 1, dtype=FLOAT)
        loss_weights = (torch.arange(len(tokens) - 1) >= 2).to(FLOAT) / trained
        rollouts.append(Rollout(tokens, advantages, noise - 2.5, loss_weights))
    return rollouts


def take_gradients(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients, which are reset."""
    gradients = {name: weight.grad for name, weight in weights.items()}
    for weight in weights.values():
        weight.grad = None
    return gradients


def largest_error(values: dict, expected: dict) -> float:
    """The largest difference in a tensor, relative to its largest entry."""
    pairs = [(values[name], tensor) for name, tensor in expected.items() if tensor.numel()]
    return max(((value - tensor).abs().max() / tensor.abs().max()).item() for value, tensor in pairs)


def main() -> None:
    torch.manual_seed(1)
    rollouts = random_rollouts()
    total, longest = (f([len(rollout.tokens) for rollout in rollouts]) for f in (sum, max))
    row = "{:41} {:>15} {:>20}   {}".format
    print(row("", "tokens computed", "K/V positions held", "largest error").rstrip())
    print(row("separate sequences, all at once", total, total, "").rstrip())
    print(row("separate sequences, one after the other", total, longest, "").rstrip())
    for tied in (True, False):
        weights = {name: weight.requires_grad_() for name, weight in random_weights(tied).items()}
        loss, logprobs = separate_step(weights, rollouts)
        gradients = take_gradients(weights)
        for keep in (True, False):
            step = TreeStep(weights, rollouts, keep_activations=keep)
            errors = abs(step.loss / loss - 1), largest_error(step.logprobs, logprobs)
            error = max(*errors, largest_error(take_gradients(weights), gradients))
            assert error < 1e-12, error
            assert step.peak_positions == longest, step.peak_positions
            name = f"trees, {'tied' if tied else 'untied'} head, activations {'kept' if keep else 'recomputed'}"
            print(row(name, step.computed_tokens, step.peak_positions, f"{error:.0e}"))


if __name__ == "__main__":
    main()
