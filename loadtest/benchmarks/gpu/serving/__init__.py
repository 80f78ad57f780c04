"""The paper's Figure 8 on one GPU: latency against request rate, batched and one at a time."""
