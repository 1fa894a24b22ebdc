"""Schedules segments on pipeline stages and simulates the result."""
