"""KV cache geometry, device pool, host buffer, prefix index. Knows blocks, not requests."""
