"""Samples the rollouts of a query as a tree, on any rollout engine (TreePO, arXiv 2508.17445).

``policy`` decides what to decode next for one query, ``sampler`` drives an engine with many queries, ``tree`` is the
result, ``records`` converts it to rollouts, and ``source`` passes them to training.
"""
