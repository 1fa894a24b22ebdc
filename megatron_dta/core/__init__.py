"""The tree engine: trees, plans, objectives, the model and the engine, for a loop of one's own."""
