"""The gateway's HTTP side: an ASGI application with OpenAI's and Anthropic's routes, and its server."""
