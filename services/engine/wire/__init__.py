"""Between protobuf and the domain, for the servicers and for the backend that speaks to agents."""
