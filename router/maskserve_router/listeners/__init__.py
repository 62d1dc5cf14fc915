"""The HTTP and gRPC servers, their limits on connections and calls, and the operators' port."""
