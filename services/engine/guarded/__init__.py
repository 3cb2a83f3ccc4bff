"""Engines that leave safety to their caller (vLLM, SGLang, verl's servers) behind the one backend that adds it."""
