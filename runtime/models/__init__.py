"""One decoder, configured: Llama-family architectures, and the loaders of their weights."""
