"""What only builds the embedded model: corpus, tokenizer, evaluation."""
