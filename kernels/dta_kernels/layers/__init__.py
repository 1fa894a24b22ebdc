"""Fused RMSNorm, rotary embedding, SwiGLU and weight gradients."""
