"""The stateless router: OpenAI-compatible API, request driver, Redis ledger."""
