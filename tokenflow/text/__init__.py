"""Text in the router process: tokenizers, chat templates, incremental decoding, stop strings.  No torch."""
