"""Plans by other methods, checks of schedules, and predicted costs."""
