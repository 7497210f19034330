"""An instance's HTTP face: OpenAI API, tokenizer, detokenizer. No torch."""
