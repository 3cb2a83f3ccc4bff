"""The rules of the replay buffer, pure: no gRPC, asyncio, clock or randomness; times and ids are passed in.

Every change is a plain call with plain arguments, decided and applied in one go: it raises and changes nothing, or it
succeeds. That is the seam for a journal, which can record the calls and replay them.
"""
