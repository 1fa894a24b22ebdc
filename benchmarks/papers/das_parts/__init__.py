"""Parts of the DAS experiment: tasks, training runs, and replays of recorded histories."""
