"""Multi-head latent attention (DeepSeek V3, Kimi K2, Moonlight, GLM-4.7-Flash): layer, attention on paths, decoding."""
