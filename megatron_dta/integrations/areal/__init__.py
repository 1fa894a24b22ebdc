"""The tree engine as a training engine of AReaL.

batch    padded batches of AReaL: reading, planning, loss functions on groups of rows
engine   ``TreePPOActor``, an implementation of AReaL's ``TrainEngine``
"""
