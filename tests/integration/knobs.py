"""How large the integration tests are: small by default, full sizes from the environment."""

import os

NUM_QUESTIONS = int(os.environ.get("SANGAM_TEST_QUESTIONS", "60"))
"""Questions asked in each mode (full size: 200)."""

NUM_WORKER_KILLS = int(os.environ.get("SANGAM_TEST_KILLS", "4"))
"""Workers killed at random moments during one run (full size: 20)."""

NUM_REDIS_LOSSES = int(os.environ.get("SANGAM_TEST_REDIS_LOSSES", "1"))
"""How often Redis loses everything during one run."""

NUM_MEMORY_REQUESTS = int(os.environ.get("SANGAM_TEST_MEMORY_REQUESTS", "0"))
"""Requests over which memory must stay flat (full size: 2000); 0 checks that nothing is held."""

CONCURRENCY = 16

SEED = int(os.environ.get("SANGAM_TEST_SEED", "0"))
"""Of the questions and of the moments at which processes die."""

MODEL = os.environ.get("SANGAM_TEST_MODEL", "small")
"""What the workers serve; only the shipped model's answers are checked for being right."""
