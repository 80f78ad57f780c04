"""The paper's figures from records of runs, measured or simulated alike."""
