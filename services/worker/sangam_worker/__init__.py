"""The worker: one engine (one GPU) behind an internal HTTP API."""
