"""Samples from vLLM and SGLang servers over HTTP."""
