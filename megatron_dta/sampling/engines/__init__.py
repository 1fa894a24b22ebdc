"""Rollout engines: token ids in, sampled token ids with their logprobs out, one interface over all of them.

``interface`` is what callers see; ``in_process`` samples on the training weights, ``servers`` on
vLLM or SGLang, and ``replay`` returns stored rollouts.
"""
