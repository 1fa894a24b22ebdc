"""The tree engine as a training engine of verl: ``model_engine=megatron_dta``.

plugin       verl loads it by the entry point ``verl.plugins``; it registers the engines and the Hydra files
config       verl's dataclasses for this engine, and ``hydra/`` with their YAML files
settings     verl's settings -> the settings of this project
rows         rows of verl's batches: reading, gathering, selecting
step         one mini-batch: plan, forward and backward, verl's loss function
engine       the engines ``language_model`` and ``value_model``
checkpoints  checkpoints in verl's folders
weights      weights for rollout servers, whole and as shards
"""
