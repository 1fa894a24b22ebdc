"""TreePO (arXiv 2508.17445): rollouts of a query grow as a tree, on any rollout engine.

``policy`` decides what to decode next for one query, ``sampler`` drives an engine with many queries, ``tree`` is what
comes out, ``records`` turns it into rollouts and ``source`` hands them to training.
"""
