"""A worker: a front process that speaks gRPC and an engine process that runs the steps."""
