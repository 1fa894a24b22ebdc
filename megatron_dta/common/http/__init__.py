"""The HTTP client of rollout servers, reward servers and teachers: bounded time and memory, and checked replies."""
