"""The HTTP and gRPC interfaces for clients, as functions of requests."""
