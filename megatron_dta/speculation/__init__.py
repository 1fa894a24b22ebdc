"""Speculative decoding from what was sampled before: drafts, how many are worth their forward, what they brought.

NumPy alone: no torch, no Megatron. Drafts are deterministic and the engine samples at every position of a draft with
noise keyed by the position, so what is drafted decides how many forwards a sample takes and never which tokens it has.
"""
