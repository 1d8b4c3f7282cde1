"""`vllm.grpc.engine.VllmEngine`: the same worker under the protocol of public gateways."""
