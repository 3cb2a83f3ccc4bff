"""The engine controller: replicas, their memory, their weights and their routes."""
