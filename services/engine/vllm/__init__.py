"""vLLM as an engine: how it is started, how it is called, and what is added to its workers."""
