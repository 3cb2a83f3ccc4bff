"""Protobuf to domain values and back: translation, and the checks of what only the wire can get wrong."""
