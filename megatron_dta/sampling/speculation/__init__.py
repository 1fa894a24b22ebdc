"""Speculative decoding with drafts from earlier samples: the drafter, the gates, and the report of what drafts saved.

The package uses NumPy, without torch and Megatron. The engine samples at every position of a draft with noise keyed by
the position, so drafts change the number of forwards of a sample and never its tokens.
"""
