"""What follows from the settings of a model."""
