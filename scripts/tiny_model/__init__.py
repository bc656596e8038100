"""Builds the embedded model: corpus, tokenizer, evaluation. Not part of the wheel."""
