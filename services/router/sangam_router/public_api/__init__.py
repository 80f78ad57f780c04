"""The OpenAI-compatible API of the public port. ``app.public_app`` is the entry."""
