"""Load tests, baselines and simulation."""
