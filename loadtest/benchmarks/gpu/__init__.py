"""Measurements on one GPU, each command one run of at most eight minutes; see
``benchmarks/README.md``, "On a GPU". Everything runs on a CPU as well, with tiny models and
worthless timings, so that no typo costs GPU minutes: the tests run it all that way."""
