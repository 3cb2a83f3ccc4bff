"""The scheduler's rules without I/O: nothing in here knows gRPC, a clock, a disk or asyncio."""
