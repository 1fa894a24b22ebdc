"""What AReaL-DTA reports and what differs here: the notes below the tables of its experiment."""

_TEXTS = {
    "modes": """
        AReaL-DTA (arXiv 2602.00482) reports up to 8.31 times the training throughput of dense training (14B model,
        one sample per turn) and up to 1.70 times that of packed trees, on tau2-bench. There the systems differ in
        their kernels too. Here all modes run on the same kernels, and only their forests differ.

        `dense, packed` is the baseline of the speed-up and of its bound: sequences fill segments, nothing is padded,
        and activations are recomputed only where memory needs it. `dense, one by one` computes one sequence at a time
        and runs all of its forward again before its backward. The bound is the ratio of operations, recomputation not
        counted, so nothing that does not share can beat 1. One sample per turn repeats a trajectory up to each of its
        turns. Its bound therefore grows with the number of turns, while the time of trees stays that of the
        trajectories. A step whose first run is long (30 s, with --small 1 s) is timed on that run. Seconds on a CPU
        are those of plain PyTorch attention, which computes masked pairs too, so they may be above the bound; counts
        and bounds are the same on a GPU. Memory is measured on GPUs alone.

        Asynchronous training with the decoupled objective exists (`examples/areal_async.args`) and is not measured
        here.
        """,
    "sizes": """
        AReaL-DTA runs one branch at a time in blocks (2,048 and 4,096 tokens in the quoted rows below). Here a
        segment may hold several whole subtrees. Larger segments need more memory for activations and fewer launches.
        Tokens in flight cannot be fewer than those of the longest path.
        """,
    "orders": """
        Sorted is the order of the tokens' bytes, which a tree is built in. Computed tokens, segments and tokens in
        flight of random orders are means over the seeds; seconds and operations are those of the first seed. Every
        row may keep the activations of as many tokens as the longest sequence has, and recomputes the others. A tree
        computes each token once in any order. Without one, the order of the sequences decides what is computed again.
        Cut at forks (as AReaL-DTA), one path is in flight in any order, but segments are small. Cut after a fixed
        number of tokens, segments are full, but the path through them is long. The planner orders the children for
        both.
        """,
    "balance": """
        Predicted by this package's cost model (Qwen3-1.7B: tokens, attention pairs, logits) with exact counts. Means
        are geometric, over the sets with at least as many sequences as ranks. The paper cuts the leaves in
        depth-first order by predicted cost; the code shipped with it cuts by the number of tokens. First fit ignores
        the tree. A prefix on two ranks is computed on both. The bound is a lower bound on the slowest rank of any
        partition, which not every set can reach.
        """,
    "rivals": """
        Quoted and stored rows were not measured in this run: Qwen3-1.7B shape, bfloat16, the first 40 trajectories
        of `tau1_airline_gpt4o_4x50` (307,574 tokens, 156,930 unique), forward and backward of one step. Stored rows
        are repeated by their commands. The drivers of the quoted ones are not here; commands named as nearest run
        this project's engine on the same work. Rows of this run exist only on a GPU, and compare with the others
        only for that model, set and kind of GPU.
        """,
    "attention": """
        Random inputs, TFLOP/s on visible pairs. What is not installed or does not run here is left out. The backward
        of FlashAttention 4 is not deterministic.
        """,
}
NOTES = {key: "\n\n".join(" ".join(part.split()) for part in text.split("\n\n")) for key, text in _TEXTS.items()}
