"""The pure part of the engine controller: no gRPC, no clock, no tasks; times and ids are handed in."""
