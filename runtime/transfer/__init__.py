"""Moving KV blocks from prefill to decode: transports, peer links, the hand-over."""
