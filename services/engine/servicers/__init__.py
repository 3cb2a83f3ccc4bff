"""The calls of the contract, by what they are about: protobuf in, domain calls, protobuf out."""
