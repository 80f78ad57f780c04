"""From logits to commits: candidates on the device, one copy, then the unmasking rules."""
