"""The replay buffer: prompt groups from the moment they are added until they are consumed."""
