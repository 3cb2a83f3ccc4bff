"""A real GRPO job on the CPU: a tiny transformer learns through real vLLM engines that are lent and taken back."""
