"""The router: one OpenAI endpoint in front of all instances. No torch."""
