"""What clients may ask for over HTTP and gRPC, as functions of requests."""
