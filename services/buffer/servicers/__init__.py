"""The calls of the replay buffer, by noun: protobuf to domain calls and back, nothing else."""
