"""The paper's evaluation in simulation: trials, claims, and the page that tells the outcome."""
