"""The other side of benchmarks with servers: vLLM, a receiver of weights, clients of the gateway."""
