"""What a model cannot be or do, and on which mesh."""
