"""What the forked ranks of these tests find imported: verl's trainers and the engine."""

import gc

import verl.trainer.sft_trainer  # noqa: F401

import worker  # noqa: F401

gc.collect()
gc.freeze()
