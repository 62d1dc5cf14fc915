"""Ports: the HTTP and gRPC servers, what a connection may cost, and the operators' port."""
