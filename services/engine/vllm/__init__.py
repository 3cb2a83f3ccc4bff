"""vLLM as an engine: how it is started, called and kept from hurting itself."""
