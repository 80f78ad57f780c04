"""Moving a block's KV between workers: transports, and the exchange that uses them."""
