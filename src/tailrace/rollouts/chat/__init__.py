"""Messages to token ids and back: templates, tokenizer, bridging of turns, parsing of replies."""
