"""Which requests a load test sends: lengths, texts or questions, from files or made up, seeded."""
