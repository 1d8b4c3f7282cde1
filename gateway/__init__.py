"""The gateway: gRPC and OpenAI-compatible HTTP in front, workers behind."""
